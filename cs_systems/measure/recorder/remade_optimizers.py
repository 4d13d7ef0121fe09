"""Observer of optimizers that the loop makes anew for the same parameters, so that their state is lost."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch
from torch.optim import LBFGS, Optimizer

from cs_systems.analysis.comparison.loop_findings import REMADE_OPTIMIZERS, RemadeOptimizersRow
from cs_systems.measure.recorder.observers import FewSteps


class RemadeOptimizers(FewSteps):
    """Observer of which optimizers step each optimizer's first parameter, in a few steps."""

    runs_operators = False

    def __init__(self) -> None:
        super().__init__()
        self.restart()

    def restart(self) -> None:
        self.kept = {}
        # by the first parameter: the optimizers of its steps, of which one may call another, and the row
        self._known: list[tuple[weakref.ref[torch.Tensor], weakref.WeakSet[Optimizer], RemadeOptimizersRow]] = []

    def look_after_update(self, optimizer: Optimizer) -> None:
        parameter: torch.Tensor | None = next((p for group in optimizer.param_groups for p in group["params"]), None)
        if parameter is None or isinstance(optimizer, LBFGS):  # a step of LBFGS may be a whole problem
            return
        for known, optimizers, row in self._known:
            if known() is parameter:
                row["steps"] += 1
                row["made"] += optimizer not in optimizers
                optimizers.add(optimizer)
                return
        state = ", ".join(_state_of(optimizer, parameter)) or None
        row = {"optimizer": type(optimizer).__name__, "steps": 0, "made": 0, "state": state}
        self._known.append((weakref.ref(parameter), weakref.WeakSet([optimizer]), row))

    def end(self) -> None:
        self.keep(REMADE_OPTIMIZERS, [row for _, _, row in self._known if row["made"]])


def _state_of(optimizer: Optimizer, parameter: torch.Tensor) -> Iterator[str]:
    """Yield the names of what an optimizer keeps for a parameter from step to step, other than its number of steps."""
    for name, value in optimizer.state.get(parameter, {}).items():
        if value is not None and name != "step":
            yield str(name)
