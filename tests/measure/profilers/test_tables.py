"""Tables of a trace in the record of its run, from real traces of one H200."""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest

from cs_systems.analysis.attribution.tables import TABLES
from cs_systems.analysis.diagnosis import diagnose
from cs_systems.analysis.replay import LaunchesFree, replayed
from cs_systems.analysis.replay.clean import Clean
from cs_systems.cli.profile import print_profile
from cs_systems.config import PRESETS, RunConfig, describe
from cs_systems.formulas.cost import PhaseCost
from cs_systems.measure.profilers._tables import costs_of, overhead, tables
from cs_systems.record import Measurement, Row, RunRecord, Sample
from cs_systems.report.pages.profile import of_record
from tests.test_record import ENVIRONMENT

DATA = Path(__file__).parents[2] / "data"
CONFIG = RunConfig(model=PRESETS["tiny"], profiler="nsys", steps=3)
COST: Row = {"model_flops": 1e9, "hardware_flops": 1e9, "bytes": 1e6}
CEILING: Row = {"precision": "fp32", "peak_flops_per_s": 67e12, "peak_bytes_per_s": 4.8e12, "source": "data sheet"}


def record(config: RunConfig = CONFIG, warmup: tuple[float, ...] = (9.0, 1.0, 1.2, 1.1)) -> RunRecord:
    samples = tuple(
        Sample(0, i < len(warmup), wall, p := {"forward": wall / 3, "backward": wall / 3}, p)
        for i, wall in enumerate((*warmup, 2.2, 2.2, 2.3))
    )
    cost = {f.name: COST.get(f.name, 0) for f in fields(PhaseCost)}
    results = {"cost": [{"phase": "forward", **cost}, {"phase": "step", **cost}], "ceiling": [CEILING]}
    measurement = Measurement("cuda_event", samples, 0.0)
    return RunRecord("key", config.to_dict(), "ok", 0, None, ENVIRONMENT, measurement, results=results)


@pytest.fixture(scope="module", params=["nsys", "kineto"])
def trace(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "kineto":
        return DATA / "kineto_h200_step.json.gz"
    path = tmp_path_factory.mktemp("nsys") / "step.sqlite"
    path.write_bytes(gzip.decompress((DATA / "nsys_h200_step.sqlite.gz").read_bytes()))
    return path


def test_nsys_and_kineto_give_the_same_tables(trace: Path) -> None:
    found = tables(trace, record())
    results = found.results
    assert found.warnings == ()
    assert found.artifacts == {}
    assert found.profile is not None
    seen, made, replay = found.profile
    assert replay() is replay()  # the steps are replayed once, for the tables and for the page
    page = of_record(record(), seen, made, replay)
    assert "Replay of step" in page
    assert "The median step took 2.20 s while profiled and 1.10 s before." in page
    assert f"<h1>{describe(CONFIG)}</h1>" in page
    operators = {"operators"} if trace.name.startswith("kineto") else set()  # nsys records none
    assert set(results) == {*TABLES, *operators, "coverage", "overhead", "notes", "what_if"}
    (coverage,) = results["coverage"]
    assert (coverage["steps"], coverage["phase_coverage"]) == (3, 1.0)
    assert coverage["kernels"] == 714
    forward = next(row for row in results["phases"] if (row["phase"], row["family"]) == ("forward", "all"))
    assert forward["achieved_flops_per_s"] == pytest.approx(1e9 / forward["time_s"])
    assert forward["ceiling"] == "compute"
    assert results["steps"][0]["event_s"] == pytest.approx(2 / 3 * 2.2)
    assert {note["table"] for note in results["notes"]} <= {None, *TABLES, *operators}


@pytest.mark.parametrize(
    ("compile", "words"),
    [
        ("default", "0.0% of the kernel time is in kernels that are fused over several"),
        ("reduce-overhead", "use the compile mode default"),
    ],
)
def test_compiled_model_has_note_on_layers(compile: str, words: str, trace: Path) -> None:
    notes = tables(trace, record(replace(CONFIG, compile=compile))).results["notes"]
    assert any(words in note["note"] for note in notes if note["table"] == "layers")


def test_record_with_tables_round_trips_json_and_prints(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tables(trace, record()).results
    files = {"page": "a.html", "sqlite": "a.sqlite"}
    full = replace(record(), results=record().results | results, artifacts=files)
    print_profile(RunRecord.from_dict(json.loads(full.to_json())), tmp_path)
    shown = capsys.readouterr().out
    assert "under nsys: median step 2.20 s while profiled, 1.10 s before: +100.0%" in shown
    for text in ("phases by kernel family", "kernels by time", "inside attention", "GPU idle time by cause", "TFLOP/s"):
        assert text in shown
    assert "belongs to a phase" in shown
    page, last = shown.splitlines()[-2:]
    one = r" \(opens at step \d, which took .* ms; the tables are means over 3 steps of .* ms on average\)"
    assert re.fullmatch(re.escape(f"page: {tmp_path / 'a.html'}") + one, page)
    assert last == f"sqlite: {tmp_path / 'a.sqlite'}"


def test_expectation_of_a_record_is_the_replay_s_for_the_step_without_a_profiler(trace: Path) -> None:
    recorded = RunRecord.from_dict(json.loads(with_tables(trace, record()).to_json()))
    (found, *_) = diagnose([recorded]).diagnoses
    assert found.code == "launch-bound"
    assert found.now == pytest.approx(1.1)
    assert found.expected is not None
    assert found.expected.how == "replayed"
    told = next(row for row in recorded.results["what_if"] if row["what_if"] == "launches=free")
    assert found.expected.value == told["expected_s"]
    assert told["low_s"] <= found.expected.low <= found.expected.value  # no shorter than half of the kernels
    seen = tables(trace, record()).profile
    assert seen is not None
    clean = Clean.of(record().clean or Measurement("cuda_event", (), 0.0))
    answer = replayed(seen[0]).what_if(LaunchesFree(), clean=clean)
    assert found.expected.value == getattr(answer, "value", None)


def test_record_without_clean_steps_keeps_no_replay(trace: Path) -> None:
    cold = with_tables(trace, record(warmup=(9.0, 1.0)))
    assert cold.results["what_if"] == []


def with_tables(trace: Path, of: RunRecord) -> RunRecord:
    return replace(of, results={**of.results, **tables(trace, of).results})


def test_overhead_is_unknown_without_enough_warm_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert overhead(record())[0]["recorded_to_not_recorded"] == pytest.approx(2.0)
    cold = record(warmup=(9.0, 1.0))
    assert overhead(cold)[0]["not_recorded_s"] is None
    print_profile(replace(cold, results={"overhead": overhead(cold)}), Path("runs"))
    assert "the overhead is unknown with fewer than 3 warm-up steps" in capsys.readouterr().out


def test_overhead_text_fits_the_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("cs_systems.cli._memory_text.terminal_width", lambda: 80)
    print_profile(replace(record(), results={"overhead": overhead(record())}), Path("runs"))
    lines = capsys.readouterr().out.splitlines()
    assert "median step 2.20 s while profiled, 1.10 s before" in " ".join(" ".join(lines).split())
    assert max(map(len, lines)) <= 80


STEP_COST = {
    "forward": PhaseCost(70, 80, 1000, 30, 400),
    "backward": PhaseCost(140, 170, 2000, 70, 800),
    "optimizer": PhaseCost(0, 0, 700, 0, 0),
}


def costed(**costs: PhaseCost) -> RunRecord:
    return replace(record(), results={"cost": [{"phase": phase, **asdict(c)} for phase, c in costs.items()]})


def test_score_products_belong_to_the_kernels_that_ran() -> None:
    unfused = {"matmul", "softmax", "elementwise"}
    families = {"forward": unfused | {"attention"}, "backward": unfused, "optimizer": {"optimizer", "copy"}}
    found = costs_of(costed(**STEP_COST), families).by_phase
    split = {key: (c.hardware_flops, c.bytes) for key, c in found.items() if key[1] != "all"}
    assert split == {
        ("forward", "attention"): (30, 400),
        ("forward", "matmul"): (50, 600),
        ("backward", "matmul"): (170, 2000),
        ("optimizer", "optimizer"): (0, 700),
    }
    assert {key[0] for key in found if key[1] == "all"} == {*STEP_COST}


def test_cost_without_family_counts_is_not_split() -> None:
    """The record is of an older version, or its workload declares only the total."""
    old = costed(forward=PhaseCost(70, 80, 1000))
    without = [
        {name: row[name] for name in ("phase", "model_flops", "hardware_flops", "bytes")} for row in old.results["cost"]
    ]
    for results in (old.results, {"cost": without}):
        assert [*costs_of(replace(old, results=results), {"forward": {"matmul"}}).by_phase] == [("forward", "all")]


def test_family_of_real_trace_has_rate_and_ceiling(trace: Path) -> None:
    whole = costed(forward=PhaseCost(10**9, 10**9, 10**6, 10**8, 10**5))
    whole = replace(whole, results=whole.results | {"ceiling": [CEILING]})
    rows = tables(trace, whole).results["phases"]
    by = {(row["phase"], row["family"]): row for row in rows}
    matmul = by["forward", "matmul"]
    assert matmul["flops"] == 10**9
    assert matmul["achieved_flops_per_s"] == pytest.approx(1e9 / matmul["time_s"])
    assert matmul["ceiling"] == "compute"
    assert matmul["ceiling_share"] > by["forward", "all"]["ceiling_share"]
    assert by["forward", "elementwise"]["flops"] is None
