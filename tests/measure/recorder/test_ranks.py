"""Tests of recorders on the ranks of one job, which write one record of the stragglers."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
from torch.nn.parallel import DistributedDataParallel

from cs_systems.analysis.diagnosis import diagnose
from cs_systems.core.caveats import Caveat
from cs_systems.core.tables import first_row
from cs_systems.measure.recorder._ranks import merged_loop
from cs_systems.readers import read
from cs_systems.record import read_records
from cs_systems.report.tables.records import render
from tests.forked_python import torchrun
from tests.forks import started_ranks
from tests.measure.recorder import rank_causes
from tests.measure.recorder.loops import train


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of two loops of one job: one with a slower rank, and one that a rank leaves early."""
    out = tmp_path_factory.mktemp("two ranks")
    done = torchrun("-m", "tests.measure.recorder.two_ranks", str(out), timeout_s=110)
    assert sorted(done.stdout.splitlines()) == [
        *("rank 0 wrote 1 apart", "rank 0 wrote 2 together", "rank 1 wrote 0 apart", "rank 1 wrote 0 together"),
    ], done.stderr
    return out


@pytest.mark.timeout(120)
def test_ranks_of_torchrun_write_one_record_of_the_straggler_and_one_profile(two_ranks: Path) -> None:
    out = two_ranks / "together"
    record, profiled = read_records(out)[0]
    assert (record.status, record.config["world_size"]) == ("ok", 2)
    assert record.measurement is not None
    assert len(record.measurement.timed) == 4
    assert min(record.measurement.durations_s("step")) >= 0.05  # for which rank 0 waits in backward
    for sample in record.measurement.samples:
        assert sum(sample.phases_s.values()) == pytest.approx(sample.wall_s, rel=0.01)
    ranks = {(row["rank"], row["phase"]): row for row in record.results["ranks"]}
    assert ranks[0, "slow"]["median_s"] < 0.05 <= ranks[1, "slow"]["median_s"]
    assert {row["wait_s"] for row in ranks.values()} == {None}
    assert "loop ranks on" in render([record])
    assert "missing-ranks" not in [c.code for c in record.warnings]
    assert profiled.status == "ok"
    slow = [total_s(out / profiled.artifacts[trace], "slow") for trace in ("trace", "trace_rank1")]
    assert slow[0] < 3 * 0.05 <= slow[1]


def total_s(trace: Path, name: str) -> float:
    """Return the time of all ranges of that name in a trace."""
    return sum(found.end_s - found.start_s for found in read(trace).ranges.named(name.__eq__))


@pytest.mark.timeout(120)
def test_rank_that_left_its_loop_early_does_not_block_others(two_ranks: Path) -> None:
    (record,) = read_records(two_ranks / "apart")[0]
    assert record.measurement is not None
    assert len(record.measurement.timed) == 1
    assert "few-samples" in [c.code for c in record.warnings]


def test_merged_record_has_the_slowest_rank_and_names_missing_ranks(tmp_path: Path) -> None:
    one, _ = train(tmp_path / "one")
    (record,) = one.records
    measurement = record.measurement
    assert measurement is not None
    slower = [
        replace(s, wall_s=s.wall_s + 1, phases_s={**s.phases_s, "forward": 1.0, "own": 2.0}, submit_s=s.submit_s)
        for s in measurement.samples
    ]
    other = replace(record, measurement=replace(measurement, samples=tuple(slower[:3])))
    whole = merged_loop({0: record, 2: other}, [1])
    assert whole.measurement is not None
    assert [s.wall_s for s in whole.measurement.timed] == [s.wall_s for s in slower[1:3]]
    assert whole.measurement.durations_s("own") == [2.0, 2.0]
    assert median(whole.measurement.durations_s("forward")) == 1.0
    assert {row["rank"] for row in whole.results["ranks"]} == {0, 2}
    caveat = next(c for c in whole.warnings if c.code == "missing-ranks")
    assert caveat.message == "no times of rank 1"


@pytest.mark.parametrize(("walls", "spread"), [((1.0, 1.0, 2.0), "80"), ((1.0, 1.0, 1.0), None)])
def test_spread_of_a_step_uses_the_slowest_rank_of_each_sample(
    walls: tuple[float, ...], spread: str | None, tmp_path: Path
) -> None:
    (record,) = train(tmp_path)[0].records
    assert record.measurement is not None
    own = Caveat("unstable", "of one rank", "")
    ranks = {}
    for rank, factor in enumerate((1, 10)):  # the second is the straggler
        warm, *_ = record.measurement.samples
        timed = [replace(warm, warmup=False, wall_s=wall * factor) for wall in walls]
        ranks[rank] = replace(
            record,
            measurement=replace(record.measurement, samples=(warm, *timed)),
            warnings=(own,) if rank == 0 else (),
        )
    messages = [caveat.message for caveat in merged_loop(ranks, []).warnings]
    assert messages == ([f"noisy: steps vary by {spread}%"] if spread else [])


def test_missing_rank_gives_the_reason_that_it_left(tmp_path: Path) -> None:
    (good,) = train(tmp_path / "good")[0].records
    with pytest.warns(RuntimeWarning, match="no step was timed"):
        (failed,) = train(tmp_path / "bad", 1)[0].records
    caveat = next(c for c in merged_loop({0: good, 1: failed}, []).warnings if c.code == "missing-ranks")
    assert caveat.message == (
        "no times of rank 1: the loop ended after 1 of 1 warm-up steps; let it run for at least 4 steps"
    )


@pytest.fixture(scope="module")
def of_causes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Return the folder of the loops with a cause each, and what their rank 0 printed."""
    out = tmp_path_factory.mktemp("causes")
    first, second = started_ranks("-m", "tests.measure.recorder.rank_causes", str(out), timeout_s=110)
    return out, first.stdout.splitlines() or [first.stderr, second.stderr]


@pytest.mark.timeout(120)
def test_observed_ranks_compute_the_same_and_are_left_as_they_were(of_causes: tuple[Path, list[str]]) -> None:
    assert of_causes[1] == [*(f"{kind} same results" for kind in rank_causes.KINDS), "all put back"]


@pytest.mark.timeout(120)
def test_late_rank_is_named_with_its_line(of_causes: tuple[Path, list[str]]) -> None:
    (record,) = read_records(of_causes[0] / "sleeps")[0]
    lines = Path(rank_causes.__file__).read_text().splitlines()
    line = next(n for n, text in enumerate(lines, 1) if text.endswith("# pause of one rank"))
    first = diagnose([record]).causes[0]
    assert re.match(
        r"rank 1 delays the others by .* of each step \(\d+%\), because it spends .* longer in metrics\(\) at "
        rf"rank_causes.py:{line}, time.sleep: remove the pause; not below ",
        first,
    )


EXCHANGED = {
    "passes": {"wrapper": "DistributedDataParallel", "passes": 3, "reduces": 3, "early": 2},
    "no_sync": {"passes": 3, "reduces": 1, "early": 0},
    "buckets": {"small": 12, "are_gradients": True, "early": 0},
    "tensors": {"wrapper": "", "reduces": 12, "small": 12, "are_gradients": True},
    "searches": {"marked": 12, "unused": 0},
    "batch": {"early": 0, "marked": 0, "unused": None},
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", EXCHANGED)
def test_exchange_of_the_ranks_is_counted(kind: str, of_causes: tuple[Path, list[str]]) -> None:
    (record,) = read_records(of_causes[0] / kind)[0]
    row = first_row(record.results, "loop_exchange")
    assert {name: row[name] for name in EXCHANGED[kind]} == EXCHANGED[kind]


@pytest.mark.timeout(120)
def test_buffers_that_each_forward_sends_are_named_with_its_line(of_causes: tuple[Path, list[str]]) -> None:
    (record,) = read_records(of_causes[0] / "buffers")[0]
    lines = Path(rank_causes.__file__).read_text().splitlines()
    line = next(n for n, text in enumerate(lines, 1) if text.endswith("# forward"))
    sent = {row["place"]: row for row in record.results["loop_collectives"]}[f"rank_causes.py:{line}"]
    assert sent["option"] in inspect.signature(DistributedDataParallel).parameters
    names = ("name", "phase", "callee", "count", "size_bytes", "changed_bytes")
    assert [sent[name] for name in names] == ["broadcast", "forward", "model", 1, 1 << 20, 0]


@pytest.mark.timeout(120)
def test_model_that_each_rank_trains_alone_is_named_unless_the_ranks_average_it(
    of_causes: tuple[Path, list[str]],
) -> None:
    kinds = (*rank_causes.ALONE, "evaluates", "passes")
    found = {kind: read_records(of_causes[0] / kind)[0][0].results.get("unreduced_gradients") for kind in kinds}
    (row,) = found.pop("module") or ()
    assert (row["model"], row["parameters"], row["ranks"]) == ("Sequential", 12, 2)
    assert row["steps"] >= 3
    assert found == dict.fromkeys(found)


@pytest.mark.timeout(120)
def test_gradients_that_the_ranks_reduce_in_vain_are_named_unless_they_are_frozen(
    of_causes: tuple[Path, list[str]],
) -> None:
    found = {kind: read_records(of_causes[0] / kind)[0][0].results.get("dropped_gradients")
             for kind in rank_causes.ADVERSARIAL}  # fmt: skip
    lines = Path(rank_causes.__file__).read_text().splitlines()
    line = next(n for n, text in enumerate(lines, 1) if text.endswith("# through the adversary"))
    (row,) = found["adversary"] or ()
    assert (row["parameters"], row["first"], row["place"]) == (4, "Sequential.0.weight", f"rank_causes.py:{line}")
    assert 0.1 < row["share"] < 0.3
    assert 0.25 < row["reduced_share"] < 0.5
    assert found["frozen_adversary"] is None


@pytest.mark.timeout(120)
def test_stages_and_experts_that_wait_are_named(of_causes: tuple[Path, list[str]]) -> None:
    causes = {kind: diagnose(read_records(of_causes[0] / kind)[0]).causes for kind in ("stages", "tokens")}
    assert re.match(r"[3-9]\d% of the step the stages of a pipeline wait in sends and receives", causes["stages"][0])
    assert causes["tokens"][0].startswith("rank 1 receives 1.8 times the mean of all ranks in all-to-all, and delays")


@pytest.mark.timeout(120)
def test_rank_with_a_larger_batch_is_distinguished_from_a_slower_rank(of_causes: tuple[Path, list[str]]) -> None:
    (record,) = read_records(of_causes[0] / "batch")[0]
    late = first_row(record.results, "late_rank")
    assert (late["rank"], late["work"], late["batch_times"]) == (1, "batch", 512.0)
