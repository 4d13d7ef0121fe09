"""Tests of the total time of a loop and its division, in every output."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cs_systems.analysis.comparison.loop_time import loop_time, sentence, whole_loop_time
from cs_systems.analysis.timing_caveats import of_spread
from cs_systems.config import RunConfig
from cs_systems.record import Measurement, RunRecord, Sample
from cs_systems.report.pages import records as page
from cs_systems.report.tables.records import render
from tests.test_record import ENVIRONMENT

DIVISION = (
    "42 steps took 4.45 s: 2 warm-up steps in 200 ms (4%), 1 compiling step in 100 ms (2%), 35 steps in 700 ms "
    "(16%, median 20.0 ms), 4 slow steps, every 10, in 3.45 s (78%, median 862 ms)"
)


def loop(wall_s: list[float], warmup: int = 2, compiles: int = 0, repeat: int = 0, **fields: Any) -> RunRecord:
    """Return the record of a loop; after the warm-up, `compiles` steps compile."""
    samples = tuple(
        Sample(0, i < warmup, s, {"forward": s / 2}, {"forward": s / 4}, compiles=int(warmup <= i < warmup + compiles))
        for i, s in enumerate(wall_s)
    )
    config = RunConfig(workload="loop mine", warmup=warmup, steps=len(wall_s) - warmup, device="cpu")
    measurement = Measurement("monotonic", samples, 0.0)
    return RunRecord(f"key{repeat}", config.to_dict(), "ok", repeat, None, ENVIRONMENT, measurement, **fields)


def evaluated(repeat: int = 0) -> RunRecord:
    """Return a loop that evaluates in every tenth timed step."""
    timed = [0.02 * (1 + 0.01 * (i % 3 - 1)) + (0.842 if i % 10 == 9 else 0.0) for i in range(39)]
    timed.append(0.862)
    return loop([0.1, 0.1, 0.1, *timed[1:]], compiles=1, repeat=repeat)


def test_time_divides_among_warmup_compiling_usual_and_slow_steps() -> None:
    record = evaluated()
    assert record.measurement
    rows = loop_time(record.measurement)
    assert [(row["kind"], row["steps"], row["every"]) for row in rows] == [
        ("warm-up", 2, None),
        ("compiling", 1, None),
        ("usual", 35, None),
        ("slow", 4, 10),
    ]
    assert sum(row["total_s"] for row in rows) == pytest.approx(sum(s.wall_s for s in record.measurement.samples))
    assert sum(row["share"] for row in rows) == pytest.approx(1)
    assert sentence(rows) == DIVISION


OUTPUTS: dict[str, Callable[[RunRecord], str]] = {
    "terminal": lambda record: render([record], width=80),
    "markdown": lambda record: render([record], "markdown"),
    "prompt": repr,
    "notebook": lambda record: record._repr_html_(),
    "page": lambda record: page.render([record]),
}


@pytest.mark.parametrize("output", OUTPUTS)
def test_output_of_a_loop_shows_the_division_of_its_time(output: str) -> None:
    assert DIVISION in " ".join(OUTPUTS[output](evaluated()).split())


def test_csv_holds_the_total_of_the_timed_steps() -> None:
    record = evaluated()
    rows = csv.DictReader(io.StringIO(render([record], "csv")))
    (total_s,) = (float(row["total_s"]) for row in rows if row["phase"] == "step")
    assert record.measurement
    assert total_s == pytest.approx(sum(record.measurement.durations_s("step")))


def test_each_repeat_of_a_loop_has_its_line() -> None:
    text = " ".join(render([evaluated(0), evaluated(1)]).split())
    assert f"repeat 0: {DIVISION} repeat 1: {DIVISION}" in text


def test_loop_of_one_kind_shows_its_total_alone() -> None:
    assert "32 steps took 6.50 s: 2 warm-up steps in 500 ms (8%), 30 steps in 6.00 s (92%, median 200 ms)" in " ".join(
        render([loop([0.3, 0.2, *[0.2] * 30])]).split()
    )


def test_unknown_times_have_no_division() -> None:
    record = loop([0.1, float("inf"), 0.1])
    assert record.measurement
    assert loop_time(record.measurement) == []
    assert sentence([]) == ""


def test_profiled_loop_and_other_cells_have_no_line() -> None:
    record = evaluated()
    profiled = replace(record, config=record.config | {"profiler": "kineto"})
    built_in = replace(record, config=record.config | {"workload": "train_step"})
    assert "steps took" not in render([profiled]) + render([built_in])


def test_evaluation_in_each_tenth_step_gives_no_caveat_of_noise_or_short_warmup() -> None:
    timed = [0.02 * (1 + 0.01 * (i % 3 - 1)) + (0.4 if i % 5 == 0 else 0.0) for i in range(40)]
    record = loop(timed, warmup=0)
    assert record.measurement
    assert [*of_spread(record.measurement, "step", of_loop=True)] == []


def test_steps_of_one_kind_are_not_divided() -> None:
    assert sentence(whole_loop_time([0.2] * 30)) == "30 steps took 6.00 s, the median 200 ms"


def test_steps_that_sampling_makes_longer_have_their_own_row() -> None:
    """A quarter longer, the sampled steps are no usual ones; a slow step among them stays with the slow ones."""
    times_s = [0.001] * 20 + [0.002] * 10 + [0.001] * 5
    times_s[5] = times_s[15] = 0.1
    times_s[25] = 0.2
    rows = whole_loop_time(times_s, sampled=range(20, 30), longer=2.0)
    assert [(row["kind"], row["steps"], row["every"]) for row in rows] == [
        ("sampled", 9, None), ("usual", 23, None), ("slow", 3, 10)
    ]  # fmt: skip
    assert sentence(rows).startswith(
        "35 steps took 441 ms: 9 sampled steps in 18.0 ms (4%, median 2.00 ms), 23 steps in "
    )
    assert [row["kind"] for row in whole_loop_time([0.001] * 20, sampled=range(10, 20), longer=1.24)] == ["usual"]


def test_median_is_not_told_next_to_a_single_step() -> None:
    """Nor is the number of steps next to their median, as if the total were a product."""
    times_s = [0.001] * 20
    times_s[7] = 0.5
    assert sentence(whole_loop_time(times_s)) == (
        "20 steps took 519 ms: 19 steps in 19.0 ms (4%, median 1.00 ms), 1 slow step in 500 ms (96%)"
    )
