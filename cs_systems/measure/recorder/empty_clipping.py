"""Calls of clip_grad_norm_ that clip nothing, because their iterator of parameters is used up.

`parameters()` and `filter()` return iterators, which give their items once: to the optimizer, or to the first call. The
functions that clip_grad_norm_ and clip_grad_value_ call are replaced while this looks, since a program may have
imported these two by name. Only an iterator of an earlier step is certainly used up. clip_grad_value_ takes no empty
one.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

from torch.nn.utils import clip_grad
from torch.optim import Optimizer

from cs_systems.analysis.comparison.loop_findings import EMPTY_CLIPPING, EmptyClippingRow
from cs_systems.instrument.compiler import Observation, Undo, passed_through, replaced
from cs_systems.measure.recorder.guard import as_guest
from cs_systems.measure.recorder.observers import Period, Replacing
from cs_systems.measure.recorder.stacks import own_lines, place_of
from cs_systems.measure.recorder.subject import parameters_of
from cs_systems.measure.recorder.tracker import Tracker

_BELOW = ("_clip_grads_with_norm_", "_group_tensors_by_device_and_dtype")  # called with parameters or [gradients]


class _Call(NamedTuple):
    """Call that clips nothing, with the iterator that it got."""

    function: str
    place: str | None
    parameters: Iterator[Any]


class EmptyClipping(Replacing):
    """Observer of the calls that clip gradients, in a few steps."""

    runs_operators = False

    def __init__(self, tracker: Tracker) -> None:
        super().__init__()
        self._tracker = tracker
        self.restart()

    def restart(self) -> None:
        self.kept = {}
        self._steps = self._empty_steps = self._parameters = 0
        self._known: list[_Call] = []  # of earlier steps, one for each iterator
        self._again: _Call | None = None  # call with an iterator of an earlier step
        self._start()

    def _start(self) -> None:
        self._empty: list[_Call] = []
        self._clips = False
        self._updated = 0  # parameters with a gradient

    def begins(self, period: Period) -> None:
        super().begins(period)
        if self.is_looking:
            self._start()
            self._installed = Observation()
            for name in _BELOW:
                self._installed.add(partial(_watched, name, self._clipped), is_guarded=True)

    @as_guest
    def _clipped(self, given: Any) -> None:
        if not (self.is_looking and self._tracker.observes()):
            return
        of_call = _call() if isinstance(given, list) and not given else None
        if of_call is None:
            self._clips |= bool(given)
        else:
            self._empty.append(of_call)

    def look_before_update(self, optimizer: Optimizer) -> None:
        self._updated += sum(p.requires_grad and p.grad is not None for p in parameters_of(optimizer))

    def look_after_step(self) -> None:
        super().look_after_step()
        if self._updated and (self._clips or self._empty):
            self._steps += 1
            for call in self._empty:
                if not self._clips and any(call.parameters is each.parameters for each in self._known):
                    self._again, self._parameters = call, self._updated
            self._empty_steps += bool(self._empty) and not self._clips
            self._known = self._empty or self._known
        self._start()

    def end(self) -> None:
        if (call := self._again) is not None:
            row: EmptyClippingRow = {
                "function": call.function, "place": call.place, "kind": type(call.parameters).__name__,
                "parameters": self._parameters, "steps": self._empty_steps, "of_steps": self._steps,
            }  # fmt: skip
            self.keep(EMPTY_CLIPPING, [row])
        self._known, self._again = [], None
        self._start()


def _watched(name: str, seen: Callable[[Any], None]) -> Undo:
    """Replace a function of torch's clipping by one that shows its first argument."""
    own = getattr(clip_grad, name)

    @passed_through
    @functools.wraps(own)
    def watched(*args: Any, **kwargs: Any) -> Any:
        seen(args[0] if args else None)
        return own(*args, **kwargs)

    return replaced(clip_grad, name, watched)


def _call() -> _Call | None:
    """Return the running call of clip_grad_norm_, if it got an iterator."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code, known = frame.f_code, frame.f_locals
        if code.co_filename == clip_grad.__file__ and {"func", "args", "kwargs"} <= known.keys():
            parameters = known["args"][0] if known["args"] else known["kwargs"].get("parameters")
            if isinstance(parameters, Iterator):
                line = own_lines(frame.f_back)[1]
                return _Call(known["func"].__name__, place_of(line) if line else None, parameters)
        frame = frame.f_back
    return None
