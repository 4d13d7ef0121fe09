"""Merging of the ranks' records: the straggler's samples, with a row for each rank."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cs_systems.config import RunConfig
from cs_systems.core.caveats import Caveat
from cs_systems.measure.runtime.channel import CellRecord
from cs_systems.measure.runtime.stragglers import merged, verdict
from cs_systems.record import Measurement, RunRecord, Sample


def record(steps: list[tuple[float, float]], peak: int | None = None, codes: tuple[str, ...] = ()) -> RunRecord:
    """Return a rank's record from the (compute, collective) seconds of each step; the first step is a warm-up."""
    samples = tuple(
        Sample(0, i == 0, compute + sent, {"compute": compute, "collective": sent}, {}, compiles=0)
        for i, (compute, sent) in enumerate(steps)
    )
    measurement = Measurement("monotonic", samples, 1.0 + len(codes), peak, None)
    warnings = tuple(Caveat(code, "seen", "do") for code in codes)
    results = {"memory": [{"predicted_peak_bytes": None, "peak_allocated_bytes": peak}]}
    return RunRecord("key", RunConfig().to_dict(), "ok", measurement=measurement, warnings=warnings, results=results)


# In its timed steps rank 1 computes for 2 s longer, for which rank 0 waits; 1 s is transfer.
FAST, SLOW = [(9.0, 9.0), (1.0, 3.0), (1.0, 3.0)], [(9.0, 9.0), (3.0, 1.0), (3.0, 1.0)]
TOGETHER = merged([record(FAST, 5, ("unstable",)), record(SLOW, 7, ("unstable", "few-samples"))])


def test_each_sample_comes_from_the_straggler() -> None:
    """Both steps last 4 s, because rank 0 waits for rank 1."""
    assert TOGETHER.measurement is not None
    assert TOGETHER.measurement.timed[0].phases_s == {"compute": 3.0, "collective": 1.0}
    assert TOGETHER.measurement.durations_s("step") == [4.0, 4.0]
    assert TOGETHER.measurement.setup_s == 3.0
    assert [s.warmup for s in TOGETHER.measurement.samples] == [True, False, False]


steps = st.lists(st.tuples(st.floats(1e-6, 10.0), st.floats(1e-6, 10.0)), min_size=3, max_size=3)


@given(st.lists(steps, min_size=2, max_size=4))
def test_phases_of_a_sample_are_those_of_one_rank_and_add_up_to_its_step(ranks: list[Any]) -> None:
    records = [record(of) for of in ranks]
    measurement = merged(records).measurement
    assert measurement is not None
    own = [of.measurement.samples for of in records if of.measurement]
    for sample, *of_ranks in zip(measurement.samples, *own, strict=True):
        assert sum(sample.phases_s.values()) == pytest.approx(sample.wall_s, rel=0.01)
        assert (sample.wall_s, sample.phases_s) in [(one.wall_s, one.phases_s) for one in of_ranks]
        assert sample.wall_s == pytest.approx(max(one.wall_s for one in of_ranks), rel=0.01)


def test_straggler_is_the_rank_that_ends_last_even_if_others_start_a_phase_later() -> None:
    found = merged([record([(1.0, 9.0)] * 3), record([(5.0, 1.0)] * 3)]).measurement
    assert found is not None
    assert found.timed[0].phases_s == {"compute": 1.0, "collective": 9.0}
    assert found.durations_s("step") == [10.0, 10.0]


def test_waiting_is_separated_from_transfer() -> None:
    rows = {(row["rank"], row["phase"]): row for row in TOGETHER.results["ranks"]}
    assert rows[0, "collective"]["wait_s"] == 2.0
    assert rows[1, "collective"]["wait_s"] == 0.0
    for rank in (0, 1):
        assert rows[rank, "collective"]["median_s"] - rows[rank, "collective"]["wait_s"] == 1.0
        assert rows[rank, "compute"]["wait_s"] == 0.0
        assert rows[rank, "step"]["median_s"] == 4.0


def test_peak_is_the_maximum_over_ranks_or_unknown() -> None:
    assert TOGETHER.measurement is not None
    assert TOGETHER.measurement.peak_allocated_bytes == 7
    assert TOGETHER.results["memory"][0]["peak_allocated_bytes"] == 7
    peaks = [row["peak_allocated_bytes"] for row in TOGETHER.results["ranks"] if row["phase"] == "step"]
    assert peaks == [5, 7]
    unknown = merged([record(FAST), record(SLOW)])
    assert unknown.measurement is not None
    assert unknown.measurement.peak_allocated_bytes is None


def test_caveat_of_several_ranks_appears_once() -> None:
    assert [w.code for w in TOGETHER.warnings] == ["unstable", "few-samples"]


def test_ranks_with_different_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        merged([record(FAST), record(SLOW[:-1])])


def answer(status: str, reason: str | None, of_peers: bool = False) -> CellRecord:
    return CellRecord(0, {**dataclasses.asdict(record(FAST)), "status": status, "reason": reason}, of_peers)


OK, LOST = answer("ok", None), answer("error", "Connection closed by peer", of_peers=True)
NAMES = ["rank 0 on cpu", "rank 1 on cpu"]


@pytest.mark.parametrize(
    ("answers", "status", "reason"),
    [
        ({0: OK, 1: OK}, "ok", None),
        ({0: OK, 1: answer("oom", "too much")}, "oom", "rank 1 on cpu: too much"),
        ({0: LOST, 1: answer("error", "a mistake")}, "error", "rank 1 on cpu: a mistake"),  # although it replied later
        ({1: answer("oom", "too much"), 0: answer("error", "a mistake")}, "oom", "rank 1 on cpu: too much"),
        ({0: LOST}, "error", "rank 0 on cpu: Connection closed by peer"),
        ({0: answer("error", "a mistake")}, "error", "rank 0 on cpu: a mistake"),
        ({1: answer("error", "a mistake"), 0: answer("error", "a mistake")}, "error", "a mistake"),
        (
            {0: OK, 1: answer("unavailable", "no such thing: leave it out")},
            "unavailable",
            "no such thing: leave it out",
        ),
    ],
)
def test_failure_names_its_rank(answers: dict[int, CellRecord], status: str, reason: str | None) -> None:
    found = verdict(answers, NAMES)
    assert (found.status, found.reason) == (status, reason)


def counted(steps: list[tuple[float, float]], **ran: int | None) -> RunRecord:
    made = record(steps)
    return dataclasses.replace(
        made,
        config=made.config | {"world_size": 2, "strategy": "ddp_naive"},
        results={**made.results, "ran": [{"samples": None, **ran}]},
    )


def test_tokens_of_ranks_whose_batches_differ_are_added() -> None:
    equal = merged([counted(FAST, tokens=8), counted(SLOW, tokens=8)])
    assert equal.results["ran"] == [{"samples": None, "tokens": 8}]
    ranks = [counted(FAST, tokens=None, timed_tokens=10), counted(SLOW, tokens=4)]
    assert merged(ranks).results["ran"] == [{"samples": None, "tokens": None, "timed_tokens": 10 + 2 * 4}]
    unknown = merged([counted(FAST, tokens=None, timed_tokens=None), counted(SLOW, tokens=4)])
    assert unknown.results["ran"][0]["timed_tokens"] is None
