"""Time budget of a search: the time left, and the longest that one process may take."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

LEAST_TIMEOUT_S, TIMES_USUAL = 30.0, 2.0  # least limit of a process: in s, and in times of a usual one
MOST_OF_BUDGET = 1 / 4  # largest share of the budget that one process may take
LATEST = 7  # processes that show how long the next one takes: after a compiler is kept, each takes longer
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
        """Return the median time of the latest processes in s, which a single one that compiles hardly changes.

        The first one, which reads libraries from the disk and fills compilers' caches, counts only while it is alone.
        """
        return median(self._took_s[1:][-LATEST:] or self._took_s or [self.first_s])

    def timeout_s(self) -> float:
        """Return how long a process may take, so that time for other trials and for the proof of the gain is left.

        The first one, of the start, may take all: without it there is no search.
        """
        left_s = self.left_s()
        if self._took_s:
            left_s = min(MOST_OF_BUDGET * self.budget_s, left_s - PROOF * self.process_s())
        return max(LEAST_TIMEOUT_S, TIMES_USUAL * self.process_s(), left_s)

    def took(self, seconds: float) -> None:
        """Count a process; not one that was ended at its time limit, which shows nothing of the others."""
        self._took_s.append(seconds)
