"""Tests of the clock of a loop's steps, with the marks of a device that is behind the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cs_systems.machine.device import resolve
from cs_systems.measure.recorder.step_clock import PENDING, StepClock


class Mark(float):
    """Time in s at which a device reaches the mark."""

    def synchronize(self) -> None:
        pass


class Behind:
    """Device that reaches its marks at given times."""

    is_cuda = True

    def __init__(self, *reached_s: float) -> None:
        self._reached_s = iter(reached_s)

    def mark(self) -> Mark:
        return Mark(next(self._reached_s))

    def has_reached(self, mark: Mark) -> bool:
        return True

    def between_s(self, begin: Mark, end: Mark) -> float:
        return end - begin


@pytest.fixture(autouse=True)
def nothing_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def clock_of(device: Any, *own_s: float) -> StepClock:
    clock = StepClock(device)
    for number, each_s in enumerate(own_s, -1):
        clock.step_ended(number, each_s)
    return clock


def test_steps_last_as_long_as_the_device_takes_without_the_recordings_own_time() -> None:
    clock = clock_of(Behind(1.0, 2.0, 3.0, 14.5), 0.0, 0.0, 0.0, 10.0)
    assert clock.durations_s([0.1, 0.1, 12.0]) == [1.0, 1.0, 1.5]


def test_marks_are_read_while_the_loop_runs() -> None:
    count = 3 * PENDING
    clock = clock_of(Behind(*range(count)), *[0.0] * count)
    assert clock.durations_s([0.0] * (count - 1)) == [1.0] * (count - 1)
    assert len(clock._ends) == 1


def test_on_a_cpu_the_hosts_times_stay() -> None:
    assert clock_of(resolve("cpu"), 0.0, 0.0).durations_s([0.25]) == [0.25]
