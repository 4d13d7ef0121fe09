"""Observer of Python's garbage collector."""

from __future__ import annotations

import gc
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from cs_systems.analysis.comparison.loop_findings import CollectionRow
from cs_systems.instrument.compiler import untraced
from cs_systems.measure.recorder.lines import most_of
from cs_systems.measure.recorder.stacks import Line, callee_of, function_of, own_lines, place_of

COLLECTION_S = 0.001  # a shorter collection is counted without its place


@dataclass
class _OfStep:
    """Collections of one step; lines: the time of the long ones at each line."""

    count: int = 0
    total_s: float = 0.0
    longest_s: float = 0.0
    lines: dict[Line, float] = field(default_factory=dict)


class Collections:
    """Garbage collections in the steps of a loop, and the lines at which the long ones happen."""

    def __init__(self) -> None:
        self._total_s = 0.0
        self._began_s: float | None = None  # None: no collection is in progress
        self._step: int | None = None
        self._by_step: defaultdict[int, _OfStep] = defaultdict(_OfStep)

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
        of_step = self._by_step[self._step]
        of_step.count += 1
        of_step.total_s += lasted_s
        of_step.longest_s = max(of_step.longest_s, lasted_s)
        if lasted_s > COLLECTION_S:
            chain, leaf = own_lines(sys._getframe().f_back)  # None at the end of a thread
            line = leaf or (chain[-1] if chain else None)
            if line is not None:
                of_step.lines[line] = of_step.lines.get(line, 0.0) + lasted_s

    def row(self, steps: int, total_s: float) -> CollectionRow | None:
        """Return the collections of the first `steps` steps, which took `total_s`; None without one."""
        found = [of_step for step, of_step in self._by_step.items() if step < steps]
        if not found or not total_s:
            return None
        lines = Counter[Line]()
        for of_step in found:
            lines.update(of_step.lines)
        most = most_of(lines) if lines else None
        callee = callee_of(most) if most else None
        return {
            "steps": steps,
            "collections": sum(each.count for each in found),
            "time_s": sum(each.total_s for each in found),
            "in_steps": _holding_most([each.total_s for each in found]),
            "longest_s": max(each.longest_s for each in found),
            "total_s": total_s,
            "function": function_of(most) if most else None,
            "place": place_of(most) if most else None,
            "is_called": bool(callee and callee.rpartition(".")[2] == "collect"),
        }


def _holding_most(times_s: Sequence[float]) -> int:
    """Return the smallest number of steps that hold nine tenths of the time."""
    sums = accumulate(sorted(times_s, reverse=True))
    return 1 + sum(1 for sum_s in sums if sum_s < 0.9 * sum(times_s))
