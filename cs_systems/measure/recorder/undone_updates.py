"""Steps of optimizers of which nearly nothing is left when a model is called again.

A soft update that copies a target network into the trained one does that, instead of the other way round. Elements of
some parameters are read before and after a step, and when the next call of a model begins, so that weights that are
used in between and then restored do not count. Weights that move over the recording, although little of each step is
left, do not count either: a mask or a slow average may be meant.
"""

from __future__ import annotations

import math
import sys
import weakref
from dataclasses import dataclass, field

from torch import Tensor
from torch.optim import Optimizer

from cs_systems.analysis.comparison.loop_findings import UNDONE_UPDATES, UndoneUpdatesRow
from cs_systems.measure.recorder.gradients import evenly, some_values
from cs_systems.measure.recorder.observers import FewSteps, ModelCall
from cs_systems.measure.recorder.stacks import Line, own_lines, place_of
from cs_systems.measure.recorder.subject import Subject, parameters_of

MOST_PARAMETERS, MOST_VALUES = 64, 256  # of an optimizer, and of a parameter
FEWEST_STEPS = 4
MOST_LEFT = 0.1  # of a change
_Values = list[tuple[float, ...]]


@dataclass
class _Steps:
    """Steps of an optimizer, with the values of some of its parameters.

    Attributes:
        first: before the first step. last: at the last call after a step.
        left, changes: share of each step's change that is left, the largest of the parameters, and their changes.
        is_clear: a call of a model follows each step, and each step changes something.
    """

    parameters: list[weakref.ref[Tensor]]
    first: _Values
    before: _Values | None = None
    after: _Values | None = None
    last: _Values = field(default_factory=list)
    left: list[float] = field(default_factory=list)
    changes: list[list[float]] = field(default_factory=list)
    is_clear: bool = True
    line: Line | None = None

    def read(self) -> _Values:
        return [() if (p := each()) is None else some_values(p, MOST_VALUES) for each in self.parameters]

    def judge(self) -> None:
        """Compare the values with those around the last step."""
        if self.before is None or self.after is None:
            return
        self.last = self.read()
        changes, remaining = _distances(self.before, self.after), _distances(self.before, self.last)
        self.before = self.after = None
        if not any(changes) or not all(map(math.isfinite, (*changes, *remaining))):
            self.is_clear = False
            return
        self.changes.append(changes)
        self.left.append(max(now / change for now, change in zip(remaining, changes, strict=True) if change))

    def are_undone(self) -> bool:
        """Return whether hardly anything is left of each step, nor of all together."""
        if not self.is_clear or len(self.left) < FEWEST_STEPS or max(self.left) > MOST_LEFT:
            return False
        moved = _distances(self.first, self.last)
        steps = [max(each) for each in zip(*self.changes, strict=True)]
        return all(far <= MOST_LEFT * step for far, step in zip(moved, steps, strict=True))


def _distances(some: _Values, others: _Values) -> list[float]:
    pairs = zip(some, others, strict=True)
    return [math.dist(one, other) if len(one) == len(other) else math.inf for one, other in pairs]


class UndoneUpdates(FewSteps):
    """Observer of the parameters of optimizers around their steps, and when a model is called again."""

    def __init__(self, subject: Subject) -> None:
        super().__init__()
        self._subject = subject
        self.restart()

    def restart(self) -> None:
        self.kept = {}
        self._steps: weakref.WeakKeyDictionary[Optimizer, _Steps] = weakref.WeakKeyDictionary()

    def stop_looking(self) -> None:
        super().stop_looking()
        self._forget()

    def step_failed(self) -> None:
        self._forget()

    def _forget(self) -> None:
        for steps in self._steps.values():
            steps.before = steps.after = None

    def look_at_call(self, call: ModelCall) -> None:
        if not call.is_in_update:
            for steps in self._steps.values():
                steps.judge()

    def look_before_update(self, optimizer: Optimizer) -> None:
        steps = self._steps.get(optimizer)
        if steps is None:
            some = evenly([p for p in parameters_of(optimizer) if p.grad is not None], MOST_PARAMETERS)
            steps = _Steps([weakref.ref(p) for p in some], [])
            steps.first = steps.read()
            steps.is_clear = bool(some) and () not in steps.first and self._is_alone(optimizer, some)
            self._steps[optimizer] = steps
        if steps.after is not None:
            steps.is_clear = False  # no model was called since the last step
        if steps.is_clear:
            steps.before, steps.after = steps.read(), None

    def _is_alone(self, optimizer: Optimizer, parameters: list[Tensor]) -> bool:
        """Return whether no other optimizer holds one of its parameters."""
        others = {id(p) for each in self._subject.optimizers if each is not optimizer for p in parameters_of(each)}
        return others.isdisjoint(map(id, parameters))

    def look_after_update(self, optimizer: Optimizer) -> None:
        steps = self._steps.get(optimizer)
        if steps is not None and steps.before is not None:
            steps.after, steps.line = steps.read(), own_lines(sys._getframe(1))[1]

    def look_at_skip(self, optimizer: Optimizer) -> None:
        if (steps := self._steps.get(optimizer)) is not None:
            steps.before = steps.after = None

    def end(self) -> None:
        undone = [(optimizer, each) for optimizer, each in self._steps.items() if each.are_undone()]
        self.keep(UNDONE_UPDATES, [_row(optimizer, each) for optimizer, each in undone])
        self._steps.clear()


def _row(optimizer: Optimizer, steps: _Steps) -> UndoneUpdatesRow:
    return {
        "optimizer": type(optimizer).__name__,
        "parameters": len(parameters_of(optimizer)),
        "compared": len(steps.parameters),
        "steps": len(steps.left),
        "left": max(steps.left),
        "place": place_of(steps.line) if steps.line else None,
    }
