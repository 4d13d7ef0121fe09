"""Own lines that write single elements of a tensor, or read them as Python's numbers, in a few warm-up steps.

Such as `mask[i, j] = 1` in two loops, or `if word != 0` for each word of a batch: each is an operator of some
microseconds. Elements that autograd records are left out, because a recurrence may need them one by one.

The same line can do other work, such as a product of matrices. So the time of its elements is that of as many uses of
elements of a small tensor on this computer.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor

from cs_systems.analysis.comparison.loop_findings import SINGLE_ELEMENTS, SingleElementsRow
from cs_systems.instrument.compiler import Observation, Undo, is_tracing, passed_through, replaced, untraced
from cs_systems.measure.recorder.guard import as_guest
from cs_systems.measure.recorder.observers import Period, Replacing, is_profiled
from cs_systems.measure.recorder.phases import BACKWARD, OPTIMIZER
from cs_systems.measure.recorder.stacks import function_of, is_own
from cs_systems.measure.recorder.tracker import Tracker

MOST_STEPS, FEWEST_STEPS = 3, 2
FEWEST = 200  # of a line in each step
MOST_LINES = 10
TRIALS = 100  # of which the median is the time of one use
_COMPARED, _WRITTEN = "__bool__", "__setitem__"  # one is the result of a comparison, the other not a read
_USES = (_COMPARED, _WRITTEN, "__int__", "__float__", "__index__", "item")
_Where = tuple[CodeType, int]  # function and number of a line
_Counts = Counter[_Where]


class SingleElements(Replacing):
    """Observer of the elements that the program's own lines read and write one by one.

    compilations: the number of compilations of this process so far.
    """

    def __init__(self, tracker: Tracker, compilations: Callable[[], int]) -> None:
        super().__init__()
        self._tracker, self._compilations = tracker, compilations
        self.restart()

    def restart(self) -> None:
        self.kept = {}
        self._steps: list[dict[str, _Counts]] = []
        self._start()

    def _start(self) -> None:
        self._uses = {name: _Counts() for name in _USES}

    def begins(self, period: Period) -> None:
        super().begins(period)
        self.is_looking = period is Period.WARMUP and not self._compilations() and len(self._steps) < MOST_STEPS
        if self.is_looking:
            self._start()
            self._process = os.getpid()  # a worker of a data loader inherits the replaced functions
            self._installed = Observation()
            for name in _USES:
                if name == _WRITTEN:
                    watch = partial(_watched, name, self._written)
                else:
                    noted: Any = _Noted(getattr(Tensor, name), partial(self._read, name))
                    watch = partial(replaced, Tensor, name, noted)
                self._installed.add(watch, is_guarded=True)

    def _observes(self) -> bool:
        if not (self.is_looking and self._tracker.observes()) or os.getpid() != self._process:
            return False
        return not (self._tracker.is_open(BACKWARD, OPTIMIZER) or is_tracing() or is_profiled())

    @as_guest
    def _read(self, name: str, frame: FrameType, tensor: Tensor) -> None:
        if self._observes() and not tensor.requires_grad:
            _count(self._uses[name], frame)

    @as_guest
    def _written(self, frame: FrameType, tensor: Tensor, key: Any, value: Any) -> None:
        if self._observes() and _is_one(tensor, key) and not (isinstance(value, Tensor) and value.requires_grad):
            _count(self._uses[_WRITTEN], frame)

    def look_after_step(self) -> None:
        super().look_after_step()
        self._steps.append(self._uses)
        self._start()
        if len(self._steps) >= MOST_STEPS or self._compilations():
            self.stop_looking()

    def end(self) -> None:
        steps = self._steps if len(self._steps) >= FEWEST_STEPS else []
        wheres = dict.fromkeys(where for uses in steps for counts in uses.values() for where in counts)
        least = {where: {name: min(uses[name][where] for uses in steps) for name in _USES} for where in wheres}
        often = {where: uses for where, uses in least.items() if max(_reads(uses), uses[_WRITTEN]) >= FEWEST}
        each_s = _times_s() if often else {}
        rows: list[SingleElementsRow] = [
            {
                "function": function_of((code, 0)),
                "place": f"{Path(code.co_filename).name}:{number}",
                "reads": _reads(uses),
                "writes": uses[_WRITTEN],
                "time_s": sum(count * each_s[name] for name, count in uses.items()),
            }
            for (code, number), uses in often.items()
        ]
        self.keep(SINGLE_ELEMENTS, sorted(rows, key=lambda row: -row["reads"] - row["writes"])[:MOST_LINES])
        self._steps.clear()


def _reads(uses: Mapping[str, int]) -> int:
    return sum(uses.values()) - uses[_WRITTEN]


@torch.no_grad()
def _times_s() -> dict[str, float]:
    """Return the time of one use of an element of a small tensor on this computer, by the method that uses it."""
    vector, matrix = torch.zeros(4, device="cpu"), torch.zeros(4, 4, device="cpu")
    read_s = _lasts_s(lambda: float(vector[1]))
    written_s = _lasts_s(lambda: matrix.__setitem__((1, 2), 1.0))
    return dict.fromkeys(_USES, read_s) | {
        _COMPARED: _lasts_s(lambda: bool(vector[1] != 0)),
        _WRITTEN: written_s,
    }


def _lasts_s(use: Callable[[], object]) -> float:
    times_s = []
    for _ in range(TRIALS):
        begin_s = time.perf_counter()
        use()
        times_s.append(time.perf_counter() - begin_s)
    return median(times_s)


def _count(counts: _Counts, frame: FrameType) -> None:
    """Count the line that uses an element, if it is the program's own."""
    if is_own(frame.f_code.co_filename):
        counts[frame.f_code, frame.f_lineno] += 1


def _is_one(tensor: Tensor, key: Any) -> bool:
    """Return whether a key names one of several elements of a tensor."""
    keys = key if isinstance(key, tuple) else (key,)
    numbers = all(isinstance(each, int) or (isinstance(each, Tensor) and not each.dim()) for each in keys)
    return numbers and len(keys) == tensor.dim() and tensor.numel() > 1


class _Noted:
    """Method of tensors whose uses are noted where it is looked up.

    The caller then calls the method itself, so that its warnings name the caller's line, as without observation.
    """

    def __init__(self, method: Any, seen: Callable[[FrameType, Tensor], object]) -> None:
        self._method, self._seen = method, seen

    @untraced
    def __get__(self, tensor: Tensor | None, owner: type | None = None) -> Any:
        if tensor is not None:
            self._seen(sys._getframe(1), tensor)
        return self._method.__get__(tensor, owner)


def _watched(name: str, seen: Callable[..., None]) -> Undo:
    """Replace a method of tensors by one that also tells its calls; return a function that restores it."""
    method = getattr(Tensor, name)

    @passed_through
    @functools.wraps(method)
    def watched(*args: Any, **kwargs: Any) -> Any:
        seen(sys._getframe(1), *args)
        return method(*args, **kwargs)

    return replaced(torch.Tensor, name, watched)
