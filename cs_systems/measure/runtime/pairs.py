"""Interleaved measurement of A and B: pairs of new processes in random order, until a sequential test is decided.

First, one uncounted process of each side fills caches of files and compilers. The test is evaluated after each pair. A
pair with a failed process does not count, but is kept as a row.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from cs_systems.core.sequential import SequentialTest
from cs_systems.core.units import counted
from cs_systems.measure.runtime.program import Trial

SIDES = ("A", "B")
MOST_FAILURES = 3
"""Failed pairs in a row after which the comparison ends."""


class Ran(NamedTuple):
    """One process of the comparison: its side, its pair from 1 (0 before the first) and its place in the pair: 1, 2."""

    side: str
    pair: int
    place: int
    trial: Trial


class Interleaved:
    """Iterator over the processes of a comparison as they end; afterwards `ended` says why there are no more.

    Args:
        measure: runs one process of the side, "A" or "B".
        test: the test to fill; it may hold pairs already.
        most_pairs: pairs after which the comparison ends without a verdict.
        budget_s: time limit in s; no pair begins that would probably exceed it; None for no limit.
        first: run one process of each side before the pairs.
        spent_s: the part of the limit that is spent already; without `first`, on one process of each side.

    Attributes:
        longest_s: the longest time that a pair took so far, in s.
    """

    def __init__(
        self,
        measure: Callable[[str], Trial],
        test: SequentialTest,
        *,
        most_pairs: int,
        budget_s: float | None = None,
        first: bool = True,
        spent_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._measure, self._test, self._clock = measure, test, clock
        self._most_pairs, self._budget_s, self._first = most_pairs, budget_s, first
        self._spent_s, self._until_s, self.longest_s = spent_s, math.inf, 0.0 if first else spent_s
        self.failed_pairs = 0
        self.ended = ""

    def room(self) -> float:
        """Return the number of pairs for which the rest of the time limit is probably enough."""
        return (self._until_s - self._clock()) // self.longest_s if self.longest_s else math.inf

    def __iter__(self) -> Iterator[Ran]:
        began_s, failures = self._clock(), 0
        if self._budget_s is not None:
            self._until_s = began_s + self._budget_s - self._spent_s
        if self._first:
            for place, side in enumerate(SIDES, 1):
                yield (ran := Ran(side, 0, place, self._measure(side)))
                if ran.trial.value is None:
                    self.ended = f"{side} failed: {ran.trial.reason}"
                    return
            self.longest_s = self._clock() - began_s
        for pair in range(1, self._most_pairs + 1):
            if self._budget_s is not None and self._clock() + self.longest_s > self._until_s:
                self.ended = f"the budget of {self._budget_s:,.0f} s is spent"
                return
            pair_began_s, values, reason = self._clock(), dict[str, float](), ""
            for place, side in enumerate(SIDES if self._test.draw() else SIDES[::-1], 1):
                ran = Ran(side, pair, place, self._measure(side))
                if ran.trial.value is not None:
                    values[side] = ran.trial.value
                else:
                    reason = f"{side}: {ran.trial.reason}"
                if len(values) == len(SIDES):  # before the caller gets the process, because it may stop here
                    self._test.add(*(values[each] for each in SIDES))
                yield ran
            self.longest_s = max(self.longest_s, self._clock() - pair_began_s)
            if len(values) == len(SIDES):
                failures = 0
                if self._test.verdict != "undecided":
                    self.ended = "the verdict is safe"
                    return
                continue
            failures, self.failed_pairs = failures + 1, self.failed_pairs + 1
            if failures == MOST_FAILURES:
                self.ended = f"{counted(failures, 'pair')} in a row failed; {reason}"
                return
        self.ended = f"the limit of {counted(self._most_pairs, 'pair')} is reached"
