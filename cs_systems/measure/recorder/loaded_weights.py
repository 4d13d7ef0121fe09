"""Weights that a model loads although they are its own tensors: `state_dict()` returned them without a copy.

Weights that are kept like this, such as the best ones so far, go on changing with each step, and loading them does
nothing. The calls are watched until the end of a script, because the best weights are often loaded there. Loading what
was just returned is sound: checkpoints of several ranks are read into these tensors.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from cs_systems.analysis.comparison.loop_findings import LOADED_WEIGHTS, LoadedWeightsRow
from cs_systems.instrument.compiler import Observation, Undo, passed_through, replaced, untraced
from cs_systems.measure.recorder.guard import as_guest
from cs_systems.measure.recorder.observers import Observer
from cs_systems.measure.recorder.phases import Timeline
from cs_systems.measure.recorder.stacks import function_of, own_lines, place_of
from cs_systems.measure.recorder.subject import Subject, parameters_of

MOST_KEPT = 20  # returned tensors that are remembered


class _Returned:
    """Tensor that `state_dict()` has returned, with the number of steps before, and its versions.

    A version counts the writes of a parameter, also by the tensors that share its memory.
    """

    def __init__(self, tensor: Tensor, steps: int) -> None:
        self.tensor, self.steps = weakref.ref(tensor), steps
        self.version = self.after_step = tensor._version

    def step_ends(self) -> None:
        if (tensor := self.tensor()) is not None:
            self.after_step = tensor._version

    def is_written_by_steps(self, tensor: Tensor) -> bool:
        """Return whether steps have written it since, and nothing since the last one."""
        return self.version < self.after_step == tensor._version


class LoadedWeights(Observer):
    """Observer of `state_dict()` and `load_state_dict()` of all modules."""

    runs_operators = False

    def __init__(self, subject: Subject) -> None:
        super().__init__()
        self._subject = subject
        self._trained: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.restart()

    def restart(self) -> None:
        self.kept = {}
        self._steps = 0
        self._returned: dict[int, _Returned] = {}  # first parameter of each call's result, by its id

    def observe(self, observation: Observation) -> None:
        """Watch the calls until the observation is closed."""
        observation.add(self._watch_returned, is_guarded=True)
        observation.add(self._watch_loaded, is_guarded=True)

    def _watch_returned(self) -> Undo:
        own = nn.Module.state_dict

        @passed_through
        @functools.wraps(own)
        def watched(module: Any, *args: Any, **kwargs: Any) -> Any:
            result = own(module, *args, **kwargs)
            if not args and "destination" not in kwargs:  # not a call for a part of a module
                self._returns(module, result)
            return result

        return replaced(nn.Module, "state_dict", watched)

    def _watch_loaded(self) -> Undo:
        own = nn.Module.load_state_dict

        @passed_through
        @functools.wraps(own)
        def watched(module: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
            self._loads(module, state_dict)
            return own(module, state_dict, *args, **kwargs)

        return replaced(nn.Module, "load_state_dict", watched)

    @untraced
    @as_guest
    def _returns(self, module: nn.Module, state: Any) -> None:
        tensor = _first(module, state)
        if tensor is not None and not isinstance(tensor, nn.Parameter):
            kept = {key: each for key, each in self._returned.items() if each.tensor() is not None}
            if len(kept) < MOST_KEPT:
                kept[id(tensor)] = _Returned(tensor, self._steps)
            self._returned = kept

    @untraced
    @as_guest
    def _loads(self, module: nn.Module, state: Any) -> None:
        tensor = _first(module, state)
        known = self._returned.get(id(tensor)) if tensor is not None else None
        if tensor is None or known is None or known.tensor() is not tensor or not known.is_written_by_steps(tensor):
            return
        parameters = dict(module.named_parameters())
        trained = {id(p) for each in (*self._trained, *self._subject.optimizers) for p in parameters_of(each)}
        if not any(id(each) in trained for each in parameters.values()):
            return  # such as an average of the weights, which the program writes itself
        _, line = own_lines(sys._getframe(1))
        if line is None or not all(_is_same(state.get(name), each) for name, each in parameters.items()):
            return
        row: LoadedWeightsRow = {
            "model": type(module).__name__, "steps": self._steps - known.steps, "parameters": len(parameters),
            "function": function_of(line), "place": place_of(line),
        }  # fmt: skip
        self.keep(LOADED_WEIGHTS, [*self.kept.get(LOADED_WEIGHTS.name, ()), row][:1])

    def step_recorded(self, number: int, timeline: Timeline) -> None:
        self._step_ends()

    def step_later(self, optimizer: Optimizer) -> None:
        self._step_ends()

    def _step_ends(self) -> None:
        self._steps += 1
        for each in self._returned.values():
            each.step_ends()

    def end(self) -> None:
        self._trained = weakref.WeakSet(self._subject.optimizers)


def _first(module: nn.Module, state: Any) -> Tensor | None:
    """Return the first parameter's tensor in a state, if it is the parameter's own."""
    if not isinstance(state, Mapping):
        return None
    for name, parameter in module.named_parameters():
        given = state.get(name)
        return given if _is_same(given, parameter) else None
    return None


def _is_same(given: Any, parameter: nn.Parameter) -> bool:
    """Return whether a tensor has the memory of a parameter."""
    if type(given) not in (Tensor, nn.Parameter) or type(parameter) is not nn.Parameter:
        return False  # such as a tensor without memory, or one that several ranks share
    address: int = parameter.data_ptr()
    return address != 0 and given.data_ptr() == address
