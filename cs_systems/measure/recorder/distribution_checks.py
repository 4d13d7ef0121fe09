"""Observer of the checks of torch.distributions: of parameters and samples, for which the host waits for the GPU."""

from __future__ import annotations

import functools
import sys
import time
from collections import Counter
from functools import partial
from typing import Any

import torch
from torch.distributions import Distribution

from cs_systems.analysis.comparison.loop_findings import DISTRIBUTION_CHECKS, DistributionChecksRow
from cs_systems.instrument.compiler import Observation, Undo, is_tracing, passed_through, replaced
from cs_systems.measure.recorder.guard import as_guest
from cs_systems.measure.recorder.observers import Period, Replacing, is_profiled
from cs_systems.measure.recorder.stacks import Line, function_of, own_lines, place_of
from cs_systems.measure.recorder.tracker import Tracker

MOST_STEPS, FEWEST_STEPS = 4, 2
FEWEST_WAITS = 20  # of a step
MOST_LINES = 5
_METHODS = ("__init__", "_validate_sample")


class DistributionChecks(Replacing):
    """Observer of the waits inside these checks, and of their time, by the line that makes or uses a distribution."""

    runs_operators = False

    def __init__(self, tracker: Tracker) -> None:
        super().__init__()
        self._tracker = tracker
        self.restart()

    def restart(self) -> None:
        self.kept = {}
        self._steps: list[tuple[Counter[Line], Counter[Line]]] = []
        self._names: dict[Line, str] = {}
        self._start()

    def _start(self) -> None:
        self._waits, self._times_s = Counter[Line](), Counter[Line]()
        self._waits_here = 0  # inside the check that runs now

    def begins(self, period: Period) -> None:
        super().begins(period)
        self.is_looking = period is Period.WARMUP and len(self._steps) < MOST_STEPS
        if self.is_looking:
            self._start()
            self._installed = Observation()
            for name in _METHODS:
                self._installed.add(partial(_watched, name, self._begins, self._ended), is_guarded=True)

    def look_at_wait(self) -> None:
        self._waits_here += 1

    def _now_s(self) -> float:
        """Return the time without the recorder's own work in this step, which each of a check's waits causes."""
        return time.perf_counter() - self._tracker.timeline.own_s

    @as_guest
    def _begins(self) -> float | None:
        """Begin a check: return its time by `_now_s`; None if it is not observed."""
        if not (self.is_looking and self._tracker.observes()) or is_tracing() or is_profiled():
            return None
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return None
        self._waits_here = 0
        return self._now_s()

    @as_guest
    def _ended(self, begun: float | None, checked: Distribution) -> None:
        if begun is None:
            return
        lasted_s, waits, self._waits_here = max(0.0, self._now_s() - begun), self._waits_here, 0
        line = own_lines(sys._getframe(1))[1]
        if waits and line is not None:
            self._waits[line] += waits
            self._times_s[line] += lasted_s  # type: ignore[assignment]
            self._names.setdefault(line, type(checked).__name__)

    def look_after_step(self) -> None:
        super().look_after_step()
        self._steps.append((self._waits, self._times_s))
        self._start()
        if len(self._steps) >= MOST_STEPS:
            self.stop_looking()

    def end(self) -> None:
        steps = self._steps if len(self._steps) >= FEWEST_STEPS else []
        step_waits = min((waits.total() for waits, _ in steps), default=0)
        if step_waits >= FEWEST_WAITS:
            rows: list[DistributionChecksRow] = [
                {
                    "distribution": name,
                    "function": function_of(line),
                    "place": place_of(line),
                    "waits": min(waits[line] for waits, _ in steps),
                    "time_s": min(float(times_s[line]) for _, times_s in steps),
                    "step_waits": step_waits,
                    "step_time_s": min(float(times_s.total()) for _, times_s in steps),
                }
                for line, name in self._names.items()
            ]
            every = [row for row in rows if row["waits"]]  # in each step
            self.keep(DISTRIBUTION_CHECKS, sorted(every, key=lambda row: -row["waits"])[:MOST_LINES])
        self._steps.clear()


def _watched(name: str, begins: Any, ended: Any) -> Undo:
    """Replace a method of distributions by one that shows its calls; return a function that restores it."""
    own = getattr(Distribution, name)

    @passed_through
    @functools.wraps(own)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        begun = begins()
        try:
            return own(self, *args, **kwargs)
        finally:
            ended(begun, self)

    return replaced(Distribution, name, watched)
