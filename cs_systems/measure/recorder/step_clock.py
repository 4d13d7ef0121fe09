"""Clock of a loop's steps: on a GPU the device's own, because the host only submits work and may be steps ahead.

Timed by the host, a loop that keeps the GPU busy has fast steps while its launch queue fills, then one slow step in
which it waits for the queue. Work of the host that the device's queue hides takes no time of the loop.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from cs_systems.machine.device import Device

PENDING = 4096  # marks from which on those that the device has reached are read


class _End(NamedTuple):
    """End of a step: the device's mark, and the recording's own time before it since the last end."""

    number: int
    mark: Any
    own_s: float


class StepClock:
    """Durations of steps by the device's clock; without any on a CPU, and while work is captured into a CUDA graph."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._known: dict[int, float] = {}
        self._ends = deque[_End]()

    def step_ended(self, number: int, own_s: float) -> None:
        """Note the end of step `number`; the end of -1 begins the first.

        own_s: the time in it that the recording took, during which the device was idle.
        """
        if not self._device.is_cuda or torch.cuda.is_current_stream_capturing():
            return  # a mark would become a part of the graph
        with suppress(RuntimeError):  # after an error of the program, the device answers nothing
            self._ends.append(_End(number, self._device.mark(), own_s))
            if len(self._ends) % PENDING == 0:
                self._read()

    def durations_s(self, by_host_s: list[float]) -> list[float]:
        """Return the duration of each step, by the host's clock where the device's is unknown; wait for the device."""
        if self._ends and not torch.cuda.is_current_stream_capturing():
            with suppress(RuntimeError):
                self._ends[-1].mark.synchronize()
                self._read()
        return [self._known.get(number, lasted_s) for number, lasted_s in enumerate(by_host_s)]

    def _read(self) -> None:
        """Compute the durations between marks that the device has reached, and forget all of these but the last."""
        while len(self._ends) > 1 and self._device.has_reached(self._ends[1].mark):
            begin, end = self._ends.popleft(), self._ends[0]
            if end.number == begin.number + 1:  # else a capture lies between them
                self._known[end.number] = max(0.0, self._device.between_s(begin.mark, end.mark) - end.own_s)
