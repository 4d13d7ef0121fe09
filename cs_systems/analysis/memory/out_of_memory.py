"""Requests that failed: what was requested, what was free then, and in how large pieces.

The pieces are the parts of the segments that no allocation used at that moment: the segments at the end, with those
allocated later removed and those freed later added, less the allocations alive then. A block whose free is requested
but not completed is not free.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise
from typing import Annotated, TypedDict

from cs_systems.analysis.memory.allocations import (
    FREE_COMPLETED,
    FREE_REQUESTED,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    OutOfMemory,
)
from cs_systems.analysis.memory.categories import ACTIVATIONS, TEMPORARIES, Attributed, Attribution
from cs_systems.analysis.memory.intervals import Interval, joined, length, without
from cs_systems.analysis.memory.tensor_names import TensorNames
from cs_systems.config import Phase
from cs_systems.core.tables import Column, table
from cs_systems.core.units import human
from cs_systems.readers.snapshot import Snapshot

MOST_EXAMINED = 10  # requests with free pieces to find: the last, since each takes a pass over all events
EXPAND = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
OTHER_POOL = "a free piece is large enough, but belongs to another stream or pool"
LIMIT = "the device had enough free memory: a limit of the process (set_per_process_memory_fraction) was reached"
NOT_KNOWN = f"unknown: the snapshot lacks what was free, or the request is not among the last {MOST_EXAMINED}"
FRAGMENTED = "fragmentation: enough memory was free, but in pieces"
TOO_LITTLE = "too little memory"


class OutOfMemoryRow(TypedDict):
    """Request that failed; None is unknown."""

    event: int
    time_s: float | None  # from the first event of the snapshot
    phase: str | None
    requested_bytes: int
    device_free_bytes: Annotated[int | None, Column("free")]
    reserved_bytes: int | None  # by the allocator
    allocated_bytes: int
    cached_bytes: int | None  # reserved and not in use
    largest_free_bytes: Annotated[int | None, Column("largest")]  # largest piece of the cached memory
    free_pieces: Annotated[int | None, Column("pieces")]
    cause: str
    where: str | None  # line of code


@table(
    "requests that failed",
    "event requested_bytes device_free_bytes reserved_bytes allocated_bytes cached_bytes largest_free_bytes "
    "free_pieces",
    most=10,
)
def out_of_memory(found: Attribution, names: TensorNames) -> list[OutOfMemoryRow]:
    """Return one row for each request that failed, in order."""
    examined = {*found.replay.out_of_memory[-MOST_EXAMINED:]}
    return [_row(found, oom, oom in examined)[0] for oom in found.replay.out_of_memory]


def _row(found: Attribution, oom: OutOfMemory, is_examined: bool) -> tuple[OutOfMemoryRow, Sequence[Interval] | None]:
    """Return the row of a request, and the free pieces then; None if they are unknown or not examined."""
    snapshot = found.replay.snapshot
    times_us = snapshot.events.time_us
    segments = _segments_at(snapshot, oom.event) if is_examined and snapshot.segments else None
    pieces = None if segments is None else _free_pieces(found, segments, oom.event)
    row: OutOfMemoryRow = {
        "event": oom.event,
        "time_s": (times_us[oom.event] - times_us[0]) / 1e6 if times_us else None,
        "phase": found.places[oom.event].phase,
        "requested_bytes": oom.requested_bytes,
        "device_free_bytes": oom.device_free_bytes,
        "reserved_bytes": None if segments is None else length(segments),
        "allocated_bytes": oom.allocated_bytes,
        "cached_bytes": None if pieces is None else length(pieces),
        "largest_free_bytes": None if pieces is None else max((end - start for start, end in pieces), default=0),
        "free_pieces": None if pieces is None else len(pieces),
        "cause": _cause(oom, pieces, snapshot.settings.expandable_segments),
        "where": found.sites[oom.stack],
    }
    return row, pieces


def _cause(oom: OutOfMemory, pieces: Sequence[Interval] | None, expandable: bool) -> str:
    kind, lacks = why(oom, pieces)
    if kind == FRAGMENTED:
        return f"{kind}{'' if expandable else f'; record with {EXPAND}'}"
    return f"{kind}: {human(lacks, 'bytes')} more than was free" if kind == TOO_LITTLE else kind


def why(oom: OutOfMemory, pieces: Sequence[Interval] | None) -> tuple[str, int]:
    """Return (kind of cause, missing bytes) of a failed request."""
    asked, free = oom.requested_bytes, oom.device_free_bytes
    cached = None if pieces is None else length(pieces)
    if pieces and max(end - start for start, end in pieces) >= asked:
        return OTHER_POOL, 0
    if free is not None and free >= asked:
        return LIMIT, 0
    if free is None or cached is None:
        return NOT_KNOWN, 0
    return (FRAGMENTED, 0) if cached + free >= asked else (TOO_LITTLE, asked - cached - free)


@dataclass(frozen=True)
class Failure:
    """Last failed request of a snapshot.

    Attributes:
        row: the request, with what was free.
        count: the number of requests that failed.
        cause: the kind of cause.
        lacks_bytes: the missing bytes, if too little was free; else 0.
        held: the bytes that were allocated then, by category and line of code.
    """

    row: OutOfMemoryRow
    count: int
    cause: str
    lacks_bytes: int
    held: Mapping[tuple[str, str], int]
    is_expandable: bool


def last_failure(found: Attribution) -> Failure | None:
    """Return the last request that failed, with what was allocated then; None if none failed."""
    if not found.replay.out_of_memory:
        return None
    oom = found.replay.out_of_memory[-1]
    row, pieces = _row(found, oom, is_examined=True)
    cause, lacks = why(oom, pieces)
    held = Counter[tuple[str, str]]()
    for one in found.alive_at(oom.event):
        # The failure ends the pass, so tensors kept for backward are freed before any backward.
        unwound = one.category == TEMPORARIES and one.phase in (Phase.FORWARD, Phase.LOSS)
        site = found.sites[one.allocation.stack] or one.phase or ""
        held[ACTIVATIONS if unwound else one.category, site] += one.allocation.bytes
    settings = found.replay.snapshot.settings
    return Failure(row, len(found.replay.out_of_memory), cause, lacks, held, settings.expandable_segments)


@dataclass(frozen=True)
class Returned:
    """Memory that the allocator gave back to the driver and then asked for again.

    Attributes:
        segments: the number of segments that went back.
        bytes: their sum.
        by_program: most went back because the program called empty_cache.
    """

    segments: int
    bytes: int
    by_program: bool


def returned(found: Attribution) -> Returned | None:
    """Return the segments that went back before later ones came; None without any."""
    snapshot = found.replay.snapshot
    events = snapshot.events
    came = [event for event, action in enumerate(events.action) if action == SEGMENT_ALLOC]
    went = [event for event, action in enumerate(events.action) if action == SEGMENT_FREE and came and event < came[-1]]
    if not went or snapshot.settings.expandable_segments:
        return None
    asks = [any(_is_empty_cache(f.function) for f in snapshot.stacks[events.stack[event]]) for event in went]
    return Returned(len(went), sum(events.bytes[event] for event in went), 2 * sum(asks) > len(asks))


def _is_empty_cache(function: str) -> bool:
    return "emptycache" in function.replace("_", "").lower()


def between_blocks(found: Attribution, event: int, apart: Iterable[Attributed] = ()) -> int | None:
    """Return the bytes that nothing uses after an event in segments that something uses; None if unknown.

    The allocator returns whole segments that are free before a request fails, and expandable segments in part too.
    Segments in which only the allocations of `apart` are in use do not count: they go with these.
    """
    snapshot = found.replay.snapshot
    if found.replay.reserved_at(event) is None:
        return None
    if snapshot.settings.expandable_segments:
        return 0
    events, segments = snapshot.events, {s.address: s.bytes for s in snapshot.segments}
    for later in range(len(events) - 1, event, -1):
        if events.action[later] == SEGMENT_ALLOC:
            segments.pop(events.address[later], None)
        elif events.action[later] == SEGMENT_FREE:
            segments[events.address[later]] = events.bytes[later]
    whole = sorted((address, address + size) for address, size in segments.items())
    pieces = set(_free_pieces(found, whole, event)) - set(whole)
    left_out = {id(one.allocation) for one in apart}
    if not left_out:
        return length(pieces)
    starts = [start for start, _ in whole]
    used = {bisect_right(starts, one.address) for one in found.replay.alive_at(event) if id(one) not in left_out}
    return length(piece for piece in pieces if bisect_right(starts, piece[0]) in used)


def _segments_at(snapshot: Snapshot, event: int) -> list[Interval]:
    """Return the memory reserved after an event, as disjoint intervals in order.

    An address was reserved then if it is freed before it is reserved again, or never touched and reserved at the end.
    """
    events, end = snapshot.events, len(snapshot.events)
    changes = [(s.address, s.address + s.bytes, end, True) for s in snapshot.segments]
    for later in range(event + 1, end):
        if (action := events.action[later]) in (SEGMENT_ALLOC, SEGMENT_FREE):
            start = events.address[later]
            changes.append((start, start + events.bytes[later], later, action == SEGMENT_FREE))
    changes.sort()
    edges = sorted({edge for start, stop, *_ in changes for edge in (start, stop)})
    reserved: list[Interval] = []
    covering: list[tuple[int, int, bool]] = []  # heap of (event, end, reserved before): the first event decides
    next_change = 0
    for start, stop in pairwise(edges):
        while next_change < len(changes) and changes[next_change][0] <= start:
            _, until, when, before = changes[next_change]
            heappush(covering, (when, until, before))
            next_change += 1
        while covering and covering[0][1] <= start:
            heappop(covering)
        if covering and covering[0][2]:
            reserved.append((start, stop))
    return joined(reserved)


def _free_pieces(found: Attribution, segments: Sequence[Interval], event: int) -> list[Interval]:
    """Return the parts of the segments that nothing uses after an event."""
    replay, events = found.replay, found.replay.snapshot.events
    pending = set[int]()
    for action, address in zip(events.action[: event + 1], events.address, strict=False):
        if action == FREE_REQUESTED:
            pending.add(address)
        elif action == FREE_COMPLETED:
            pending.discard(address)
    used = [(a.address, a.address + a.bytes) for a in replay.alive_at(event)]
    used += [(a.address, a.address + a.bytes) for a in replay.allocations if a.end <= event and a.address in pending]
    used += [
        (b.address, b.address + b.bytes)
        for s in replay.snapshot.segments
        for b in s.blocks
        if b.state == "active_pending_free" and b.address in pending
    ]
    return without(segments, joined(used))
