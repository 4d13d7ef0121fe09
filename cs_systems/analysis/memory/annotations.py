"""Memory by the program's own names: ranges of `record_function`, and texts of `_set_memory_metadata`.

A range counts for all threads, by time. A text belongs to the allocations made while it was set.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Annotated, TypedDict

from cs_systems.analysis.memory.allocations import BEFORE
from cs_systems.analysis.memory.categories import Attribution
from cs_systems.analysis.memory.counterfactual import allocated
from cs_systems.analysis.memory.intervals import joined
from cs_systems.analysis.memory.tensor_names import TensorNames
from cs_systems.core.range_names import general
from cs_systems.core.tables import Column, table
from cs_systems.readers.snapshot import Snapshot

METADATA = "metadata"


class AnnotationRow(TypedDict):
    """Name of the program's own, with all its occurrences."""

    annotation: Annotated[str, Column("name", beside=48)]
    kind: str | None  # METADATA, or None for a range
    occurrences: Annotated[int | None, Column("times")]  # of a range
    allocations: Annotated[int, Column("count")]  # made under it
    requested_bytes: int  # bytes requested by these allocations
    at_peak_bytes: int  # bytes of these allocations that are alive at the snapshot's peak
    highest_bytes: Annotated[int | None, Column("maximum")]  # allocated in all, the highest during a range
    change_bytes: int | None  # sum over all calls of: bytes allocated at the end of a range minus bytes at its start


@table(
    "memory by the program's own names",
    "annotation kind occurrences allocations at_peak_bytes highest_bytes change_bytes",
    name="annotations",
    most=10,
)
def by_annotation(found: Attribution, names: TensorNames) -> list[AnnotationRow]:
    """Return one row for each name, the one with the most memory at the peak first."""
    rows = [*_of_ranges(found), *_of_metadata(found)]
    return sorted(rows, key=lambda row: (-row["at_peak_bytes"], -(row["highest_bytes"] or 0)))


def _of_ranges(found: Attribution) -> Iterator[AnnotationRow]:
    replay = found.replay
    allocations, peak = replay.allocations, replay.peak_event
    starts = [a.start for a in allocations]
    # Sums over the allocations before each: ranges are many and may span all events.
    requested = list(accumulate((a.requested_bytes for a in allocations), initial=0))
    at_peak = list(accumulate((a.bytes if a.is_alive(peak) else 0 for a in allocations), initial=0))
    after = allocated(allocations, len(found.places))
    for name, spans in _spans(replay.snapshot).items():
        apart = joined(spans)
        made = [(bisect_left(starts, first), bisect_left(starts, end)) for first, end in apart]
        yield {
            "annotation": name,
            "kind": None,
            "occurrences": len(spans),
            "allocations": sum(end - first for first, end in made),
            "requested_bytes": sum(requested[end] - requested[first] for first, end in made),
            "at_peak_bytes": sum(at_peak[end] - at_peak[first] for first, end in made),
            "highest_bytes": max(max(after[first : end + 1]) for first, end in apart),
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
            "at_peak_bytes": sum(a.bytes for a in of if a.is_alive(replay.peak_event)),
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
