"""Time budget of a search: the time left, and the longest that one process may take."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

LEAST_TIMEOUT_S = 60.0
MOST_OF_BUDGET = 1 / 3  # largest share of the budget that one trial may take
PROOF = 4  # processes of the last comparison, of start and best; no trial may take their time


class Budgeted:
    """Clock of a bench, which begins when the bench is made.

    Attributes:
        budget_s: the time for the whole search.
        clock: returns seconds.
        first_s: assumed time in s of a process, until one is measured.
    """

    budget_s: float
    clock: Callable[[], float]
    first_s = 10.0

    def __post_init__(self) -> None:
        self._until_s, self._took_s = self.clock() + self.budget_s, list[float]()

    def left_s(self) -> float:
        return self._until_s - self.clock()

    def spent_s(self) -> float:
        return self.budget_s - self.left_s()

    def process_s(self) -> float:
        """Return the median time of a process in s, which a single process that hangs or compiles hardly changes.

        The first one, which reads libraries from the disk and fills compilers' caches, counts only while it is alone.
        """
        return median(self._took_s[1:] or self._took_s or [self.first_s])

    def timeout_s(self) -> float:
        """Return how long a process may take, so that time for other trials and for the proof of the gain is left.

        The first one, of the start, may take all: without it there is no search.
        """
        left_s = self.left_s()
        if self._took_s:
            left_s = min(MOST_OF_BUDGET * self.budget_s, left_s - PROOF * self.process_s())
        return max(LEAST_TIMEOUT_S, left_s)

    def took(self, seconds: float) -> None:
        self._took_s.append(seconds)
