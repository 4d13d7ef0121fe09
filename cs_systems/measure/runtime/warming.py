"""Progress within a cell, sent to the supervisor between steps and shown before the next timed one begins."""

from __future__ import annotations

import time
from collections.abc import Callable

from cs_systems.measure.runtime.channel import Message, Timing, Warming

EVERY_S = 0.5  # least time between two messages
# longest time that the supervisor needs to show a message, with a wide margin; no message is sent so soon before timed
# steps
SHOWN_S = 0.1
TIMED_EVERY_S = 4.0  # least time between two messages while steps are timed
PAUSE_S = 0.05  # before the next timed step, in which the supervisor shows the message


class WarmupProgress:
    """Callback that `measure` calls before each warm-up step.

    Args:
        send: the function that sends a message.
        cell: the number of the cell in the request.
        warmup: the number of warm-up steps.
        warmup_s: the least duration of the warm-up.
        clock: the clock, in s.
    """

    def __init__(
        self,
        send: Callable[[Message], object],
        cell: int,
        warmup: int,
        warmup_s: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._send, self._cell, self._warmup, self._clock = send, cell, warmup, clock
        self._last_sent = self._step_began = clock()
        self._ends = self._step_began + warmup_s

    def __call__(self, done: int) -> None:
        now = self._clock()
        step_s, self._step_began = now - self._step_began, now
        left_s = max((self._warmup - done) * step_s, self._ends - now)
        if done and now - self._last_sent >= EVERY_S and left_s >= SHOWN_S:
            self._last_sent = now
            self._send(Warming(self._cell, done, max(self._warmup, done + 1)))


class TimedProgress:
    """Callback that `measure` calls between two timed steps.

    Args:
        send: the function that sends a message.
        cell: the number of the cell in the request.
        steps: the number of timed steps.
        clock: the clock, in s.
        sleep: the function that waits.
    """

    def __init__(
        self,
        send: Callable[[Message], object],
        cell: int,
        steps: int,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._send, self._cell, self._steps, self._clock, self._sleep = send, cell, steps, clock, sleep
        self._last_sent = clock()

    def __call__(self, done: int) -> None:
        if self._clock() - self._last_sent < TIMED_EVERY_S:
            return
        self._send(Timing(self._cell, done, max(self._steps, done + 1)))
        self._sleep(PAUSE_S)
        self._last_sent = self._clock()
