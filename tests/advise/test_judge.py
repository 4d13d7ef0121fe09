"""Judgement of a candidate by its records: which steps count, and when processes are too few."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cs_systems.advise.judge import Seen, is_uneven, judge_time, step_s, why_missing
from cs_systems.config import RunConfig
from cs_systems.record import Measurement, RunRecord, Sample

USUAL_S, EVERY = 0.010, 4


def process(slow_s: float, noise: float = 0.0, place: str | None = "train.py:9", rows: bool = True) -> RunRecord:
    """Return a loop of 12 steps in which every fourth step takes `slow_s`."""
    times = [(slow_s if n % EVERY == EVERY - 1 else USUAL_S) * (1 + noise) for n in range(12)]
    extra_s = sum(times) - 12 * USUAL_S
    row: Any = {"steps": 3, "every": EVERY, "extra_s": extra_s, "total_s": sum(times), "place": place}
    samples = [Sample(n % 2, False, each, {}, {}) for n, each in enumerate(times)]
    results: Any = {"slow_steps": [row]} if rows else {}
    return RunRecord(
        "", RunConfig().to_dict(), "ok", measurement=Measurement("perf_counter", samples, 0.1), results=results
    )


def test_loop_with_an_evaluation_is_judged_by_its_mean_step() -> None:
    before, after = [process(0.090), process(0.090, 0.01)], [process(0.030), process(0.030, 0.01)]
    assert step_s(before[0]) == pytest.approx(0.030)
    found = judge_time(Seen(before, after))
    assert found.is_gain is True
    assert found.ratio == pytest.approx(0.5, rel=0.02)
    assert judge_time(Seen(before[:1], after[:1])).is_gain is None  # one number a process shows no noise


@pytest.mark.parametrize(("faster", "is_sure"), [(1.3, False), (2.5, True)])
def test_one_process_a_side_is_sure_of_large_differences_alone(faster: float, is_sure: bool) -> None:
    before, after = [process(USUAL_S)], [process(USUAL_S, 1 / faster - 1)]
    assert judge_time(Seen(before, after))[::4] == (True, is_sure)
    others = [[process(USUAL_S), process(USUAL_S, 0.0001)]]
    assert judge_time(Seen(before, after, others=others)).is_sure, "the others show how much processes vary"
    assert judge_time(Seen(before * 2, after * 2)).is_sure


@pytest.mark.parametrize("unlike", [{"place": None}, {"rows": False}])
def test_slow_steps_of_unknown_cause_do_not_count(unlike: Any) -> None:
    record = process(0.090, **unlike)
    assert not is_uneven(record)
    assert step_s(record) == pytest.approx(USUAL_S)
    assert is_uneven(process(0.0146))  # 10.3% of the loop
    assert not is_uneven(process(0.0142))  # 9.5%


@pytest.mark.parametrize(("waited_s", "is_mean"), [(0.0009, False), (0.0011, True)])
def test_steps_that_wait_for_batches_count_in_the_mean(waited_s: float, is_mean: bool) -> None:
    """Workers deliver batches in bursts: the median step of a loop that waits for them is not its pace."""
    record = process(0.0)
    assert record.measurement is not None
    samples = [
        replace(sample, wall_s=0.01, phases_s={"input": waited_s, "forward": 0.005})
        for sample in record.measurement.samples
    ]
    assert is_uneven(replace(record, measurement=replace(record.measurement, samples=samples))) is is_mean


@pytest.mark.parametrize(("compile_s", "is_mean"), [(0.013, False), (0.014, True), (None, False)])
def test_steps_that_compile_count_in_the_mean(compile_s: float | None, is_mean: bool) -> None:
    """12 steps of 10 ms, of which the last compiles for 9.8 or 10.4% of the whole loop."""
    record = process(USUAL_S, rows=False)
    assert record.measurement is not None
    *usual, last = record.measurement.samples
    samples = (*usual, replace(last, wall_s=last.wall_s + (compile_s or 0.0), compile_s=compile_s))
    assert is_uneven(replace(record, measurement=replace(record.measurement, samples=samples))) is is_mean


@pytest.mark.parametrize(
    ("window_s", "goal", "reason"),
    [
        (0.4, "energy", "the timed steps take 400 ms, too short for the counter of joules; give more --steps"),
        (None, "energy", "no counter of joules can be read here"),
        (0.4, "time", "it has no valid time"),
    ],
)
def test_start_without_the_goal_s_number_says_why(window_s: float | None, goal: str, reason: str) -> None:
    row: Any = {"source": "nvml", "steps": 12, "window_s": window_s, "energy_j": None, "idle_w": None}
    record = replace(process(0.01), results={"energy": [row]} if window_s else {})
    assert why_missing(goal, record).startswith(reason)


def steady(step_s: float) -> RunRecord:
    return process(step_s, rows=False) if step_s == USUAL_S else process(USUAL_S, step_s / USUAL_S - 1, rows=False)


def test_pairs_are_judged_by_their_ratios_once_they_are_enough() -> None:
    """The machine becomes three times as slow; each candidate takes 0.8 of the time of its neighbour."""
    slow = [1.0, 3.0, 1.2, 2.5, 1.1, 2.8]
    best = [steady(USUAL_S * each) for each in slow]
    noise = (0.98, 1.02, 1.0, 0.99, 1.01, 1.0)
    candidate = [steady(0.8 * USUAL_S * each * more) for each, more in zip(slow, noise, strict=True)]
    pairs = [*zip(best, candidate, strict=True)]
    assert judge_time(Seen(best, candidate)).is_gain is None
    found = judge_time(Seen(best, candidate, pairs=pairs))
    assert found.is_gain is True
    assert found.ratio == pytest.approx(0.8, rel=0.01)
    assert judge_time(Seen(best, candidate, times=0.8, pairs=pairs)).is_gain is None, "the batch is smaller, too"
    assert judge_time(Seen(best, candidate, times=0.7, pairs=pairs)).is_gain is False
    assert judge_time(Seen(best, candidate, pairs=pairs[:5])).is_gain is None, "one record has no pair"
    few = judge_time(Seen(best[:1], candidate[:1], pairs=pairs[:1], other_pairs=[pairs[1:]]))
    assert few[::4] == (True, False), "one pair, by the variation of others, is sure of large differences alone"
