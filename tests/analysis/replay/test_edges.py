"""Each edge of the graph, by a change: what is predicted from one program's trace is what the changed program takes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cs_systems.analysis.replay import (
    Change,
    CopiesOverlapped,
    Expected,
    FamilyScaled,
    HostScaled,
    InputRemoved,
    LaunchesFree,
    SyncRemoved,
    replayed,
)
from tests.analysis.replay.simulated import (
    AUTOGRAD,
    MS,
    OTHER,
    US,
    Close,
    Copied,
    Free,
    Graph,
    Host,
    Launch,
    Machine,
    Open,
    Record,
    Run,
    Sync,
    Wait,
    simulated,
    slower,
    times,
    without,
)

USUAL = Machine()
FORWARD = (Host(40 * US), *(Launch(30 * US) for _ in range(20)))
SHORT = tuple(Launch(2 * US) for _ in range(30))
APART = tuple(one for _ in range(4) for one in (Launch(3 * US), Host(40 * US)))
TINY = 1e-12
BACKWARD = Run(AUTOGRAD, (Host(15 * US), *(one for _ in range(20) for one in (Host(5 * US), Launch(40 * US)))))
LOADED = (Open("input"), Host(2 * MS), Close())


def on_two_streams(first: float, second: float) -> tuple[object, ...]:
    """Return a step: its second stream waits for the middle of the first, and the first for the second's end."""
    return (
        *(Launch(first, 7) for _ in range(3)),
        Record("half", 7),
        *(Launch(first, 7) for _ in range(3)),
        Wait(20, "half"),
        *(Launch(second, 20, "softmax") for _ in range(4)),
        Record("done", 20),
        Wait(7, "done"),
        Launch(10 * US, 7, "softmax"),
        Sync(),
    )


def check(
    before: Sequence[object],
    change: Change,
    after: Sequence[object],
    machine: Machine = USUAL,
    then: Machine | None = None,
) -> None:
    trace, steps, now = simulated(before, machine=machine)
    replay = replayed(trace, steps)
    assert replay.why_not is None
    assert replay.step_s == pytest.approx(now)
    assert replay.replayed_step_s == pytest.approx(now)
    expected = replay.what_if(change)
    assert isinstance(expected, Expected), expected
    truth = simulated(after, machine=then or machine)[2]
    assert truth != pytest.approx(now, rel=0.01), "the change must matter"
    assert expected.value == pytest.approx(truth, rel=1e-6)
    assert expected.low - 1e-9 <= truth <= expected.high + 1e-9


def test_a_stream_runs_its_kernels_one_after_the_other() -> None:
    step = (*FORWARD, Sync())
    check(step, FamilyScaled("matmul", 0.5), times(step, 0.5))


def test_kernels_wait_for_their_launches() -> None:
    step = (Host(1 * MS), *SHORT, Sync())
    check(step, HostScaled(0.5), (Host(0.5 * MS), *(one._replace(cost_s=one.cost_s / 2) for one in SHORT), Sync()))


def test_the_host_waits_for_the_device() -> None:
    step = (*FORWARD, Sync(), Host(0.3 * MS))
    check(step, FamilyScaled("matmul", 2.0), times(step, 2.0))


def test_without_a_wait_the_host_works_ahead() -> None:
    step = (*FORWARD, Sync(), Host(0.3 * MS))
    check(step, SyncRemoved(), without(step, Sync))


def test_the_host_waits_for_one_stream_only() -> None:
    step = (Launch(1 * MS, 20, "softmax"), *FORWARD, Sync(stream=7), Host(1 * MS))
    check(step, FamilyScaled("matmul", 2.0), times(step, 2.0, "gemm"))


def test_the_host_waits_for_an_event_in_the_middle_of_a_stream() -> None:
    step = (
        *FORWARD,
        Record("half", 7),
        *(Launch(50 * US, 7, "softmax") for _ in range(5)),
        Sync(event="half"),
        Host(1 * MS),
    )
    check(step, FamilyScaled("matmul", 2.0), times(step, 2.0, "gemm"))


@pytest.mark.parametrize("says_waits", [True, False], ids=["named by the file", "guessed by the times"])
@pytest.mark.parametrize(("first", "second"), [(50 * US, 20 * US), (20 * US, 60 * US)])
def test_a_stream_waits_for_an_event_of_another(first: float, second: float, says_waits: bool) -> None:
    machine = Machine(says_waits=says_waits)
    step = on_two_streams(first, second)
    check(step, FamilyScaled("softmax", 3.0), times(step, 3.0, "softmax"), machine)
    check(step, FamilyScaled("matmul", 2.0), times(step, 2.0, "gemm"), machine)


def test_gap_to_a_kernel_that_waits_for_another_stream_is_not_the_usual_one() -> None:
    """Two of three gaps in a queue are 2 µs long, as these kernels wait for others; 1 µs is usual."""
    first = tuple(Launch(5 * US, z, name) for z in (7, 20, 21) for name in ("gemm", "softmax"))
    linked = (Launch(22 * US, 20, cost_s=2 * US), Launch(19 * US, 7, cost_s=2 * US), Record("20", 20), Wait(7, "20"))
    step = (*first, Host(20 * US), Run(AUTOGRAD, (Host(10 * US), *first)), Host(30 * US), *linked)
    step = (*step, Launch(1 * US, 7, cost_s=2 * US), Host(10 * US), Sync())
    usual = Machine(launch_s=0.0, return_s=5 * US)
    check(step, HostScaled(0.3), slower(step, 0.3), usual, Machine(0.0, return_s=5 * US, routine_s=0.9 * US))


def test_launches_in_a_graph_keep_the_waits_between_streams() -> None:
    step = on_two_streams(2 * US, 1 * US)
    free = [one._replace(cost_s=TINY) if isinstance(one, Launch) else one for one in without(step, Sync)]
    machine = Machine(launch_s=0.0, routine_s=TINY)
    truth = simulated(free, machine=machine)[2]
    trace, steps, _ = simulated(step)
    expected = replayed(trace, steps).what_if(LaunchesFree(nearer_s=0.0))
    assert isinstance(expected, Expected)
    assert expected.value == pytest.approx(truth, rel=1e-6)


def test_backward_waits_for_forward_and_the_optimizer_for_backward() -> None:
    step = (*FORWARD, BACKWARD, Host(20 * US), *SHORT, Sync())
    check(step, HostScaled(5.0), slower(step, 5.0), then=Machine(routine_s=5 * USUAL.routine_s))


def test_scaling_a_range_of_the_main_thread_scales_what_autograd_does_meanwhile() -> None:
    step = (Host(10 * US), Launch(3 * US), Open("backward"), _slow_backward(1.0), Close(), Sync())
    check(step, HostScaled(0.5, "backward"), (Host(10 * US), Launch(3 * US), _slow_backward(0.5), Sync()))


def test_scaling_a_range_of_another_thread_scales_its_own_work() -> None:
    def step(factor: float) -> tuple[object, ...]:
        inner = (Open("inner"), Host(300 * US * factor), Launch(4 * US, cost_s=5 * US * factor), Close())
        return Host(10 * US), Launch(3 * US), Run(AUTOGRAD, (*SHORT, *inner)), Host(10 * US), Launch(3 * US), Sync()

    check(step(1.0), HostScaled(0.5, "inner"), step(0.5))


def test_a_range_of_the_host_can_be_removed() -> None:
    step = (Open("augment"), Host(0.7 * MS), Close(), *FORWARD, Sync())
    check(step, HostScaled(0.0, "augment"), (*FORWARD, Sync()))


def test_loading_the_batch_beforehand_removes_only_loading_from_the_step() -> None:
    step = (*LOADED, *FORWARD, Sync())
    check(step, InputRemoved(), (*FORWARD, Sync()))


def test_launches_in_a_graph_leave_the_loading_of_the_batch() -> None:
    step = (*LOADED, *FORWARD)
    trace, steps, _ = simulated(step)
    expected = replayed(trace, steps).what_if(LaunchesFree(nearer_s=0.0))
    assert isinstance(expected, Expected)
    assert expected.value == pytest.approx(2 * MS, rel=0.01)


def test_a_launch_waits_for_room_in_the_queue() -> None:
    machine = Machine(queue=600)
    step = (*(Launch(20 * US) for _ in range(1500)), Host(5 * MS))
    check(step, FamilyScaled("matmul", 0.3), times(step, 0.3), machine)
    check(step, FamilyScaled("matmul", 2.0), times(step, 2.0), machine)


def test_the_nodes_of_a_graph_keep_their_distance() -> None:
    step = (Host(10 * US), Graph((20 * US,) * 30), Launch(5 * US), Host(2 * US), Sync(), Host(40 * US))
    longer = (Host(10 * US), Graph((40 * US,) * 30), Launch(5 * US), Host(2 * US), Sync(), Host(40 * US))
    check(step, FamilyScaled("other", 2.0), longer)


def test_a_copy_from_pageable_memory_blocks_the_host() -> None:
    step = (*FORWARD, Copied(200 * US, 7, "DtoH pageable"), Host(0.5 * MS))
    check(step, FamilyScaled("matmul", 2.0), times(step, 2.0))


def test_a_wait_after_a_copy_that_blocked_the_host_does_not_last_until_then() -> None:
    step = (*SHORT, Copied(20 * US, 7, "DtoH pageable"), Host(300 * US), Sync(), *APART)
    check(step, HostScaled(0.5, "step"), slower(step, 0.5), then=Machine(routine_s=USUAL.routine_s / 2))


def test_freed_memory_waits_for_the_device() -> None:
    step = (*FORWARD, Free(40 * US), Host(0.3 * MS))
    check(step, FamilyScaled("matmul", 2.0), times(step, 2.0))


def test_copies_on_their_own_stream_delay_neither_kernels_nor_the_host() -> None:
    step = (Copied(300 * US, 7, "HtoD pageable"), *FORWARD, Sync())
    moved = (Copied(300 * US, 99, "HtoD pinned", USUAL.routine_s), *FORWARD, Sync(stream=7))
    check(step, CopiesOverlapped(), moved)


@pytest.mark.parametrize("says_waits", [True, False], ids=["named by the file", "guessed by the times"])
def test_copies_on_their_own_stream_keep_the_waits_between_kernels(says_waits: bool) -> None:
    copied = (Copied(300 * US, 20), Record("copied", 20), Wait(7, "copied"))
    kernels = (*SHORT, Record("half", 7), Wait(21, "half"), Launch(400 * US, 21, "softmax"), Sync(), *APART)
    check((*copied, *kernels), CopiesOverlapped(), (Host(11 * US), *kernels), Machine(says_waits=says_waits))


def test_thread_that_works_in_parallel_does_not_delay_the_main_thread() -> None:
    beside = [one for _ in range(400) for one in (Host(3 * US), Launch(2 * US, 20, "softmax", 6 * US))]
    step = (*SHORT, Host(0.3 * MS), Sync(stream=7))
    trace, steps, _ = simulated(step, beside=beside)
    replay = replayed(trace, steps)
    assert OTHER in replay.parts[0].graph.recorded.thread
    assert replay.replayed_step_s == pytest.approx(replay.step_s, rel=1e-3)
    expected = replay.what_if(FamilyScaled("matmul", 40.0))
    assert isinstance(expected, Expected)
    assert expected.value == pytest.approx(simulated(times(step, 40.0, "gemm"), beside=beside)[2], rel=1e-3)


def _slow_backward(factor: float) -> Run:
    return Run(
        AUTOGRAD,
        tuple(one for _ in range(20) for one in (Host(50 * US * factor), Launch(4 * US, cost_s=5 * US * factor))),
    )


def test_streams_that_took_turns_are_not_expected_to_run_at_once() -> None:
    def step(stream: int) -> tuple[object, ...]:
        return tuple(one for _ in range(20) for one in (Host(60 * US), Launch(30 * US, stream)))

    trace, steps, _ = simulated((*step(7), *step(20)))
    expected = replayed(trace, steps).what_if(LaunchesFree())
    assert isinstance(expected, Expected)
    assert expected.value >= 40 * 30 * US
    assert expected.value < 1.05 * 40 * 30 * US


@pytest.mark.parametrize("says_waits", [True, False], ids=["named by the file", "guessed by the times"])
def test_each_wait_for_the_device_waits_for_the_streams_used_since_the_one_before(says_waits: bool) -> None:
    machine = Machine(says_waits=says_waits)
    used = tuple(one for n in range(20, 30) for one in (Launch(50 * US, n), Sync()))
    step = (*used, Launch(80 * US, 7, "softmax"), Launch(60 * US, 20), Sync(), Host(0.3 * MS))
    check(step, FamilyScaled("softmax", 3.0), times(step, 3.0, "softmax"), machine)
    check(step, FamilyScaled("matmul", 2.0), times(step, 2.0, "gemm"), machine)
