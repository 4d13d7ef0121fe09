"""Memory by the program's own names: ranges of `record_function`, and texts of `_set_memory_metadata`.

A range counts for all threads, by time. A text belongs to the allocations made while it was set.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TypedDict

from cs_systems.snapshots.allocations import BEFORE
from cs_systems.snapshots.categories import Attribution
from cs_systems.snapshots.snapshot import Snapshot
from cs_systems.snapshots.tensor_names import TensorNames
from cs_systems.traces.range_names import general

METADATA = "metadata"


class AnnotationRow(TypedDict):
    """Name of the program's own, with all its occurrences."""

    annotation: str
    kind: str | None  # METADATA, or None for a range
    occurrences: int | None  # of a range
    allocations: int  # made under it
    requested_bytes: int  # by them
    at_peak_bytes: int  # of them, alive at the peak of the snapshot
    highest_bytes: int | None  # allocated in all, the highest during a range
    change_bytes: int | None  # allocated at the end of a range, less that at its begin; sum of all


def by_annotation(found: Attribution, names: TensorNames) -> list[AnnotationRow]:
    """Return one row for each name, that with the most memory at the peak first."""
    rows = [*_of_ranges(found), *_of_metadata(found)]
    return sorted(rows, key=lambda row: (-row["at_peak_bytes"], -(row["highest_bytes"] or 0)))


def _of_ranges(found: Attribution) -> Iterator[AnnotationRow]:
    replay = found.replay
    starts = [a.start for a in replay.allocations]
    after = _allocated_after(found)
    for name, spans in _spans(replay.snapshot).items():
        made = set[int]()  # indices of allocations: ranges of one name may nest
        for first, end in spans:
            made.update(range(bisect_left(starts, first), bisect_left(starts, end)))
        of = [replay.allocations[n] for n in made]
        yield {
            "annotation": name,
            "kind": None,
            "occurrences": len(spans),
            "allocations": len(of),
            "requested_bytes": sum(a.requested_bytes for a in of),
            "at_peak_bytes": sum(a.bytes for a in of if a.start <= replay.peak_event < a.end),
            "highest_bytes": max(max(after[first : end + 1]) for first, end in spans),
            "change_bytes": sum(after[end] - after[first] for first, end in spans),
        }


def _of_metadata(found: Attribution) -> Iterator[AnnotationRow]:
    replay = found.replay
    snapshot = replay.snapshot
    groups = defaultdict(list)
    for a in replay.allocations:
        if a.start > BEFORE and (number := snapshot.events.metadata[a.start]):
            groups[number].append(a)
    for number, of in groups.items():
        yield {
            "annotation": snapshot.metadata[number],
            "kind": METADATA,
            "occurrences": None,
            "allocations": len(of),
            "requested_bytes": sum(a.requested_bytes for a in of),
            "at_peak_bytes": sum(a.bytes for a in of if a.start <= replay.peak_event < a.end),
            "highest_bytes": None,
            "change_bytes": None,
        }


def _spans(snapshot: Snapshot) -> dict[str, list[tuple[int, int]]]:
    """Return for each name the (first event, event behind the last) of its ranges.

    Events in the µs in which a range begins or ends are inside. A range without an end lasts to the last event.
    """
    times: Sequence[int] = snapshot.events.time_us
    opened: dict[str, list[int]] = defaultdict(list)
    spans: dict[str, list[tuple[int, int]]] = {}
    if not times:
        return spans
    for time_us, begins, name in snapshot.annotations:
        name = general(name)
        if begins:
            opened[name].append(bisect_left(times, time_us))
            spans.setdefault(name, [])
        elif opened.get(name):
            spans[name].append((opened[name].pop(), bisect_right(times, time_us)))
    for name, first in opened.items():
        spans[name] += [(at, len(times)) for at in first]
    return {name: of for name, of in spans.items() if of}


def _allocated_after(found: Attribution) -> list[int]:
    """Return the bytes allocated before the first event, and after each."""
    end = len(found.replay.snapshot.events)
    change = [0] * (end + 1)
    for a in found.replay.allocations:
        change[a.start + 1] += a.bytes
        if a.end < end:
            change[a.end + 1] -= a.bytes
    now, after = 0, []
    for one in change:
        now += one
        after.append(now)
    return after
