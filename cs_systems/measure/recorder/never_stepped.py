"""Backward passes of a script of which no optimizer ever steps.

The weights are compared every few passes, because a script may update them itself, through `.data` with no new version.
"""

from __future__ import annotations

import dis
import re
import sys
import weakref
from collections.abc import Iterable, Sequence
from types import CodeType, FrameType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from cs_systems.analysis.comparison.loop_findings import NeverSteppedRow
from cs_systems.measure.recorder.gradients import evenly, some_values
from cs_systems.measure.recorder.graph_size import leaves_below
from cs_systems.measure.recorder.observers import is_profiled
from cs_systems.measure.recorder.stacks import own_lines, place_of
from cs_systems.measure.recorder.subject import parameters_of

FIRST_READING = 5  # passes, and from one comparison to the next; most loops step before, and then nothing is read
MOST_PARAMETERS = 64  # most compared parameters
_OPTIMIZER = re.compile(r"(?i)opt|^sgd$|^adam")  # in the name of what a method `step` belongs to


class NeverStepped:
    """Counter of the backward passes before the first step of an optimizer."""

    def __init__(self) -> None:
        self._is_unknown = False
        self._begin()

    def _begin(self) -> None:
        self._passes, self._next = 0, FIRST_READING
        self._before: list[tuple[weakref.ref[Tensor], tuple[float, ...]]] = []
        self._row: NeverSteppedRow | None = None

    def backward_ended(self, roots: Any, optimizers: Iterable[Optimizer], models: Iterable[nn.Module]) -> None:
        """Count a pass that gave an optimizer's parameters gradients; it is hidden from the program's modes."""
        holders = {each: len([p for p in parameters_of(each) if p.grad is not None]) for each in optimizers}
        if self._is_unknown or not any(holders.values()):
            return
        self._passes += 1
        if self._passes < self._next:
            return
        self._next += FIRST_READING
        held = parameters_of(*holders)
        known = {id(p) for p in held} | {id(p) for model in models for p in model.parameters()}
        # a gradient of something else, such as of an input, may be what the passes are for
        self._is_unknown = is_profiled() or any(id(leaf) not in known for leaf in leaves_below(roots))
        if self._is_unknown:
            return
        if any(reference() is None for reference, _ in self._before):  # another model by now
            self._begin()
            self._passes = 1
            return
        self._is_unknown = self._have_changed()
        if not self._before:
            with_gradient = [p for p in held if p.grad is not None]
            self._before = [(weakref.ref(p), some_values(p)) for p in evenly(with_gradient, MOST_PARAMETERS)]
            self._is_unknown = not any(values for _, values in self._before)
        most = max(holders, key=holders.__getitem__)
        backward, step = _places(sys._getframe(1))
        self._row = {"optimizer": type(most).__name__, "parameters": holders[most], "passes": 0,
                     "backward": backward, "step": step}  # fmt: skip

    def rows(self) -> Sequence[NeverSteppedRow]:
        """Return the row of the passes so far, if the weights are still what they were at the first comparison."""
        is_compared = self._passes >= 2 * FIRST_READING
        if self._row is None or self._is_unknown or not is_compared or self._have_changed():
            return ()
        return ({**self._row, "passes": self._passes},)

    def _have_changed(self) -> bool:
        """Return whether a weight that is not gone has changed since the first comparison."""
        known = [(p, values) for reference, values in self._before if (p := reference()) is not None]
        return any(some_values(p) != values for p, values in known)


def _places(frame: FrameType | None) -> tuple[str | None, str | None]:
    """Return the own line of the backward pass, and in the functions around it that of an optimizer's step."""
    chain, line = own_lines(frame)
    steps = (step for code, _ in reversed(chain) if (step := _step_in(code)) is not None)
    return (None if line is None else place_of(line)), next(steps, None)


def _step_in(code: CodeType) -> str | None:
    """Return the first line of a function that calls the method `step` of something named like an optimizer."""
    owner = ""
    for one in dis.get_instructions(code):
        if one.argval == "step" and one.opname in ("LOAD_ATTR", "LOAD_METHOD") and _OPTIMIZER.search(owner):
            return place_of((code, one.offset))
        owner = one.argval if isinstance(one.argval, str) else ""
    return None
