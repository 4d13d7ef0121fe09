"""Share of denormal numbers in what an optimizer keeps, at some steps after the recording.

Momentum of weights without gradients fades by a factor in each step, and becomes denormal after some hundred steps, if
it does not become 0. A CPU computes many times slower with such numbers. Some numbers of some states are read, at steps
of which each is later than the one before by a fifth, so that the last of them is near the end of the loop.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.optim import Optimizer

from cs_systems.analysis.comparison.loop_findings import DENORMALS, DenormalsRow
from cs_systems.core.tables import Tables
from cs_systems.measure.recorder.gradients import evenly
from cs_systems.measure.recorder.observers import Hidden, Observer, Timing

FIRST_STEP, LATER = 100, 1.2  # the first look, and the step of each next one as a multiple of the one before
MOST_TENSORS, MOST_VALUES = 64, 4096  # that are read


class Denormals(Observer):
    """Observer of the state of the optimizer that ends the steps, on a CPU."""

    def __init__(self, hidden: Hidden) -> None:
        super().__init__()
        self._hidden = hidden
        self.restart()

    def restart(self) -> None:
        self.kept = {}
        self._steps, self._next = 0, FIRST_STEP
        self._row: DenormalsRow | None = None

    def step_later(self, optimizer: Optimizer) -> None:
        self._steps += 1
        if self._steps >= self._next:
            self._next = int(LATER * self._steps)
            with self._hidden():
                self._row = _row(optimizer, self._steps)

    def tables(self, timing: Timing, others: Tables) -> Tables:
        return DENORMALS.filled([self._row]) if self._row is not None and self._row["share"] else {}


def _row(optimizer: Optimizer, step: int) -> DenormalsRow | None:
    names, denormal, total = dict[str, None](), 0, 0
    for name, state in _states(optimizer):
        values = state.detach().reshape(-1)[:: -(-state.numel() // MOST_VALUES)].abs()
        count = int(((values > 0) & (values < torch.finfo(values.dtype).tiny)).sum())
        if count:
            names[name] = None
        denormal, total = denormal + count, total + len(values)
    if not total:
        return None
    return {
        "optimizer": type(optimizer).__name__,
        "state": ", ".join(names),
        "share": denormal / total,
        "step": step,
    }


def _states(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Yield some tensors on the CPU that an optimizer keeps for its parameters, with their names."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p in optimizer.state]
    for parameter in evenly(parameters, MOST_TENSORS):
        for name, value in optimizer.state[parameter].items():
            is_plain = type(value) is Tensor and value.layout is torch.strided and value.device.type == "cpu"
            if is_plain and value.is_floating_point() and value.numel() > 1:
                yield str(name), value
