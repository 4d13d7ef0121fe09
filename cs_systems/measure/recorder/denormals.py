"""Share of denormal numbers in what an optimizer keeps, at some steps after the recording.

Momentum of weights without gradients fades by a factor in each step, and becomes denormal after some hundred steps, if
it does not become 0. A CPU computes many times slower with such numbers. Some numbers of some states are read, at steps
of which each is later than the one before by a fifth, so that the last of them is near the end of the loop.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from cs_systems.analysis.comparison.loop_findings import DENORMALS, DenormalsRow
from cs_systems.core.tables import Tables
from cs_systems.measure.recorder.copied_updates import CopiedUpdate, copied
from cs_systems.measure.recorder.gradients import evenly
from cs_systems.measure.recorder.observers import Hidden, Observer, Timing

FIRST_STEP, LATER = 100, 1.2  # the first look, and the step of each next one as a multiple of the one before
MOST_TENSORS, MOST_VALUES = 64, 4096  # that are read
LEAST_TIMED = 0.01  # share of denormal numbers from which updates are timed
MOST_ELEMENTS = 1 << 23  # of the parameters that are copied
TRIALS, TRIALS_S = 20, 0.3  # pairs of updates, of which the shortest count, and the time after which no other begins


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
    """Return the share among all numbers of the states, estimated from the tensors and numbers that are read."""
    names, denormal, total = dict[str, None](), 0.0, 0
    for name, state in _states(optimizer):
        values = state.detach().reshape(-1)[:: -(-state.numel() // MOST_VALUES)]
        share = float(_is_denormal(values).double().mean())
        if share:
            names[name] = None
        denormal, total = denormal + share * state.numel(), total + state.numel()
    if not total:
        return None
    share = denormal / total
    return {
        "optimizer": type(optimizer).__name__,
        "state": ", ".join(names),
        "share": share,
        "step": step,
        "extra_s": _extra_s(optimizer) if share >= LEAST_TIMED else None,
    }


def _is_denormal(values: Tensor) -> Tensor:
    return (values != 0) & (values.abs() < torch.finfo(values.dtype).tiny)


@torch.no_grad()
def _extra_s(optimizer: Optimizer) -> float | None:
    """Return how much longer an update takes than with zeros in place of denormal numbers; None if it cannot be tried.

    The copies have the gradients of the last step, with which denormal numbers stay so.
    """
    if not type(optimizer).__module__.startswith("torch.optim."):
        return None
    every = [p for p in _parameters(optimizer) if type(p.grad) is Tensor and p.grad.layout is torch.strided]
    elements, chosen = 0, list[Tensor]()
    for parameter in evenly(every, MOST_TENSORS):
        if elements + parameter.numel() <= MOST_ELEMENTS:
            elements, chosen = elements + parameter.numel(), [*chosen, parameter]
    if not chosen:
        return None
    least_s, begin_s = [math.inf, math.inf], time.perf_counter()
    try:
        for trial in range(TRIALS):
            if trial and time.perf_counter() - begin_s > TRIALS_S:
                break
            for which in (False, True):
                least_s[which] = min(least_s[which], _update_s(optimizer, chosen, is_flushed=which))
    except (RuntimeError, TypeError, ValueError):  # an optimizer that needs a closure, or whose copy cannot be made
        return None
    return max(0.0, least_s[False] - least_s[True]) * sum(p.numel() for p in every) / elements


def _update_s(like: Optimizer, chosen: Sequence[Tensor], *, is_flushed: bool) -> float:
    """Return the time of one update of copies of some parameters."""
    copies = CopiedUpdate(like, chosen, lambda parameter: copied(parameter.grad), _flushed if is_flushed else copied)
    begin_s = time.perf_counter()
    copies.update()
    return time.perf_counter() - begin_s


def _flushed(value: Any) -> Any:
    """Return a copy of a value that an optimizer keeps, with zeros in place of denormal numbers."""
    if isinstance(value, Tensor) and value.is_floating_point() and value.numel() > 1:
        return torch.where(_is_denormal(value), 0.0, value)
    return copied(value)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters for which an optimizer keeps something."""
    return [p for group in optimizer.param_groups for p in group["params"] if p in optimizer.state]


def _states(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Yield some tensors on the CPU that an optimizer keeps for its parameters, with their names."""
    for parameter in evenly(_parameters(optimizer), MOST_TENSORS):
        for name, value in optimizer.state[parameter].items():
            is_plain = type(value) is Tensor and value.layout is torch.strided and value.device.type == "cpu"
            # numbers of float16 are denormal from 6e-5 on, but are computed with as float32
            if is_plain and value.is_floating_point() and value.dtype != torch.float16 and value.numel() > 1:
                yield str(name), value
