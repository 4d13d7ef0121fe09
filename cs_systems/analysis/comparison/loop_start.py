"""Slow start of a loop: its first steps take much longer than all later ones, such as an epoch that fills a cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

FEWEST, FEWEST_LATER = 3, 6  # least number of steps at the start, and after it
TIMES = 2.0  # least ratio of the median steps
ODD_FIRST, ODD_LATER = 0.1, 0.2  # largest share of steps in one part that are like the steps of the other part


class Start(NamedTuple):
    """Number of slow first steps, with the median step among them and after them."""

    steps: int
    each_s: float
    later_s: float


def slow_start(durations_s: Sequence[float], most: int) -> Start | None:
    """Return the slow start of a loop, of at most `most` steps; None if it has none.

    Steps are slow above the geometric mean of both medians; the start ends where the fewest steps are on the wrong
    side.
    """
    found: list[tuple[int, Start]] = []
    for steps in range(FEWEST, min(most, len(durations_s) - FEWEST_LATER) + 1):
        first, later = durations_s[:steps], durations_s[steps:]
        each_s, later_s = median(first), median(later)
        if each_s < TIMES * later_s:
            continue
        limit_s = math.sqrt(each_s * later_s)
        fast, slow = sum(time_s < limit_s for time_s in first), sum(time_s >= limit_s for time_s in later)
        if fast <= ODD_FIRST * len(first) and slow <= ODD_LATER * len(later):
            found.append((fast + slow, Start(steps, each_s, later_s)))
    return min(found, key=lambda each: each[0])[1] if found else None
