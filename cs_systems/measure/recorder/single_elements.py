"""Own lines that write single elements of a tensor, or read them as Python's numbers, in a few warm-up steps.

Such as `mask[i, j] = 1` in two loops, or `if word != 0` for each word of a batch: each is an operator of some
microseconds. Elements that autograd records are left out, because a recurrence may need them one by one.
"""

from __future__ import annotations

import functools
import os
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor

from cs_systems.analysis.comparison.loop_findings import SINGLE_ELEMENTS, SingleElementsRow
from cs_systems.instrument.compiler import Observation, Undo, is_tracing, passed_through, replaced
from cs_systems.measure.recorder.guard import as_guest
from cs_systems.measure.recorder.observers import Period, Replacing, is_profiled
from cs_systems.measure.recorder.phases import BACKWARD, OPTIMIZER
from cs_systems.measure.recorder.stacks import function_of, is_own
from cs_systems.measure.recorder.tracker import Tracker

MOST_STEPS, FEWEST_STEPS = 3, 2
FEWEST = 200  # of a line in each step
MOST_LINES = 10
_READS = ("__bool__", "__int__", "__float__", "__index__", "item")
_Where = tuple[CodeType, int]  # function and number of a line


class SingleElements(Replacing):
    """Observer of the elements that the program's own lines read and write one by one.

    compilations: the number of compilations of this process so far.
    """

    runs_operators = False

    def __init__(self, tracker: Tracker, compilations: Callable[[], int]) -> None:
        super().__init__()
        self._tracker, self._compilations = tracker, compilations
        self.restart()

    def restart(self) -> None:
        self.kept = {}
        self._steps: list[tuple[Counter[_Where], Counter[_Where]]] = []
        self._start()

    def _start(self) -> None:
        self._reads, self._writes = Counter[_Where](), Counter[_Where]()

    def begins(self, period: Period) -> None:
        super().begins(period)
        self.is_looking = period is Period.WARMUP and not self._compilations() and len(self._steps) < MOST_STEPS
        if self.is_looking:
            self._start()
            self._process = os.getpid()  # a worker of a data loader inherits the replaced functions
            self._installed = Observation()
            for name in _READS:
                self._installed.add(partial(_watched, name, self._read), is_guarded=True)
            self._installed.add(partial(_watched, "__setitem__", self._written), is_guarded=True)

    def _observes(self) -> bool:
        if not (self.is_looking and self._tracker.observes()) or os.getpid() != self._process:
            return False
        return not (self._tracker.is_open(BACKWARD, OPTIMIZER) or is_tracing() or is_profiled())

    @as_guest
    def _read(self, frame: FrameType, tensor: Tensor, *_: Any) -> None:
        if self._observes() and not tensor.requires_grad:
            _count(self._reads, frame)

    @as_guest
    def _written(self, frame: FrameType, tensor: Tensor, key: Any, value: Any) -> None:
        if self._observes() and _is_one(tensor, key) and not (isinstance(value, Tensor) and value.requires_grad):
            _count(self._writes, frame)

    def look_after_step(self) -> None:
        super().look_after_step()
        self._steps.append((self._reads, self._writes))
        self._start()
        if len(self._steps) >= MOST_STEPS or self._compilations():
            self.stop_looking()

    def end(self) -> None:
        steps = self._steps if len(self._steps) >= FEWEST_STEPS else []
        rows: list[SingleElementsRow] = [
            {
                "function": function_of((code, 0)),
                "place": f"{Path(code.co_filename).name}:{number}",
                "reads": min(reads[code, number] for reads, _ in steps),
                "writes": min(writes[code, number] for _, writes in steps),
            }
            for code, number in dict.fromkeys(where for step in steps for counts in step for where in counts)
        ]
        most = [row for row in rows if max(row["reads"], row["writes"]) >= FEWEST]
        self.keep(SINGLE_ELEMENTS, sorted(most, key=lambda row: -row["reads"] - row["writes"])[:MOST_LINES])
        self._steps.clear()


def _count(counts: Counter[_Where], frame: FrameType) -> None:
    """Count the line that uses an element, if it is the program's own."""
    if is_own(frame.f_code.co_filename):
        counts[frame.f_code, frame.f_lineno] += 1


def _is_one(tensor: Tensor, key: Any) -> bool:
    """Return whether a key names one of several elements of a tensor."""
    keys = key if isinstance(key, tuple) else (key,)
    numbers = all(isinstance(each, int) or (isinstance(each, Tensor) and not each.dim()) for each in keys)
    return numbers and len(keys) == tensor.dim() and tensor.numel() > 1


def _watched(name: str, seen: Callable[..., None]) -> Undo:
    """Replace a method of tensors by one that also tells its calls; return a function that restores it."""
    method = getattr(Tensor, name)

    @passed_through
    @functools.wraps(method)
    def watched(*args: Any, **kwargs: Any) -> Any:
        seen(sys._getframe(1), *args)
        return method(*args, **kwargs)

    return replaced(torch.Tensor, name, watched)
