"""Idle time and FLOP/s in the tree of ranges, next to a count of every microsecond."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from cs_systems.analysis.attribution.profile import profile
from cs_systems.analysis.attribution.range_tree import range_tree
from cs_systems.readers import read
from cs_systems.readers.forms.columns import Range
from tests.analysis.attribution.made import Made
from tests.analysis.attribution.test_foreign import AUTOGRAD, event, kernel, marked

WriteTrace = Callable[[Sequence[dict[str, Any]]], Path]
RANGES = [("step", 0, 100), ("outer", 10, 60), ("inner", 20, 30), ("inner", 40, 55), ("backward", 60, 95)]
HOOK = ("hook", 70, 80)  # in autograd's thread
OTHER = 2  # a thread
KERNELS = [(11, 15, 10), (25, 28, 22), (45, 65, 41), (72, 90, 71)]  # start, end, launch


def program() -> list[dict[str, Any]]:
    events = [marked(*one) for one in RANGES] + [marked(*HOOK, AUTOGRAD)]
    for start, end, launch in KERNELS:
        events += kernel("gemm", start, end, launch, thread=AUTOGRAD if launch > 60 else 1)
    return events


def idle_us(name: str) -> int:
    """Return the microseconds in which a range was open and no kernel ran."""
    opened = [one for one in (*RANGES, HOOK) if one[0] == name]
    busy = {time for start, end, _ in KERNELS for time in range(start, end)}
    return sum(time not in busy for _, start, end in opened for time in range(start, end))


def test_idle_time_belongs_to_the_open_range(write_trace: WriteTrace) -> None:
    rows = {row["path"].split(" / ")[-1]: row for row in range_tree(profile(read(write_trace(program()))))}
    assert {*rows} == {"step", "outer", "inner", "backward", "hook"}
    assert {name: row["idle_s"] for name, row in rows.items()} == {
        name: pytest.approx(idle_us(name) * 1e-6) for name in rows
    }
    assert rows["hook"]["path"] == "step / backward / hook"


def test_rate_of_a_range_uses_the_operators_inside_it(write_trace: WriteTrace) -> None:
    """The outer operator counts, not the one that it calls."""
    shapes = {"Input Dims": [[8, 16], [32, 16]]}, {"Input Dims": [[8, 16], [16, 32]]}
    events = [
        *program(),
        event("cpu_op", "aten::linear", 21, 27, **shapes[0]),
        event("cpu_op", "aten::mm", 21.5, 26, **shapes[1]),
        event("cpu_op", "aten::mm", 42, 43, **shapes[1]),
    ]
    rows = {row["path"]: row for row in range_tree(profile(read(write_trace(events))))}
    inner, flops = rows["step / outer / inner"], 2 * 2 * 8 * 16 * 32
    assert (inner["flops"], inner["achieved_flops_per_s"]) == (flops, pytest.approx(flops / 23e-6))
    assert rows["step"]["flops"] == flops
    assert rows["step / backward"]["flops"] is None


def test_idle_time_of_several_devices_is_unknown(write_trace: WriteTrace) -> None:
    other = {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 1, "tid": 7, "ts": 30, "dur": 4}
    events = [*program(), {**other, "args": {"device": 1, "stream": 7, "correlation": 5}}]
    assert {row["idle_s"] for row in range_tree(profile(read(write_trace(events))))} == {None}


def test_idle_time_of_another_thread_ends_with_the_main_one_s_ranges() -> None:
    made = Made()
    made.range("all", 1.0, 2.0)
    made.ranges.append(Range("hook", 0.5, 3.0, OTHER))
    for start in (0.75, 1.5, 2.5):
        made.kernel("gemm", start, start + 0.125, thread=OTHER)
    rows = {row["path"]: row["idle_s"] for row in range_tree(made.profile())}
    assert rows == {"hook": 1.25, "all": 0.875, "all / hook": 0.875}


def test_range_of_a_device_that_never_rests_has_no_idle_time() -> None:
    made = Made()
    made.range("step", 0.0, 1.0)
    made.kernel("gemm", 0.0, 1.0)
    assert [row["idle_s"] for row in range_tree(made.profile())] == [0.0]


def test_ranges_are_nested_64_deep_at_most() -> None:
    made = Made()
    for _ in range(65):
        made.range("all", 0.0, 1.0)
    made.kernel("gemm", 0.5, 0.75)
    assert [row["path"].count("all") for row in range_tree(made.profile())] == [*range(1, 65)]
