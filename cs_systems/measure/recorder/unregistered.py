"""Parameters that backward reaches, and that a module keeps in a Python list, tuple or dict, where it finds none."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer

from cs_systems.analysis.comparison.loop_findings import UNREGISTERED, UnregisteredRow
from cs_systems.measure.recorder.gradients import some_values
from cs_systems.measure.recorder.graph_size import MOST_GRAPHS, leaves_below
from cs_systems.measure.recorder.observers import FewSteps
from cs_systems.measure.recorder.subject import Subject, parameters_of

_OF_MODULES = frozenset(vars(nn.Module()))


class _Seen:
    """Parameter with some of its values when it was first seen, and the number of passes that reached it."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter, self.values, self.passes = weakref.ref(parameter), some_values(parameter), 0

    def is_as_it_was(self) -> bool:
        parameter = self.parameter()
        return parameter is not None and bool(self.values) and some_values(parameter) == self.values


class Unregistered(FewSteps):
    """Observer of the parameters below the roots of a few backward passes."""

    def __init__(self, subject: Subject) -> None:
        super().__init__()
        self._subject = subject
        self.restart()

    def restart(self) -> None:
        self.kept = {}
        self._passes = 0
        self._seen: dict[int, _Seen] = {}

    def look_before_backward(self, roots: Any) -> None:
        if self._passes >= MOST_GRAPHS or self._subject.world_size > 1:  # a strategy may replace parameters by shards
            return
        self._passes += 1
        known = self._subject.parameters()
        for leaf in leaves_below(roots):
            if isinstance(leaf, nn.Parameter) and id(leaf) not in known:
                seen = self._seen.get(id(leaf))
                if seen is None or seen.parameter() is not leaf:
                    seen = self._seen[id(leaf)] = _Seen(leaf)
                seen.passes += 1

    def end(self) -> None:
        # also optimizers that have not stepped yet
        every = (each for each in gc.get_objects() if issubclass(type(each), Optimizer))
        known = self._subject.parameters() | {id(p) for p in parameters_of(*every)}
        still = {which: each for which, each in self._seen.items() if which not in known and each.is_as_it_was()}
        for holder, held in self._holders():
            seen = [still[which] for which in held if which in still and 2 * still[which].passes > self._passes]
            if seen:
                self.keep(UNREGISTERED, [_row(holder, seen)])
                break
        self._seen.clear()

    def _holders(self) -> Iterator[tuple[str, list[int]]]:
        """Yield the lists, tuples and dicts of the models' modules by name, each with the parameters in it."""
        for model in self._subject.models:
            for name, module in model.named_modules():
                for attribute, value in vars(module).items():
                    if attribute not in _OF_MODULES and isinstance(value, list | tuple | dict):
                        where = ".".join(filter(None, (type(model).__name__, name, attribute)))
                        yield where, [id(parameter) for parameter in _parameters_in(value)]


def _parameters_in(value: Any) -> Iterator[nn.Parameter]:
    if isinstance(value, nn.Parameter):
        yield value
    elif isinstance(value, nn.Module):
        yield from value.parameters()
    elif isinstance(value, list | tuple | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _parameters_in(each)


def _row(holder: str, seen: list[_Seen]) -> UnregisteredRow:
    parameters = [parameter for each in seen if (parameter := each.parameter()) is not None]
    largest = max(parameters, key=lambda parameter: parameter.numel())
    return {
        "holder": holder,
        "parameters": len(parameters),
        "elements": sum(parameter.numel() for parameter in parameters),
        "largest": " × ".join(map(str, largest.shape)) or "1",
        "passes": min(each.passes for each in seen),
    }
