"""Time budget of a search: the time left, and the longest that one process may take."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from cs_systems.record import RunRecord

LEAST_TIMEOUT_S, TIMES_USUAL = 30.0, 2.0  # least limit of a process: in s, and in times of a usual one
MOST_OF_BUDGET = 1 / 4  # largest share of the budget that one process may take
LATEST = 7  # processes that show how long the next one takes: after a compiler is kept, each takes longer
# Processes of the last comparison, of start and best: no trial may take their time; few of them give a wide interval.
LEAST_PROOF, MOST_PROOF = 4, 24
OF_PROOF = 0.3  # share of the budget that they may take, once there is something to prove


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
        self._has_known = False

    def sampled(self) -> RunRecord | None:
        """Return a record of the start in which the stack was sampled; None if the bench makes none."""
        return None

    def left_s(self) -> float:
        return self._until_s - self.clock()

    def spent_s(self) -> float:
        return self.budget_s - self.left_s()

    def process_s(self) -> float:
        """Return the median time of the latest processes in s, which a single one that compiles hardly changes.

        The first one, which reads libraries from the disk and fills compilers' caches, counts only while it is alone.
        A search that goes on reads records until it comes to the first new process, which the time must not prevent.
        """
        return median(self._took_s[1:][-LATEST:] or self._took_s or [0.0 if self._has_known else self.first_s])

    def proof_s(self, is_kept: bool) -> float:
        """Return the time of the last comparison in s. is_kept: whether an option is kept, which it will prove."""
        least_s, most_s = (processes * self.process_s() for processes in (LEAST_PROOF, MOST_PROOF))
        return max(least_s, min(most_s, OF_PROOF * self.budget_s)) if is_kept else least_s

    def timeout_s(self) -> float:
        """Return how long a process may take, so that time for other trials and for the proof of the gain is left.

        The first one, of the start, may take all: without it there is no search.
        """
        left_s = share_s = self.left_s()
        least_s = LEAST_TIMEOUT_S
        if self._took_s:
            share_s = min(MOST_OF_BUDGET * self.budget_s, left_s - self.proof_s(is_kept=False))
            least_s = min(least_s, left_s)
        return max(least_s, TIMES_USUAL * self.process_s(), share_s)

    def extend(self, seconds: float) -> None:
        """Add to the time, for what follows the search."""
        self.budget_s, self._until_s = self.budget_s + seconds, self._until_s + seconds

    def knows(self) -> None:
        """Count a process that an earlier search measured, and that takes no time now."""
        self._has_known = True

    def took(self, seconds: float) -> None:
        """Count a process; not one that was ended at its time limit, which shows nothing of the others."""
        self._took_s.append(seconds)
