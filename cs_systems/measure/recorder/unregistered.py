"""Parameters that backward reaches, and that no module and no optimizer knows, such as layers in a Python list."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from cs_systems.analysis.comparison.loop_findings import UNREGISTERED, UnregisteredRow
from cs_systems.measure.recorder.gradients import some_values
from cs_systems.measure.recorder.graph_size import leaves_below
from cs_systems.measure.recorder.observers import FewSteps
from cs_systems.measure.recorder.subject import Subject

MOST_PASSES = 6  # a graph of thousands of nodes takes some milliseconds


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
        if self._passes >= MOST_PASSES or self._subject.world_size > 1:  # a strategy may replace parameters by shards
            return
        self._passes += 1
        known = self._known(self._subject.optimizers)
        for leaf in leaves_below(roots):
            if isinstance(leaf, nn.Parameter) and id(leaf) not in known:
                seen = self._seen.get(id(leaf))
                if seen is None or seen.parameter() is not leaf:
                    seen = self._seen[id(leaf)] = _Seen(leaf)
                seen.passes += 1

    def end(self) -> None:
        # also optimizers that have not stepped yet
        known = self._known(each for each in gc.get_objects() if issubclass(type(each), Optimizer))
        unknown = [each for which, each in self._seen.items() if which not in known and each.is_as_it_was()]
        row = self._row([each for each in unknown if 2 * each.passes > self._passes])
        self.keep(UNREGISTERED, [row] if row else [])
        self._seen.clear()

    def _known(self, optimizers: Iterable[Optimizer]) -> set[int]:
        of_models = {id(p) for model in self._subject.models for p in model.parameters()}
        groups = (group for optimizer in optimizers for group in optimizer.param_groups)
        return of_models | {id(p) for group in groups for p in group["params"]}

    def _row(self, seen: list[_Seen]) -> UnregisteredRow | None:
        parameters = [parameter for each in seen if (parameter := each.parameter()) is not None]
        if not parameters:
            return None
        largest = max(parameters, key=lambda parameter: parameter.numel())
        return {
            "parameters": len(parameters),
            "elements": sum(parameter.numel() for parameter in parameters),
            "largest": " × ".join(map(str, largest.shape)),
            "passes": min(each.passes for each in seen),
        }
