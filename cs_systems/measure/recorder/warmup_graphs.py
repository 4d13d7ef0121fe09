"""Observer of the graphs below the backward passes of a few warm-up steps, which counts what it finds in each step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

from cs_systems.instrument.compiler import Observation
from cs_systems.measure.recorder.observers import Period, Replacing
from cs_systems.measure.recorder.operator_times import is_packing, packing_noted
from cs_systems.measure.recorder.subject import Subject

MOST_STEPS, FEWEST_STEPS = 3, 2
Thing = TypeVar("Thing")


class WarmupGraphs(Replacing, Generic[Thing]):
    """Observer of graphs on a CPU, in a process that has compiled nothing.

    compilations: the number of compilations of this process so far.
    """

    def __init__(self, subject: Subject, compilations: Callable[[], int]) -> None:
        super().__init__()
        self._subject, self._compilations = subject, compilations
        self.restart()

    def restart(self) -> None:
        self.kept = {}
        self._steps: list[Counter[Thing]] = []
        self._start()

    def _start(self) -> None:
        self._here, self._passes, self._packs = Counter[Thing](), 0, False

    def begins(self, period: Period) -> None:
        super().begins(period)
        may_look = not (self._subject.device.is_cuda or self._compilations())
        self.is_looking = period is Period.WARMUP and may_look and len(self._steps) < MOST_STEPS
        if self.is_looking:
            self._start()
            self._installed = Observation()
            self._installed.add(partial(packing_noted, self._note_packing), is_guarded=True)

    def _note_packing(self) -> None:
        self._packs = True

    def _may_read(self) -> bool:
        """Return whether kept tensors may be read: unpacking one may run forward again."""
        return not (self._packs or is_packing())

    def look_before_backward(self, roots: Any) -> None:
        self._passes += 1
        self._look(roots)

    def _look(self, roots: Any) -> None:
        """Count what is below the roots of a backward pass."""
        raise NotImplementedError

    def _step_ends(self) -> None:
        """Keep what was found in a step with a backward pass."""
        self._steps.append(self._here)

    def look_after_step(self) -> None:
        super().look_after_step()
        if self._passes:
            self._step_ends()
        self._start()
        if len(self._steps) >= MOST_STEPS or self._compilations():
            self.stop_looking()

    def _in_each_step(self) -> list[Thing]:
        """Return what was found in every step, if enough were looked at and nothing was compiled."""
        if len(self._steps) < FEWEST_STEPS or self._compilations():
            return []
        return [each for each in self._steps[0] if all(step[each] for step in self._steps)]
