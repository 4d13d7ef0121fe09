"""Observer of backward passes that go through the same part of a graph again, for losses that could be added."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor
from torch.nn import DataParallel, Parameter
from torch.optim import Optimizer

from cs_systems.analysis.comparison.loop_findings import REPEATED_BACKWARD
from cs_systems.measure.recorder.gradients import gradient_state
from cs_systems.measure.recorder.graph_size import costs_by_operator, leaves_below
from cs_systems.measure.recorder.observers import FewSteps
from cs_systems.measure.recorder.stacks import own_lines, place_of
from cs_systems.measure.recorder.subject import Subject, parameters_of

MOST_STEPS = 2  # of each period
States = list[tuple[Tensor, tuple[int, int] | None]]  # parameters with the state of their gradients


class Passes(FewSteps):
    """Observer of the operators that backward passes compute again before the next optimizer step.

    Operators are known by their numbers, so that no graph is kept. Passes count together as long as their gradients
    add up: nothing changes or clears them in between.
    """

    def __init__(self, subject: Subject) -> None:
        super().__init__()
        self._subject = subject
        self.restart()

    def restart(self) -> None:
        self.kept = {}
        self._steps = self._repeating = self._passes = 0
        self._again_s = self._total_s = 0.0
        self._place: str | None = None
        self._forget()

    def _forget(self) -> None:
        self._known = set[int]()  # operators of the passes with gradients that add up
        self._roots: Any = None
        self._before: States = []
        self._after: States = []
        self._passes_here, self._again_here_s, self._total_here_s = 0, 0.0, 0.0

    def look_before_backward(self, roots: Any) -> None:
        # the gradient of a plain input is left alone: when it is read, Python has an object for it from then on
        held = {id(p) for p in parameters_of(*self._subject.optimizers)}
        leaves = [each for each in leaves_below(roots) if isinstance(each, Parameter) or id(each) in held]
        self._roots, self._before = roots, [(each, gradient_state(each)) for each in leaves]
        if any(gradient_state(each) != state for each, state in self._after):
            self._known.clear()
        line = own_lines(sys._getframe(1))[1]
        self._line = place_of(line) if line else None

    def look_after_backward(self) -> None:
        roots, self._roots = self._roots, None
        changed = [each for each, state in self._before if gradient_state(each) != state]
        if not changed:
            return  # like autograd.grad
        if any(isinstance(model, DataParallel) for model in self._subject.models):
            return  # each of its threads numbers its operators from 1
        costs = costs_by_operator(roots, changed)
        again_s = sum(costs[operator] for operator in costs.keys() & self._known)
        if again_s:
            self._place = self._line or self._place
        self._passes_here += 1
        self._again_here_s += again_s
        self._total_here_s += sum(costs.values())
        self._known |= costs.keys()
        others = {id(each) for each in changed}
        self._after = [pair for pair in self._after if id(pair[0]) not in others]
        self._after += [(each, gradient_state(each)) for each in changed]
        self._before = []

    def look_before_update(self, optimizer: Optimizer) -> None:
        self._known.clear()
        self._after = []

    def look_after_step(self) -> None:
        self._steps += 1
        self._total_s += self._total_here_s
        if self._again_here_s:
            self._repeating += 1
            self._again_s += self._again_here_s
            self._passes += self._passes_here
        self._forget()
        super().look_after_step()
        if self._steps % MOST_STEPS == 0:  # two walks through the graph take as long as a small model's step
            self.stop_looking()

    def stop_looking(self) -> None:
        super().stop_looking()
        self._forget()

    def end(self) -> None:
        if self._again_s:
            row = {
                "steps": self._repeating,
                "of_steps": self._steps,
                "passes": self._passes / self._repeating,
                "share": self._again_s / self._total_s,
                "place": self._place,
            }
            self.keep(REPEATED_BACKWARD, [row])
