"""Observer of optimizers that the loop makes anew for the same parameters, so that their state is lost."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch
from torch.optim import Optimizer

from cs_systems.analysis.comparison.loop_findings import REMADE_OPTIMIZERS, RemadeOptimizersRow
from cs_systems.measure.recorder.observers import FewSteps


class RemadeOptimizers(FewSteps):
    """Identity of the optimizer of each first parameter, in a few steps."""

    runs_operators = False

    def __init__(self) -> None:
        super().__init__()
        self.restart()

    def restart(self) -> None:
        self.kept = {}
        # by the first parameter: the optimizer of its last step, and the row
        self._last: list[tuple[weakref.ref[torch.Tensor], weakref.ref[Optimizer], RemadeOptimizersRow]] = []

    def look_after_update(self, optimizer: Optimizer) -> None:
        parameter: torch.Tensor | None = next((p for group in optimizer.param_groups for p in group["params"]), None)
        if parameter is None:
            return
        row: RemadeOptimizersRow = {"optimizer": type(optimizer).__name__, "steps": 0, "made": 0, "state": None}
        for number, (known, last, of) in enumerate(self._last):
            if known() is parameter:
                row = of
                row["steps"] += 1
                row["made"] += last() is not optimizer
                del self._last[number]
                break
        row["state"] = ", ".join(_state_of(optimizer, parameter)) or None
        self._last.append((weakref.ref(parameter), weakref.ref(optimizer), row))

    def end(self) -> None:
        self.keep(REMADE_OPTIMIZERS, [row for _, _, row in self._last if row["made"]])


def _state_of(optimizer: Optimizer, parameter: torch.Tensor) -> Iterator[str]:
    """Yield the names of what an optimizer keeps for a parameter from step to step, other than its number of steps."""
    for name, value in optimizer.state.get(parameter, {}).items():
        if value is not None and name != "step":
            yield str(name)
