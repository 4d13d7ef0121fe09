"""What samples say, and what they cannot: quantiles, intervals, doubts, verdicts. Floor 0: no torch, no numpy.

Durations are positive and their noise multiplies rather than adds, so means, intervals and ratios are taken on
logarithms. Samples of one run are correlated, and rounds of one process share its memory layout, clocks and chosen
kernels: every interval comes from the highest level that was repeated (processes, else rounds, else samples) and says
which variance it cannot see.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

Rounds = Sequence[Sequence[float]]
"""The samples of one process, by round, in the order in which they were taken."""

CONFIDENCE = 0.95
"""Of every interval, and so at most one false 'faster' or 'slower' in twenty comparisons of equal things."""


@dataclass(frozen=True)
class Summary:
    """Samples in a few numbers, in the samples' unit. `std` is None for one sample, `low` and `high` for fewer than
    6."""

    n: int
    median: float
    mean: float
    std: float | None
    p10: float
    p90: float
    min: float
    max: float
    low: float | None
    high: float | None


def summary(samples: Sequence[float]) -> Summary:
    """Summarise at least one sample; `low` to `high` is `median_interval`'s. Raises ValueError where there is none."""
    ordered = sorted(samples)
    low, high = median_interval(ordered) or (None, None)
    return Summary(
        n=len(ordered),
        median=quantile(ordered, 0.5),
        mean=statistics.fmean(ordered),
        std=statistics.stdev(ordered) if len(ordered) > 1 else None,
        p10=quantile(ordered, 0.1),
        p90=quantile(ordered, 0.9),
        min=ordered[0],
        max=ordered[-1],
        low=low,
        high=high,
    )


def quantile(samples: Sequence[float], q: float) -> float:
    """The q-quantile, 0 ≤ q ≤ 1, linear between order statistics (Hyndman & Fan 1996, type 7; numpy's default)."""
    if not samples:
        raise ValueError("no samples: a quantile needs at least one")
    ordered = sorted(samples)
    position = q * (len(ordered) - 1)
    below = min(math.floor(position), len(ordered) - 2) if len(ordered) > 1 else 0
    above = min(below + 1, len(ordered) - 1)
    share = position - below
    if ordered[below] == ordered[above]:
        return ordered[below]
    return ordered[below] * (1 - share) + ordered[above] * share


def median_interval(samples: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float] | None:
    """The narrowest pair of order statistics, equally far from both ends, that holds the median with `confidence`.

    Free of any distribution, but for independent samples: the number below the median is binomial(n, ½). None where
    even minimum and maximum do not reach `confidence` (fewer than 6 samples at 95%).
    """
    n, ordered = len(samples), sorted(samples)
    rank, below, ways = 0, 0, 1  # below: in how many of 2ⁿ ways at most `rank` samples lie under the median
    while rank < n // 2 and (below + ways) / 2**n <= (1 - confidence) / 2:
        below, ways, rank = below + ways, ways * (n - rank) // (rank + 1), rank + 1
    return (ordered[rank - 1], ordered[n - rank]) if rank else None
