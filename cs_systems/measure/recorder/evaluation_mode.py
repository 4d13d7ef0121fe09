"""Models that train in evaluation mode, because an evaluation calls `eval()` and nothing calls `train()` after it.

The mode of each model is read at every backward pass. Only a switch that stays until the end of the recording counts,
and only one by an evaluation: calls without gradients follow the last `eval()`, and the same line calls it again later.
A program may train in evaluation mode on purpose, such as with fixed statistics; then it does so from the start, calls
`eval()` right before it trains or once, or calls `train()` with a mode of its own.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer

from cs_systems.analysis.comparison.loop_findings import EVALUATION_MODE, EvaluationModeRow
from cs_systems.instrument.compiler import Observation, Undo, passed_through, replaced, untraced
from cs_systems.measure.recorder.guard import as_guest
from cs_systems.measure.recorder.observers import FewSteps
from cs_systems.measure.recorder.phases import Timeline
from cs_systems.measure.recorder.stacks import Line, function_of, own_lines, place_of
from cs_systems.measure.recorder.subject import Subject, parameters_of
from cs_systems.measure.recorder.tracker import Tracker

DROPOUT, STATISTICS = "dropout", "statistics"
_Switching = list[tuple[weakref.ref[nn.Module], str]]  # modules that the mode changes, with what it changes in them


class _Mode:
    """Mode of one model.

    Attributes:
        trained: steps in training mode before the switch.
        since, steps: the first step in evaluation mode, and the number of those without one in training mode between.
        line: the line of the last `eval()`. calls: the number of calls without gradients before it.
        is_by_evaluation: calls without gradients came between that and the first backward pass.
        is_updated: an optimizer updates the model in evaluation mode.
        is_again: the same line has called `eval()` again, as an evaluation does, after steps in evaluation mode.
        switching: modules in training mode that the mode changes.
    """

    def __init__(self) -> None:
        self.trained = self.steps = self.calls = 0
        self.since: int | None = None
        self.line: Line | None = None
        self.is_by_evaluation = self.is_updated = self.is_again = False
        self.switching: _Switching = []


class EvaluationMode(FewSteps):
    """Observer of the modes of a loop's models at each backward pass."""

    runs_operators = False

    def __init__(self, subject: Subject, tracker: Tracker) -> None:
        super().__init__()
        self._subject, self._tracker = subject, tracker
        self.restart()

    def restart(self) -> None:
        self.kept = {}
        self._steps = self._calls = 0
        self._modes: weakref.WeakKeyDictionary[nn.Module, _Mode] = weakref.WeakKeyDictionary()
        self._is_in_eval = False
        self.step_failed()

    def step_failed(self) -> None:
        self._here: dict[nn.Module, bool] = {}  # the models of this step, and whether one pass was in training mode

    def observe(self, observation: Observation) -> None:
        """Watch calls of `eval()` and `train()` until the observation is closed."""
        observation.add(self._watch, is_guarded=True)
        observation.add(self._watch_train, is_guarded=True)

    def _watch(self) -> Undo:
        own = nn.Module.eval

        @passed_through
        @functools.wraps(own)
        def watched(module: Any, *args: Any, **kwargs: Any) -> Any:
            self._is_in_eval = True
            try:
                result = own(module, *args, **kwargs)
            finally:
                self._is_in_eval = False
            self._evaluates()
            return result

        return replaced(nn.Module, "eval", watched)

    def _watch_train(self) -> Undo:
        own = nn.Module.train

        @passed_through
        @functools.wraps(own)
        def watched(module: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._is_in_eval and (mode := self._modes.get(module)) is not None:
                mode.line, mode.is_again = None, False  # the program sets the mode itself, to whichever
            return own(module, *args, **kwargs)

        return replaced(nn.Module, "train", watched)

    @untraced
    @as_guest
    def _evaluates(self) -> None:
        """Keep the place of a call of `eval()` for the models that are in evaluation mode after it."""
        if not self._tracker.observes():
            return
        line = own_lines(sys._getframe(1))[1]
        for model in self._subject.models:
            if not model.training and (mode := self._modes.get(model)) is not None:
                mode.is_again |= mode.since is not None and line == mode.line
                mode.line, mode.calls = line, self._calls_so_far()

    def _calls_so_far(self) -> int:
        """Return the number of the models' calls without gradients."""
        return self._calls + sum(count for (is_recorded, _), count in self._tracker.calls.items() if not is_recorded)

    def backward_begins(self, roots: Any) -> None:
        for model in self._subject.models:
            self._here[model] = self._here.get(model, False) or model.training
            mode = self._modes.get(model)
            if mode is None:
                mode = self._modes[model] = _Mode()
            if not model.training and mode.trained and mode.since is None and not mode.is_by_evaluation:
                mode.is_by_evaluation = mode.line is not None and self._calls_so_far() > mode.calls

    def step_recorded(self, number: int, timeline: Timeline) -> None:
        self._steps += 1
        for model, is_training in self._here.items():
            mode = self._modes[model]
            if is_training:
                mode.trained, mode.since, mode.steps = mode.trained + 1, None, 0
                mode.is_by_evaluation = mode.is_updated = mode.is_again = False
            elif mode.trained:
                mode.since = mode.since or self._steps
                mode.steps += 1
        self._calls = self._calls_so_far()
        self.step_failed()

    def look_before_backward(self, roots: Any) -> None:
        for model in self._subject.models:
            mode = self._modes.get(model)
            if mode is not None and model.training and not mode.switching:
                mode.switching = [*_switching(model)]

    def look_before_update(self, optimizer: Optimizer) -> None:
        with_gradient = {id(p) for p in parameters_of(optimizer) if p.requires_grad and p.grad is not None}
        for model, mode in self._modes.items():
            if mode.since is not None and not mode.is_updated:
                mode.is_updated = any(id(p) in with_gradient for p in model.parameters())

    def end(self) -> None:
        self.keep(EVALUATION_MODE, [row for model, mode in self._modes.items() if (row := _row(model, mode))])
        self._modes.clear()
        self.step_failed()


def _switching(model: nn.Module) -> Iterator[tuple[weakref.ref[nn.Module], str]]:
    """Yield the modules in training mode that drop some of their inputs, or update statistics of them."""
    for module in model.modules():
        rate = getattr(module, "p" if isinstance(module, nn.modules.dropout._DropoutNd) else "dropout", 0.0)
        is_known = isinstance(module, nn.modules.dropout._DropoutNd | nn.RNNBase | nn.MultiheadAttention)
        if not module.training:
            continue
        if is_known and rate > 0 and getattr(module, "num_layers", 2) > 1:
            yield weakref.ref(module), DROPOUT
        elif isinstance(module, nn.modules.batchnorm._NormBase) and module.running_mean is not None:
            yield weakref.ref(module), STATISTICS


def _row(model: nn.Module, mode: _Mode) -> EvaluationModeRow | None:
    """Return the row of a model that an evaluation left in evaluation mode; None if a part of it was switched back."""
    modules = [(module, what) for reference, what in mode.switching if (module := reference()) is not None]
    is_left = mode.is_by_evaluation and mode.is_again and mode.is_updated
    if mode.since is None or mode.line is None or not (is_left and modules):
        return None
    if any(module.training for module, _ in modules):
        return None
    return {
        "model": type(model).__name__,
        "since": mode.since,
        "steps": mode.steps,
        "dropout": sum(what == DROPOUT for _, what in modules),
        "statistics": sum(what == STATISTICS for _, what in modules),
        "function": function_of(mode.line),
        "place": place_of(mode.line),
    }
