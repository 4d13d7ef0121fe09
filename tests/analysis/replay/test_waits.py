"""Waits of calls and kernels, by their times and by what the file names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cs_systems.analysis.replay.waits import US, WaitEdges, waits_of
from cs_systems.readers.forms.columns import UNKNOWN
from cs_systems.readers.forms.trace import Waits
from tests.analysis.replay.given import LAUNCH, SYNC, WAIT, Called, Ran, recorded_of
from tests.analysis.replay.simulated import OTHER

EVENT_SYNC, STREAM_SYNC, RECORD, FREE = "cudaEventSynchronize", "cudaStreamSynchronize", "cudaEventRecord", "cudaFree"
Named = tuple[int, int, int, int, int]  # call, stream, device, call of the event, waiting stream


def waits(
    calls: Sequence[Called],
    ran: Sequence[Ran],
    named: Sequence[Named] = (),
    late_us: dict[int, float] | None = None,
    devices: Sequence[int] = (),
) -> WaitEdges:
    """Return the waits; calls and awaited calls are numbered as given."""
    recorded = recorded_of(calls, ran)
    if devices:
        recorded = replace(recorded, of_stream=tuple((device, number) for number, device in enumerate(devices)))
    late_s = np.array([(late_us or {}).get(k, 0.0) for k in range(len(ran))]) * US
    trace: Any = SimpleNamespace(waits=Waits(*np.array(named, np.int64).reshape(-1, 5).T), calls=calls)
    found = waits_of(trace, recorded, late_s)
    return found._replace(awaited={call - 1: of for call, of in found.awaited.items()})


# The host.


@pytest.mark.parametrize(("device", "awaited"), [(UNKNOWN, [0, 1]), (0, [0]), (1, [1])])
def test_wait_for_a_device_is_for_its_streams(device: int, awaited: list[int]) -> None:
    calls = [Called(SYNC, 1, 2), Called(LAUNCH, 10, 15), Called(LAUNCH, 20, 25), Called(SYNC, 100, 506)]
    ran = [Ran(1, 20, 400), Ran(2, 30, 500, 1)]
    assert waits(calls, ran, [(3, UNKNOWN, device, UNKNOWN, UNKNOWN)], devices=(0, 1)).awaited == {3: awaited}


def test_wait_for_one_device_is_not_one_for_another() -> None:
    calls = [Called(LAUNCH, 10, 15), Called(LAUNCH, 20, 25), Called(SYNC, 100, 206), Called(SYNC, 210, 306)]
    ran = [Ran(0, 20, 200), Ran(1, 30, 300, 1)]
    named = [(call, UNKNOWN, device, UNKNOWN, UNKNOWN) for call, device in ((2, 0), (3, 1))]
    assert waits(calls, ran, named, devices=(0, 1)).awaited == {2: [0], 3: [1]}


@pytest.mark.parametrize("device", [0, UNKNOWN])
def test_second_wait_for_the_only_device_is_for_what_was_launched_since_the_first(device: int) -> None:
    calls = [Called(LAUNCH, 10, 15), Called(SYNC, 100, 206), Called(LAUNCH, 210, 215), Called(SYNC, 220, 306)]
    ran = [Ran(0, 20, 200), Ran(2, 230, 300, 1)]
    named = [(call, UNKNOWN, device, UNKNOWN, UNKNOWN) for call in (1, 3)]
    assert waits(calls, ran, named, devices=(0, 0)).awaited == {1: [0], 3: [1]}


def test_wait_for_a_stream_does_not_end_the_wait_for_the_device() -> None:
    calls = [Called(LAUNCH, 10, 15), Called(LAUNCH, 20, 25), Called(STREAM_SYNC, 100, 306), Called(SYNC, 310, 506)]
    assert waits(calls, [Ran(0, 20, 300), Ran(1, 30, 500, 1)]).awaited == {2: [0], 3: [0, 1]}


def test_wait_for_a_stream_without_work_is_for_nothing() -> None:
    calls = [Called(LAUNCH, 10, 15), Called(STREAM_SYNC, 100, 103), Called(STREAM_SYNC, 110, 306)]
    named = [(1, 1, 0, UNKNOWN, UNKNOWN), (2, 0, 0, UNKNOWN, UNKNOWN)]
    assert waits(calls, [Ran(0, 20, 300)], named, devices=(0, 0)).awaited == {2: [0]}


@pytest.mark.parametrize(("done", "awaited"), [(319.5, {1: [0]}), (320.5, {}), (150, {1: [0]})])
def test_wait_ends_after_what_it_waits_for_by_clocks_that_differ_by_twenty_microseconds(
    done: float, awaited: dict[int, list[int]]
) -> None:
    assert waits([Called(LAUNCH, 10, 15), Called(SYNC, 200, 300)], [Ran(0, 20, done)]).awaited == awaited


@pytest.mark.parametrize(
    ("ends", "awaited"),
    [
        ((250, 500, 240), {3: [0]}),  # the kernel that ended last before the wait did
        ((250, 500, 260), {3: [2]}),
        ((250, 319.5, 260), {3: [1]}),
        ((250, 320.5, 260), {3: [2]}),
        ((150, 500, 160), {}),
        ((150, 500, 201), {3: [2]}),
        ((150, 500, 200), {}),
    ],
)
def test_wait_for_an_unnamed_event_is_for_what_ended_last_meanwhile(
    ends: tuple[float, ...], awaited: dict[int, list[int]]
) -> None:
    calls = [*(Called(LAUNCH, 10.0 * n, 10.0 * n + 5) for n in range(1, 4)), Called(EVENT_SYNC, 200, 300)]
    ran = [Ran(0, 20, ends[0]), Ran(1, ends[0] + 1, ends[1]), Ran(2, 40, ends[2], 1)]
    assert waits(calls, ran).awaited == awaited


@pytest.mark.parametrize(
    ("ends", "awaited"),
    [
        ((250, 240, 150), {3: [0]}),
        ((250, 260, 150), {3: [1]}),
        ((150, 160, 140), {3: [2]}),  # nothing ended meanwhile: the stream of the launch just before
        ((150, 160, 500), {}),
    ],
)
def test_wait_for_an_unnamed_stream_is_for_the_work_that_ended_last_or_was_launched_last(
    ends: tuple[float, ...], awaited: dict[int, list[int]]
) -> None:
    calls = [*(Called(LAUNCH, 10.0 * n, 10.0 * n + 5) for n in range(1, 4)), Called(STREAM_SYNC, 200, 300)]
    calls.append(Called(LAUNCH, 310, 315))
    ran = [*(Ran(n, 20, end, n) for n, end in enumerate(ends)), Ran(4, 500, 510, 0)]
    assert waits(calls, ran).awaited == awaited


@pytest.mark.parametrize(
    ("done", "start", "end", "waits_for"),
    [
        (205.5, 200, 300, True),
        (204.5, 200, 300, False),  # ended before the call could wait
        (300.5, 200, 300, True),
        (301.5, 200, 300, False),
        (300.5, 200, 500, True),
        (299.5, 200, 500, False),  # 0.2 ms before the call's end
    ],
)
def test_freed_memory_waits_for_work_that_ends_during_the_call(
    done: float, start: float, end: float, waits_for: bool
) -> None:
    found = waits([Called(LAUNCH, 10, 15), Called(FREE, start, end)], [Ran(0, 20, done)])
    assert found.awaited == ({1: [0]} if waits_for else {})


@pytest.mark.parametrize(("begin", "is_inside"), [(134.5, True), (135.5, False)])
def test_copy_from_pageable_memory_runs_inside_its_call(begin: float, is_inside: bool) -> None:
    found = waits([Called("cudaMemcpyAsync", 100, 115)], [Ran(0, begin, 140, name="HtoD pageable")])
    assert found.inside.tolist() == [is_inside]
    assert found.awaited == ({0: [0]} if is_inside else {})


# Streams.


def test_stream_that_waits_for_a_named_event_waits_for_all_other_streams_if_its_own_is_unknown() -> None:
    calls = [*(Called(LAUNCH, 10.0 * n, 10.0 * n + 5) for n in range(1, 5)), Called(RECORD, 60, 63)]
    calls += [Called(LAUNCH, 70, 75), Called(WAIT, 80, 83), Called(LAUNCH, 90, 95)]
    ran = [Ran(n, 20, 100 + n, n) for n in range(4)] + [Ran(5, 104, 150), Ran(7, 200, 210, 2)]
    named = [(6, UNKNOWN, 0, 4, 2)]
    assert waits(calls, ran, named).depends == {5: [0, 1, 3]}


def two_after(
    ended: float = 500.0, late: float = 4.0, begin: float = 505.0, before: float = 400.0, **known: Any
) -> dict[int, list[int]]:
    """Return what waits for what.

    A kernel on stream 1 ends, streams 2 and 3 run one more each before; then a wait of a stream without a name, and
    kernels on stream 2, from 505 on, and 3, from 514 on.
    """
    calls = [*(Called(LAUNCH, 10.0 * n, 10.0 * n + 5) for n in range(1, 4)), Called(WAIT, 60, 63)]
    calls += [Called(LAUNCH, 70, 75), Called(LAUNCH, 80, 85)]
    ran = [Ran(0, 20, ended, 1), Ran(1, 20, before, 2), Ran(2, 20, before, 3)]
    ran += [Ran(4, begin, 600, 2), Ran(5, 514, 600, 3)]
    return waits(calls, ran, late_us={4: late}, **known).depends


@pytest.mark.parametrize(
    ("known", "depends"),
    [
        ({"late": 3.5}, {4: [0]}),
        ({"late": 2.5}, {3: [0, 2]}),  # not late: the next kernel of the thread waits for all others
        ({"ended": 499.5}, {4: [0]}),
        ({"ended": 498.5}, {3: [0, 2]}),  # more than 15 µs before the late one
        ({"ended": 515.5}, {4: [0]}),
        ({"ended": 516.5}, {3: [2]}),
        ({"ended": 506.5, "late": 0}, {3: [0, 2]}),
        ({"ended": 507.5, "late": 0}, {3: [2]}),
        ({"ended": 450, "before": 504}, {4: [1]}),  # the stream's own work before is no reason
    ],
)
def test_late_kernel_after_a_wait_follows_what_ended_just_before(
    known: dict[str, float], depends: dict[int, list[int]]
) -> None:
    assert two_after(**known) == depends


def test_late_kernel_does_not_follow_what_ended_after_it_began() -> None:
    calls = [Called(LAUNCH, 10, 15), Called(LAUNCH, 20, 25), Called(WAIT, 60, 63), Called(LAUNCH, 80, 85)]
    ran = [Ran(0, 20, 512, 1), Ran(1, 513, 517, 1), Ran(3, 514, 600, 2)]
    assert waits(calls, ran, late_us={2: 4}).depends == {2: [0]}


def test_stream_waits_for_no_other_device_unless_the_file_says_so() -> None:
    assert two_after(late=0, devices=(0, 1, 0, 0)) == {3: [2]}


def test_named_stream_that_waits_for_an_unnamed_event_waits_for_the_others() -> None:
    assert two_after(late=0, named=[(3, UNKNOWN, 0, UNKNOWN, 3)]) == {4: [0, 1]}


def test_wait_of_a_thread_that_launches_no_more_is_for_nothing() -> None:
    calls = [Called(LAUNCH, 10, 15), Called(WAIT, 60, 63), Called(LAUNCH, 70, 75, OTHER)]
    assert waits(calls, [Ran(0, 20, 100), Ran(2, 105, 120, 1)]).depends == {}
