"""Imbalance of a job's experts, by the tokens that all-to-alls bring to each rank, or by the computation in between.

A layer of experts computes between two all-to-alls: one brings the tokens, the next sends the results back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from statistics import mean
from typing import TYPE_CHECKING

import numpy as np

from cs_systems.analysis.attribution.collectives import Collective
from cs_systems.analysis.attribution.overlap import intersection, union
from cs_systems.analysis.comparison.late_ranks import is_uneven, received

if TYPE_CHECKING:
    from cs_systems.analysis.comparison.ranks import Merged, Rank

SAME_ELSEWHERE = 1.1  # times the mean of all ranks; above it the rank's GPU is slower in all work
COUNTS = 0.01  # share of the largest all-to-all; a smaller one sends only token counts
ALL_TO_ALL = "all_to_all"


def imbalance(job: Merged, rank: int) -> str | None:
    """Return a phrase on how unevenly a rank's experts are used; None if they are not, or if it is unknown.

    If the sizes of the all-to-alls are equal or unknown, the computation between two of them is compared: it is longer
    on this rank, while the rest of its computation takes about as long as on the others.
    """
    if found := tokens(job):
        times = found.get(rank, 0) * len(found) / sum(found.values())
        return received(times) if is_uneven(times) else None
    longer = _of_computation(job, rank)
    if not is_uneven(longer):
        return None
    return f"computes {longer:.2g} times the mean of all ranks between two all-to-alls, and as long as they elsewhere"


def tokens(job: Merged) -> Mapping[int, int]:
    """Return the elements that each rank receives in uneven all-to-alls, which bring tokens to experts.

    The all-to-all that sends them back is even if the ranks have batches of equal size.
    """
    found = Counter[int]()
    for match in job.matches:
        sizes = {rank: call.received for rank, call in match.calls.items()}
        if match.any.name == ALL_TO_ALL and None not in sizes.values() and len({*sizes.values()}) > 1:
            found.update({rank: size or 0 for rank, size in sizes.items()})
    return found


def _of_computation(job: Merged, rank: int) -> float | None:
    """Return a rank's time in the experts, as a multiple of the mean of all ranks.

    None if a rank lacks a second all-to-all, or if the rank's other work takes longer too.
    """
    largest = max((match.any.size_bytes or 0 for match in job.matches if match.any.name == ALL_TO_ALL), default=0)
    if not all(sum(_is_of_tokens(call, largest) for call in one.collectives) > 1 for one in job.ranks):
        return None
    halves = {one.rank: _between(one, largest) for one in job.ranks}
    ratios = [
        own / whole if (whole := mean(of_all)) else 0.0
        for own, of_all in zip(halves[rank], zip(*halves.values(), strict=True), strict=True)
    ]
    return max(ratios) if min(ratios) <= SAME_ELSEWHERE else None


def _is_of_tokens(call: Collective, largest: int) -> bool:
    return call.name == ALL_TO_ALL and (call.size_bytes or largest) >= COUNTS * largest


def _between(one: Rank, largest: int) -> tuple[float, float]:
    """Return a rank's computation after every other all-to-all, and the rest: the experts are in one of the two."""
    calls = sorted(
        (call for call in one.collectives if _is_of_tokens(call, largest)), key=lambda call: (call.start_s, call.end_s)
    )
    begins = np.array([call.end_s for call in calls[:-1]])
    ends = np.maximum([call.start_s for call in calls[1:]], begins)
    return (
        intersection(one.computing, union(begins[0::2], ends[0::2])).length_s,
        intersection(one.computing, union(begins[1::2], ends[1::2])).length_s,
    )
