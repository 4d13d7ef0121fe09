"""Intervals of whole numbers, such as addresses or events: from the first, up to the one behind the last."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Interval = tuple[int, int]


def joined(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the intervals in order, adjacent and overlapping ones as one."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def without(intervals: Iterable[Interval], holes: Sequence[Interval]) -> list[Interval]:
    """Return what is left of the intervals outside of the holes; both are disjoint and in order."""
    left: list[Interval] = []
    first = 0
    for start, end in intervals:
        while first < len(holes) and holes[first][1] <= start:
            first += 1
        at, n = start, first
        while n < len(holes) and holes[n][0] < end:
            if holes[n][0] > at:
                left.append((at, holes[n][0]))
            at = max(at, holes[n][1])
            n += 1
        if at < end:
            left.append((at, end))
    return left


def length(intervals: Iterable[Interval]) -> int:
    return sum(end - start for start, end in intervals)
