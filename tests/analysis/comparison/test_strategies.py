"""Cells of parallel strategies: which belong together, which is the baseline, and what a row has without a number."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cs_systems.analysis.comparison import strategies
from cs_systems.core.caveats import Caveat
from tests.analysis.comparison.test_limits import cell, overlap_row


def test_group_keeps_the_last_attempt_at_each_repeat_of_a_cell() -> None:
    first, again = (replace(cell("ddp_flat", 2, 1.0), key=key) for key in ("first", "again"))
    repeat, alone = replace(cell("ddp_flat", 2, 1.0), repeat=1), cell("single", 1, 2.0)
    other = cell("single", 1, 2.0)
    other = replace(other, config=other.config | {"batch_size": 4})
    assert [*strategies.groups([first, repeat, alone, again, other]).values()] == [[again, repeat, alone], [other]]


def test_baseline_is_single_on_one_rank_in_the_same_repeat() -> None:
    distributed, second = cell("ddp_flat", 1, 1.0), replace(cell("single", 1, 1.0), repeat=1)
    profiled, first = cell("single", 1, 9.0, profiler="overlap"), cell("single", 1, 1.0)
    group = [distributed, second, profiled, first]
    assert strategies.baseline(group) is first
    assert strategies.baseline(group, 1) is second
    assert strategies.baseline(group, 2) is None


def test_repeats_are_numbered_if_there_are_several() -> None:
    repeats = [replace(cell("ddp_flat", 2, 1.0), repeat=number) for number in (0, 1)]
    assert [row["repeat"] for row in strategies.steps(repeats)] == [0, 1]
    assert [row["repeat"] for row in strategies.steps(repeats[1:])] == [None]


def test_cell_on_one_rank_exposes_no_communication() -> None:
    traced = cell("single", 1, 2.0, profiler="overlap", overlap=[overlap_row(0, 2.2, 2.0, 0.1, 0.2, 0.0)])
    (row,) = strategies.steps([cell("single", 1, 2.0), traced])
    assert (row["exposed"], row["hidden"]) == (None, None)


def test_failed_cell_has_its_reason_and_others_have_their_caveats() -> None:
    failed = replace(cell("ddp_flat", 2), status="error", reason="KeyError")
    doubted = replace(cell("ddp_flat", 4, 1.0), warnings=(Caveat("unstable", "noisy", ""),))
    rows = strategies.steps([failed, doubted])
    assert [(row["note"], row["communication_s"]) for row in rows] == [("KeyError", None), ("unstable", None)]
    assert rows[0]["tokens_per_s"] is None
    assert rows[0]["step_s"] is None


def test_gathers_of_each_phase_came_in_time_or_late() -> None:
    gathers: Any = [
        {"phase": phase, "layer": layer, "in_time": late_s == 0.0, "late_s": late_s}
        for phase, layer, late_s in (
            ("forward", "block 0", 0.25), ("forward", "block 1", 0.0), ("forward", None, 0.5),
            ("backward", "block 1", 0.0),
        )
    ]  # fmt: skip
    traced = cell("fsdp", 2, 1.0, profiler="overlap", gathers=gathers)
    rows = strategies.gathered([cell("fsdp", 2, 1.0), traced])
    assert [(row["phase"], row["gathers"], row["in_time"], row["late_s"]) for row in rows] == [
        ("forward", 3, 1, 0.75), ("backward", 1, 1, 0.0),
    ]  # fmt: skip
    assert rows[0]["late"] == "block 0, others"


@pytest.mark.parametrize(
    ("measured", "formula", "off"),
    [
        ([5, None, 7, 9], [4, 3, None, 8], 0.125),
        ([8, 3], [8, 4], 0.125),
        ([3], [0], None),
        ([None], [4], None),
    ],
)
def test_largest_deviation_is_a_share_of_the_formulas_maximum(measured: Any, formula: Any, off: float | None) -> None:
    assert strategies._off(measured, formula) == off


def test_peak_of_a_cell_without_a_record_is_unknown() -> None:
    assert strategies._peak_bytes(None) is None
    assert strategies._peak_bytes(cell("fsdp", 2)) is None
