"""Recorded work of steps: which calls and activities belong to them, and to whom those without a launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cs_systems.analysis.replay.recorded import Recorded, _adopt, _main, _until_idle, recorded
from cs_systems.analysis.replay.waits import US
from cs_systems.readers.forms.columns import UNKNOWN, Categorical, Range, Ranges
from cs_systems.readers.forms.trace import Copies, Copy, Step
from tests.analysis.replay.simulated import AUTOGRAD, MAIN, OTHER, Copied, Host, Launch, Sync, simulated

STEP = (Host(50 * US), *(Launch(10 * US) for _ in range(4)), Copied(20 * US), Launch(10 * US), Sync(), Host(20 * US))


def test_kinds_and_kernels_of_activities_are_the_traces() -> None:
    trace, steps, _ = simulated(STEP, 4)
    c = trace.copies
    copies = [Copy(kind, *row, 64, call, "HtoD pinned") for kind, row, call in
              zip(["memset", "memcpy"] * 2, zip(c.start_s, c.end_s, c.device, c.stream, strict=True), c.call,
                  strict=True)]  # fmt: skip
    found = recorded(replace(trace, copies=Copies.of(copies)), steps)
    assert list(found.kind) == [*["kernel"] * 4, "memset", "kernel", *["kernel"] * 4, "memcpy", "kernel"]
    assert found.trace_kernel.tolist() == [10, 11, 12, 13, UNKNOWN, 14, 15, 16, 17, 18, UNKNOWN, 19]
    all_steps = [Step("step", r.start_s, r.end_s) for r in trace.ranges.named("step".__eq__)]
    first = recorded(replace(trace, copies=Copies.of(copies)), all_steps)
    assert np.flatnonzero(first.trace_kernel == UNKNOWN).tolist() == [4, 10, 16, 22]


def lost_of(begin: float, done: float, since: float, until: float) -> tuple[bool, bool]:
    """Return whether a kernel without a launch is in a step, and whether its launch is lost.

    The kernel of stream 20 before it has a launch, and so has one after it.
    """
    trace, _, _ = simulated([Launch(10 * US, 20), *STEP, Launch(10 * US, 20), Host(50 * US)], 2)
    kernels = trace.kernels
    own = np.flatnonzero(kernels.stream == 20)[1]
    call, start_s, end_s = kernels.call.copy(), kernels.start_s.copy(), kernels.end_s.copy()
    call[own], start_s[own], end_s[own] = UNKNOWN, begin, done
    moved = replace(trace, kernels=replace(kernels, call=call, start_s=start_s, end_s=end_s))
    found = recorded(moved, [Step("step", since, until)])
    mine = found.trace_kernel == own
    return bool(mine.any()), bool(found.lost[mine].any())


@pytest.mark.parametrize(
    ("begin", "done", "expected"),
    [
        (200e-6, 210e-6, (True, True)),  # begins with the step
        (199e-6, 210e-6, (True, False)),  # in flight
        (190e-6, 200e-6, (False, False)),
        (299e-6, 310e-6, (True, True)),
        (300e-6, 310e-6, (False, False)),
    ],
)
def test_kernel_without_a_launch_belongs_to_the_step_in_which_it_begins(
    begin: float, done: float, expected: tuple[bool, bool]
) -> None:
    assert lost_of(begin, done, 200e-6, 300e-6) == expected


def test_kernel_without_a_launch_takes_the_call_of_the_one_before_on_its_stream() -> None:
    call, stream = np.array([UNKNOWN, 3, UNKNOWN, UNKNOWN, 7, UNKNOWN, UNKNOWN]), np.array([0, 0, 0, 1, 2, 1, 2])
    lost = np.array([True, False, True, True, False, False, True])
    _adopt(call, lost, stream, np.arange(7.0), np.arange(7.0) + 1)
    assert call.tolist() == [0, 3, 3, 0, 7, UNKNOWN, 7]
    call = np.array([UNKNOWN, UNKNOWN])
    _adopt(call, np.array([False, True]), np.zeros(2, int), np.arange(2.0), np.arange(2.0) + 1)
    assert call.tolist() == [UNKNOWN, 0], "in flight when the step begins"


def main_of(threads: Sequence[int], autograd: Sequence[int], ranges: Sequence[Range] = ()) -> int:
    operators = SimpleNamespace(
        thread=np.array(autograd, np.int64), signature=Categorical([SimpleNamespace(name="autograd::engine::"
        "evaluate_function: MulBackward0")], np.zeros(len(autograd), np.int64)),
    )  # fmt: skip
    calls = SimpleNamespace(thread=np.array(threads, np.int64))
    trace: Any = SimpleNamespace(ranges=Ranges.of(ranges), calls=calls, operators=operators)
    return _main(trace, [Step("step", 1.0, 2.0)], 0, len(threads))


@pytest.mark.parametrize(
    ("threads", "autograd", "main"),
    [
        ([OTHER, *[AUTOGRAD] * 3], [AUTOGRAD], OTHER),
        ([OTHER, *[AUTOGRAD] * 3], [], AUTOGRAD),
        ([AUTOGRAD], [AUTOGRAD], AUTOGRAD),
        ([], [], UNKNOWN),
    ],
)
def test_main_thread_makes_the_most_calls_outside_of_autograd(
    threads: Sequence[int], autograd: Sequence[int], main: int
) -> None:
    assert main_of(threads, autograd) == main


def test_main_thread_is_that_of_the_steps_range() -> None:
    ranges = [Range("step", 0.5, 2.0, OTHER), Range("other", 1.0, 2.0, OTHER), Range("step", 1.0, 2.0, MAIN)]
    assert main_of([OTHER] * 3, [], ranges) == MAIN
    assert main_of([OTHER] * 3, [], ranges[:2]) == OTHER


@pytest.mark.parametrize(("launched", "until_idle"), [([0.0, 1.0], (True, False)), ([1.0, 10.0], (True, True))])
def test_step_lasts_until_its_own_work_has_ended(launched: Sequence[float], until_idle: tuple[bool, ...]) -> None:
    """Kernels end at 10 and at 20, those that were launched from a step's begin on and before its end are its own."""
    steps = [Step("step", 0.0, 10.0), Step("step", 10.0, 20.0)]
    call, done_s = np.array([0, 1, UNKNOWN]), np.array([5.0, 10.0, 20.0])
    if until_idle[1]:
        done_s = np.array([10.0, 20.0, 10.0])
    assert _until_idle(steps, call, np.array(launched), done_s) == until_idle


def test_recorded_steps_begin_and_end_with_marks_of_the_main_thread() -> None:
    trace, steps, _ = simulated(STEP, 4)
    found: Recorded = recorded(trace, steps)
    assert found.start_s[found.marks].tolist() == [
        [s.start_s - steps[0].start_s, s.end_s - steps[0].start_s] for s in steps
    ]
    assert found.thread[found.marks].tolist() == [[MAIN, MAIN]] * 2
