"""Limits of gaps, repetition and overlap: what lies just below each, and just above."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cs_systems.analysis.attribution import module_tables, tables
from cs_systems.analysis.attribution.gaps import HOST, LATENCY, LAUNCH, causes, gap_rows, gaps_in, idle_by_cause
from cs_systems.analysis.attribution.inferred_layers import repetition
from cs_systems.analysis.attribution.overlap import Intervals, Streams, median_step, picture, union
from cs_systems.analysis.attribution.profile import profile
from cs_systems.readers import read
from cs_systems.readers.forms.trace import Step
from tests.analysis.attribution.test_foreign import kernel, marked
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
        (LATENCY, 1.5, 2.5, pytest.approx(5 / 30), 2.0),
        (HOST, 0.5, 1.5, pytest.approx(0.1), 3.0),
        (LAUNCH, 1.0, 1.5, pytest.approx(0.1), 2.0),
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


def test_period_that_explains_exactly_as_much_does_not_replace_a_shorter_one() -> None:
    codes = np.array(([*range(8)] * 3 + [*range(8, 16)]) * 3)
    time_s = np.zeros(len(codes))
    time_s[[0, 24]] = 98.0, 2.0
    found = repetition(codes, time_s, codes == 1)
    assert found is not None
    assert (found.period, found.share) == (8, 0.98)


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
        assert f"(confidence: {confidence})" in made.how_layered[0]


@pytest.mark.parametrize("forward", [BLOCK[:4] * 3, BLOCK * 3], ids=["the fewest kernels", "more"])
def test_blocks_are_those_of_one_pass(write_trace: WriteTrace, forward: Sequence[str]) -> None:
    """A single kernel of backward divides the passes."""
    made = profile(read(write_trace(step(forward, ["loss_bwd"]))))
    assert [*layers(made)][:3] == ["block 0", "block 1", "block 2"]
    assert "block 3" not in layers(made)


def of_duration(step_s: float) -> Streams:
    empty = union(np.zeros(0), np.zeros(0))
    return Streams(Step("step", 0.0, step_s), empty, (), empty)


def test_median_step_is_the_lower_of_two() -> None:
    assert median_step([of_duration(step_s) for step_s in (3.0, 1.0, 2.0, 4.0)]) == 2
    assert median_step([of_duration(step_s) for step_s in (3.0, 1.0, 2.0)]) == 2


def test_picture_joins_kernels_closer_than_a_thousandth_of_the_step() -> None:
    starts, ends = np.array([0.0, 0.1009, 0.3011]), np.array([0.1, 0.3, 0.4])
    shown = Streams(Step("step", 5.0, 6.0), Intervals(starts, ends), ("sum",) * 3, union(np.zeros(0), np.zeros(0)))
    rows = picture(trace([], [], [], []), shown)
    assert [(row["start_s"], row["end_s"]) for row in rows] == [
        (0.0, pytest.approx(0.3)),
        (pytest.approx(0.3011), pytest.approx(0.4)),
    ]


def test_wait_after_the_launch_returned_belongs_to_the_device() -> None:
    made = trace([(0.0, 1.0, 0.0), (1.0 + 50e-6, 2.0, 1.0)], [], [], [])
    found = causes(made, 0, gaps_in(made.kernels, [Step("step", 0.0, 2.0)])[0])
    assert found[LATENCY].sum() == pytest.approx(50e-6)
    assert found[LAUNCH].sum() == 0


def test_time_without_a_kernel_is_unknown_where_the_trace_lacks_some() -> None:
    made = replace(trace([(0, 1, 0), (4, 5, 3)], [(1, 2)], [], []), lacks_kernels=True)
    found = causes(made, 0, gaps_in(made.kernels, [Step("step", 0, 5)])[0])
    assert {cause: times.sum() for cause, times in found.items() if times.any()} == {"kernels not recorded": 3.0}


@pytest.mark.parametrize(("ends_us", "lasts_us", "longer"), [(100.9, 100.0, False), (101.1, 101.1, True)])
def test_step_lasts_until_kernels_that_end_a_hundredth_later(
    write_trace: WriteTrace, ends_us: float, lasts_us: float, longer: bool
) -> None:
    made = profile(read(write_trace([marked("step", 0, 100), *kernel("gemm", 20, ends_us, launched=5)])))
    assert [row["wall_s"] * 1e6 for row in tables.steps(made)] == [pytest.approx(lasts_us)]
    assert any("until their kernels end" in note for note in made.notes) is longer


@pytest.mark.parametrize(("unsplit_us", "noted"), [(9, False), (11, True)])
def test_backward_with_half_of_its_time_without_a_layer_is_noted(
    write_trace: WriteTrace, unsplit_us: int, noted: bool
) -> None:
    events = [
        marked("step", 0, 100), marked("forward", 0, 10), marked("backward", 10, 90), marked("block 0", 20, 30),
        *kernel("gemm", 40, 50, launched=22), *kernel("gemm", 60, 60 + unsplit_us, launched=50),
    ]  # fmt: skip
    made = profile(read(write_trace(events)))
    assert any("backward is not split" in note for note in tables.notes("layers", made, tables.layers(made))) is noted


def test_softmax_is_compared_with_products_within_attention_and_with_the_projections() -> None:
    rows: Any = [
        {"phase": phase, "part": f"attention{part}", "family": family, "time_s": time_s}
        for phase, part, family, time_s in (
            *(("forward", ".softmax", "softmax", 1.0), ("forward", ".softmax", "softmax", 2.0)),
            *(
                ("forward", ".scores", "matmul", 3.0),
                ("forward", ".value", "matmul", 1.0),
                ("forward", "", "matmul", 4.0),
            ),
            *(("backward", ".softmax", "softmax", 1.0), ("backward", ".scores", "matmul", 2.0)),
            *(("recompute", "", "softmax", 1.0), ("recompute", "", "matmul", 2.0)),
            *(("loss", ".scores", "matmul", 1.0), ("optimizer", "", "attention", 1.0)),
        )
    ]
    assert tables._split(rows) == [
        "forward: within attention, softmax takes 0.75 times as long as the products of scores and value; with the "
        "projections, 0.38 times",
        "backward: within attention, softmax takes 0.50 times as long as the products of scores and value",
        "recompute: softmax takes 0.50 times as long as all matrix products of the layer; mark ranges scores and value "
        "to leave out projections",
        "optimizer: a fused kernel computes scores, softmax and value together, so they have no separate times",
    ]


def test_step_times_that_disagree_by_3_percent_give_a_warning() -> None:
    def warned(*rows: tuple[int, float, float | None]) -> list[str]:
        made: Any = [
            {"step": number, "residual_share": apart, "wall_s": 1.0, "event_s": event_s}
            for number, apart, event_s in rows
        ]
        return tables._reconciled(made)

    limit = 0.03
    assert warned((0, limit * 0.999, 1 + limit * 0.999), (1, -limit * 0.999, 1 - limit * 0.999), (2, 0.0, None)) == []
    assert warned((0, limit, None), (1, -limit, None)) == []
    (found,) = warned((0, limit * 1.001, None), (1, -limit * 2, None), (1, limit * 1.5, None), (2, 0.0, None))
    assert f"differ by over {limit:.0%} in 2 of 3 steps, most in step 1 (-{2 * limit:.1%})" in found
    for event_s in (1 + limit * 1.001, 1 - limit * 1.001):
        (found,) = warned((7, 0.0, event_s))
        assert found.startswith(
            f"warning: step 7 takes {event_s * 1e3:.3g} ms by events and 1e+03 ms by the wall clock"
        )
