"""Observer of Python's garbage collector."""

from __future__ import annotations

import gc
import sys
import time
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

from cs_systems.analysis.comparison.loop_findings import CollectionRow
from cs_systems.instrument.compiler import untraced
from cs_systems.measure.recorder.lines import most_of
from cs_systems.measure.recorder.stacks import Line, callee_of, function_of, own_lines, place_of

COLLECTION_S = 0.001  # a shorter collection is counted without its place


class Collections:
    """Garbage collections in the steps of a loop, and the lines at which the long ones happen."""

    def __init__(self) -> None:
        self._total_s = 0.0
        self._began_s: float | None = None  # None: no collection is in progress
        self._places: Counter[Line] = Counter()
        self._step: int | None = None
        self._in_step: list[tuple[int, float]] = []  # the number of the step, and the duration in s

    def step_begins(self, number: int | None) -> None:
        """Begin a step; None means that what follows is outside of the loop's steps."""
        self._step = number

    def begin(self) -> None:
        gc.callbacks.append(self._collects)

    def end(self) -> None:
        if self._collects in gc.callbacks:
            gc.callbacks.remove(self._collects)

    def total(self) -> float:
        """Return the total time of collections so far, including the current one."""
        began_s = self._began_s
        return self._total_s + (0.0 if began_s is None else time.perf_counter() - began_s)

    @untraced
    def _collects(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._began_s = time.perf_counter()
            return
        lasted_s = time.perf_counter() - (self._began_s or 0.0)
        was_seen, self._began_s = self._began_s is not None, None
        if self._step is None or not was_seen:
            return
        self._total_s += lasted_s  # first, because a sample can be taken during any call
        self._in_step.append((self._step, lasted_s))
        if lasted_s > COLLECTION_S:
            chain, leaf = own_lines(sys._getframe(1))
            line = leaf or (chain[-1] if chain else None)
            if line is not None:
                self._places[line] += lasted_s  # type: ignore[assignment]

    def row(self, steps: int, total_s: float) -> CollectionRow | None:
        """Return the collections of the first `steps` steps, which took `total_s`; None without one."""
        lasted = [(step, lasted_s) for step, lasted_s in self._in_step if step < steps]
        if not lasted or not total_s:
            return None
        most = most_of(self._places) if self._places else None
        callee = callee_of(most) if most else None
        return {
            "steps": steps,
            "collections": len(lasted),
            "time_s": sum(lasted_s for _, lasted_s in lasted),
            "in_steps": _holding_most(lasted),
            "longest_s": max(lasted_s for _, lasted_s in lasted),
            "total_s": total_s,
            "function": function_of(most) if most else None,
            "place": place_of(most) if most else None,
            "is_called": bool(callee and callee.rpartition(".")[2] == "collect"),
        }


def _holding_most(lasted: Sequence[tuple[int, float]]) -> int:
    """Return the smallest number of steps that hold nine tenths of the time."""
    by_step = Counter[int]()
    for step, lasted_s in lasted:
        by_step[step] += lasted_s  # type: ignore[assignment]
    sums = accumulate(sorted(by_step.values(), reverse=True))
    return 1 + sum(1 for sum_s in sums if sum_s < 0.9 * by_step.total())
