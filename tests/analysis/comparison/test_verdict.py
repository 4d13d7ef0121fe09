"""Verdict of a run: the fastest cell over the first, with the interval, if the cells differ in one field."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from cs_systems.analysis.comparison.verdict import verdict
from cs_systems.config import RunConfig
from cs_systems.record import Measurement, RunRecord, Sample


def timed(walls: list[float], **fields: Any) -> RunRecord:
    samples = tuple(Sample(number % 5, False, wall, {"forward": wall}, {}) for number, wall in enumerate(walls))
    config = RunConfig(mode="forward", **fields)  # type: ignore[arg-type]
    return RunRecord(config.key(), config.to_dict(), "ok", measurement=Measurement("cuda_event", samples, 0.0))


def around(middle_s: float, spread: float = 0.001) -> list[float]:
    return [middle_s * (1 + spread * (number % 7 - 3)) for number in range(25)]


def test_verdict_compares_the_fastest_cell_with_the_first_with_its_interval() -> None:
    records = [
        timed(around(0.2), attention="naive"),
        timed(around(0.15), attention="sdpa_math"),
        timed(around(0.1), attention="sdpa_flash"),
    ]
    text = verdict(records)
    ratio, low, high = map(float, re.findall(r"-?\d\.\d\d", text))
    assert 1.9 < low < ratio < high < 2.1
    assert text.startswith("sdpa_flash is 2.00 (1.")
    assert text.endswith(") times as fast as naive")


@pytest.mark.parametrize("walls", [around(0.1), around(0.1005, 0.05)])
def test_difference_within_the_noise_is_reported_as_no_difference(walls: list[float]) -> None:
    text = verdict([timed(around(0.1, 0.05), attention="naive"), timed(walls, attention="sdpa_flash")])
    ratio, low, high = map(float, re.findall(r"-?\d\.\d\d", text.partition(": ")[2]))
    assert text.startswith("no difference is shown between naive and sdpa_flash: ")
    assert 0.6 < low <= ratio <= high < 1.6
    assert ratio == pytest.approx(1, abs=0.02)


def test_noise_that_could_hide_a_factor_of_two_is_reported_instead_of_a_difference() -> None:
    records = [timed([0.1, 0.9] * 3, attention="naive"), timed([0.9, 0.1] * 3, attention="sdpa_flash")]
    assert verdict(records) == "too noisy: not even a doubling between naive and sdpa_flash would have been noticed"


@pytest.mark.parametrize(
    "records",
    [
        [],
        [timed(around(0.1), attention="naive")],
        [timed(around(0.1), attention="naive"), timed(around(0.2), attention="sdpa_math", batch_size=8)],
        [timed([0.1], attention="naive"), timed([0.2], attention="sdpa_math")],
        [timed(around(0.1), profiler="kineto"), timed(around(0.2), profiler="nsys")],
        [timed(around(0.1), attention="naive"), timed(around(0.2), attention="sdpa_math", profiler="nsys")],
        [timed(around(0.1), attention="naive"), replace(timed(around(0.2), attention="sdpa_math"), measurement=None)],
    ],
)
def test_cells_that_differ_in_several_fields_or_none_have_no_verdict(records: list[RunRecord]) -> None:
    assert verdict(records) == ""


def test_verdict_names_the_baseline_as_faster_if_the_candidate_is_slower() -> None:
    assert verdict([timed(around(0.1), attention="naive"), timed(around(0.2), attention="sdpa_math")]).startswith(
        "naive is 2.00 ("
    )


@pytest.mark.parametrize(("cells", "has_verdict"), [(12, True), (13, False)])
def test_table_of_more_than_twelve_cells_has_no_verdict(cells: int, has_verdict: bool) -> None:
    records = [timed([0.2 + 0.01 * (number % 2), 0.2], batch_size=number) for number in range(2, cells + 1)]
    assert verdict([timed(around(0.1), batch_size=1), *records]).startswith("batch") is has_verdict
