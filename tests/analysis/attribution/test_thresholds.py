"""Limits of gaps, repetition and overlap: what lies just below each, and just above."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cs_systems.analysis.attribution import module_tables
from cs_systems.analysis.attribution.gaps import LATENCY, LAUNCH, causes, gap_rows, gaps_in, idle_by_cause
from cs_systems.analysis.attribution.inferred_layers import repetition
from cs_systems.analysis.attribution.overlap import Intervals, Streams, median_step, picture, union
from cs_systems.analysis.attribution.profile import profile
from cs_systems.readers import read
from cs_systems.readers.forms.trace import Step
from tests.analysis.attribution.test_gaps import trace
from tests.analysis.attribution.test_inferred_layers import BLOCK, found_in, layers, step

WriteTrace = Callable[[Sequence[dict[str, Any]]], Path]


@pytest.mark.parametrize(("wait_s", "of_device_s"), [(99e-6, 0.0), (101e-6, 101e-6)])
def test_kernel_is_late_100_us_after_its_launch(wait_s: float, of_device_s: float) -> None:
    made = trace([(1.0 + wait_s, 2.0, 1.0)], [], [], [])
    found = causes(made, 0, gaps_in(made.kernels, [Step("step", 0.0, 2.0)])[0])
    assert found[LATENCY].sum() == pytest.approx(of_device_s)
    assert found[LAUNCH].sum() == pytest.approx(1.0 + wait_s - of_device_s)


def test_rows_of_gaps_have_shares_per_step_longest_cause_first() -> None:
    made = trace([(4, 10, 2), (12, 20, 1), (26, 30, 24)], [(10, 11)], [], [])
    steps = [Step("step", 0, 20), Step("step", 20, 30)]
    rows = gap_rows(made, gaps_in(made.kernels, steps), steps)
    assert [(row["cause"], row["gaps_per_step"], row["time_s"], row["share"], row["longest_s"]) for row in rows] == [
        (LAUNCH, 1.0, 3.0, 0.2, 4.0),
        (LATENCY, 1.5, 2.5, pytest.approx(5 / 30), 2.0),
        ("copy", 0.5, 0.5, pytest.approx(1 / 30), 1.0),
    ]


def test_idle_time_of_a_step_without_a_profiler_keeps_the_proportions_of_the_trace() -> None:
    def tables(*busy: float | None) -> Any:
        gaps = [(0, "copy", 1.0), (0, LAUNCH, 3.0), (1, LAUNCH, 9.0)]
        steps = [{"device": 0, "wall_s": 10.0, "busy_share": share} for share in busy]
        return {
            "gaps": [{"device": device, "cause": cause, "time_s": time_s} for device, cause, time_s in gaps],
            "steps": [*steps, {"device": 1, "wall_s": 10.0, "busy_share": 0.0}],
        }

    traced = {"copy": 1.0, LAUNCH: 3.0}
    assert idle_by_cause(tables(0.5, 0.7)) == traced
    assert idle_by_cause(tables(None), 8.0) == traced
    assert idle_by_cause(tables(0.5, None, 0.7), 8.0) == {"copy": pytest.approx(0.5), LAUNCH: pytest.approx(1.5)}
    assert idle_by_cause(tables(0.5, 0.7), 5.0) == {"copy": 0.0, LAUNCH: 0.0}
    assert idle_by_cause({}, 8.0) == {}


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([*BLOCK[:3]] * 5, None),  # too short for a block
        ([*BLOCK[:4]] * 3, (0, 4, 3)),
        ([f"gemm_{n}" for n in range(2000)] * 3, (0, 2000, 3)),
        ([f"gemm_{n}" for n in range(2001)] * 3, None),  # too long
    ],
)
def test_block_has_4_to_2000_kernels(names: list[str], expected: tuple[int, int, int] | None) -> None:
    found = found_in(names)
    assert (found and tuple(found)[:3]) == expected
    assert found is None or found.share == pytest.approx(1.0)


@pytest.mark.parametrize(("share", "period"), [(0.979, 32), (0.981, 8)])
def test_shorter_period_counts_if_it_explains_nearly_as_much(share: float, period: int) -> None:
    """Three equal blocks and another one, three times, of which the first three take this share of the time."""
    codes = np.array(([*range(8)] * 3 + [*range(8, 16)]) * 3)
    time_s = np.where(np.arange(len(codes)) < 24, share / 24, (1 - share) / (len(codes) - 24))
    found = repetition(codes, time_s, codes == 1)
    assert found is not None
    assert (found.period, found.blocks) == (period, 3)
    assert found.share == pytest.approx(1.0 if period == 32 else share)


@pytest.mark.parametrize(
    ("others", "confidence"), [(4, "high"), (5, "medium"), (15, "medium"), (17, None)]
)  # beside 24 kernels in blocks, as long as they
def test_blocks_take_most_of_forward(write_trace: WriteTrace, others: int, confidence: str | None) -> None:
    forward = [*BLOCK * 3, *(f"gemm_{n}" for n in range(others))]
    made = profile(read(write_trace(step(forward, [f"{name}_bwd" for name in reversed(BLOCK)] * 3))))
    if confidence is None:
        assert [*layers(made)] == ["unattributed"]
        why = "do not repeat as those of blocks do: at best 8 kernels repeat 3 times, with 59% of the time"
        assert why in str(module_tables.why_nothing(made))
    else:
        assert [*layers(made)] == ["block 0", "block 1", "block 2", "unattributed"]
        assert f"(confidence: {confidence})" in made.notes[-1]


def of_duration(step_s: float) -> Streams:
    empty = union(np.zeros(0), np.zeros(0))
    return Streams(Step("step", 0.0, step_s), empty, (), empty)


def test_median_step_is_the_lower_of_two() -> None:
    assert median_step([of_duration(step_s) for step_s in (3.0, 1.0, 2.0, 4.0)]) == 2
    assert median_step([of_duration(step_s) for step_s in (3.0, 1.0, 2.0)]) == 2


def test_picture_joins_what_is_closer_than_a_thousandth_of_the_step() -> None:
    starts, ends = np.array([0.0, 0.1009, 0.3011]), np.array([0.1, 0.3, 0.4])
    shown = Streams(Step("step", 0.0, 1.0), Intervals(starts, ends), ("sum",) * 3, union(np.zeros(0), np.zeros(0)))
    rows = picture(trace([], [], [], []), shown)
    assert [(row["start_s"], row["end_s"]) for row in rows] == [
        (0.0, pytest.approx(0.3)),
        (pytest.approx(0.3011), pytest.approx(0.4)),
    ]
