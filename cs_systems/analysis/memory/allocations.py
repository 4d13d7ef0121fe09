"""Replay of a snapshot's events: what was allocated when, from its state at the end back to before recording.

The bytes are counted as by `torch.cuda.memory_allocated()`: the allocated size, from the allocation until its free is
requested (or completed, where no requests were recorded). The events hold requested sizes only, so the replay repeats
the allocator's arithmetic:

- A request is rounded up to 512 bytes, or as `roundup_power2_divisions` specifies.
- From a free piece of the large pool no rest of 1 MiB or less is split off; the request gets the whole piece.

The size of a free piece follows from the replay: it ends where the next piece in use begins, or where its segment ends.
Blocks that are alive at the end have their size in the snapshot.

Source: CUDACachingAllocator.cpp.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from cs_systems.core.units import counted
from cs_systems.readers.snapshot import ACTIONS, Settings, Snapshot

MIB = 2**20
LEAST_BYTES = 512  # kMinBlockSize
SMALL_BYTES = MIB  # kSmallSize: requests up to it come from the small pool
ALLOC, FREE_REQUESTED, FREE_COMPLETED, SEGMENT_ALLOC, SEGMENT_FREE, OOM = range(6)
assert ACTIONS[OOM] == "oom"
BEFORE = -1  # the start of what was allocated before the events begin
ROUND = 1000  # a number of events that it divides, or a power of two, is likely the limit `max_entries`


class Allocation(NamedTuple):
    """One allocation, alive from event `start` (BEFORE: before recording) up to event `end`, which requests its free.

    An `end` equal to the number of events means that it is alive at the end.
    """

    start: int
    end: int
    address: int
    bytes: int
    requested_bytes: int
    stack: int

    def is_alive(self, event: int) -> bool:
        return self.start <= event < self.end


class OutOfMemory(NamedTuple):
    """Request that failed."""

    event: int
    requested_bytes: int
    device_free_bytes: int | None
    allocated_bytes: int
    stack: int


@dataclass(frozen=True)
class Replay:
    """All allocations by their start; the history is highest at event `peak_event` (BEFORE: before all events).

    A history of few events shows a moment of the program and not its peak: `has_peak` is false then, as without events.
    """

    snapshot: Snapshot
    allocations: tuple[Allocation, ...]
    peak_event: int
    peak_bytes: int
    before_bytes: int
    end_bytes: int
    reserved_bytes: tuple[tuple[int, int], ...]  # (event, bytes reserved from there on), from BEFORE; empty if unknown
    out_of_memory: tuple[OutOfMemory, ...]
    doubts: tuple[str, ...]
    lost_allocations: int  # alive at the end with a recorded stack, but without an event: the history was cut

    @cached_property
    def before_allocations(self) -> int:
        return sum(a.start == BEFORE for a in self.allocations)

    @cached_property
    def has_peak(self) -> bool:
        """Flag of a history that makes at least as many allocations as there were when it begins."""
        return len(self.snapshot.events) > 1 and self.snapshot.events.action.count(ALLOC) >= self.before_allocations

    @property
    def is_cut(self) -> bool:
        """Flag of a history that lost its first events, by the blocks that are left or by a round number."""
        count = len(self.snapshot.events)
        is_round = count >= ROUND and (count % ROUND == 0 or count.bit_count() == 1)
        ran_before = self.before_allocations > 0 or bool(self.reserved_at(BEFORE))
        return (count > 0 and self.lost_allocations > 0) or (is_round and ran_before)

    @property
    def highest_reserved_bytes(self) -> int | None:
        return max((size for _, size in self.reserved_bytes), default=None)

    def reserved_at(self, event: int) -> int | None:
        """Return the bytes reserved after `event`, or None if they are unknown."""
        at = bisect_right(self.reserved_bytes, event, key=lambda change: change[0])
        return self.reserved_bytes[at - 1][1] if at else None

    def alive_at(self, event: int) -> Iterator[Allocation]:
        """Return the allocations that are alive after `event`."""
        return (a for a in self.allocations if a.is_alive(event))


def replay(snapshot: Snapshot) -> Replay:
    """Replay the events of a snapshot; `doubts` lists what they do not explain."""
    found = _Allocations(snapshot)
    allocations = sorted(found.done)
    peak_event, peak, now = BEFORE, found.before_bytes, found.before_bytes
    changes = sorted([(a.start, a.bytes) for a in allocations if a.start > BEFORE] + _frees(allocations, snapshot))
    failed: dict[int, int] = {}
    ooms = sorted(event for event, _ in found.failed)
    for event, change in changes:
        while ooms and ooms[0] < event:
            failed[ooms.pop(0)] = now
        now += change
        if now > peak:
            peak_event, peak = event, now
    failed.update(dict.fromkeys(ooms, now))
    free, stacks = snapshot.events.device_free_bytes, snapshot.events.stack
    out = (OutOfMemory(event, asked, free.get(event), failed[event], stacks[event]) for event, asked in found.failed)
    return Replay(
        snapshot, tuple(allocations), peak_event, peak, found.before_bytes, now, _reserved(snapshot),
        tuple(out), tuple(found.doubts()), found.lost,
    )  # fmt: skip


def _frees(allocations: list[Allocation], snapshot: Snapshot) -> list[tuple[int, int]]:
    end = len(snapshot.events)
    return [(a.end, -a.bytes) for a in allocations if a.end < end]


def _reserved(snapshot: Snapshot) -> tuple[tuple[int, int], ...]:
    """Return (event, bytes reserved from there on), computed from the reserved bytes at the end.

    Empty if the snapshot holds no segments, or events that do not lead to them.
    """
    events = snapshot.events
    changes = [
        (index, events.bytes[index] if action == SEGMENT_ALLOC else -events.bytes[index])
        for index, action in enumerate(events.action)
        if action in (SEGMENT_ALLOC, SEGMENT_FREE)
    ]
    now = sum(s.bytes for s in snapshot.segments) - sum(change for _, change in changes)
    found = [(BEFORE, now)]
    for index, change in changes:
        now += change
        found.append((index, now))
    return tuple(found) if snapshot.segments and all(size >= 0 for _, size in found) else ()


class _Allocations:
    """Allocations matched with their frees, and those made before recording."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot, self._end = snapshot, len(snapshot.events)
        self.done: list[Allocation] = []
        self.failed: list[tuple[int, int]] = []
        self._twice = self._unknown = self.lost = 0
        self._blocks = {b.address: b for s in snapshot.segments for b in s.blocks if b.state != "inactive"}
        self._large = _LargePool(snapshot)
        self._add_before()
        self._follow()

    @property
    def before_bytes(self) -> int:
        return sum(a.bytes for a in self.done if a.start == BEFORE)

    def doubts(self) -> Iterator[str]:
        if self._twice:
            several = counted(self._twice, "allocation")
            yield f"{several} at an address in use: events are missing, the earlier counts as freed"
        if self._unknown:
            yield f"counted as alive: {counted(self._unknown, 'allocation')} neither freed nor in a block at the end"

    def _add_before(self) -> None:
        """Add the allocations that are freed, or alive at the end, without an event that allocates them."""
        events, seen = self._snapshot.events, set()
        freed: list[tuple[int, int, int]] = []
        # A free that was requested before recording began completes in it: its memory was no longer allocated.
        asks = FREE_REQUESTED if FREE_REQUESTED in events.action else FREE_COMPLETED
        for index, (action, address) in enumerate(zip(events.action, events.address, strict=True)):
            if action == ALLOC:
                seen.add(address)
            elif action in (FREE_REQUESTED, FREE_COMPLETED) and address not in seen:
                seen.add(address)
                self._large.use(address)
                if action == asks:
                    freed.append((index, address, events.bytes[index]))
        for address, block in self._blocks.items():
            if address not in seen:
                self._large.use(address)
                if block.state == "active_allocated":
                    self.lost += block.stack > 0
                    asked = block.bytes if block.requested_bytes is None else block.requested_bytes
                    self.done.append(Allocation(BEFORE, self._end, address, block.bytes, asked, block.stack))
        for index, address, asked in freed:  # now that all neighbours are known
            self.done.append(Allocation(BEFORE, index, address, self._given(address, asked), asked, 0))

    def _given(self, address: int, asked: int) -> int:
        given = rounded(asked, self._snapshot.settings)
        return given if given <= SMALL_BYTES else self._large.piece(address, given)

    def _follow(self) -> None:
        events, large, done = self._snapshot.events, self._large, self.done
        ends_at = FREE_REQUESTED if FREE_REQUESTED in events.action else FREE_COMPLETED
        leaves_at = FREE_COMPLETED if FREE_COMPLETED in events.action else FREE_REQUESTED
        alive: dict[int, tuple[int, int, int, int]] = {}  # address → (event, bytes, requested, stack)
        columns = zip(events.action, events.address, events.bytes, events.stack, strict=True)
        for index, (action, address, size, stack) in enumerate(columns):
            if action == ALLOC:
                if address in alive:
                    self._twice += 1
                    start, given, asked, where = alive[address]
                    done.append(Allocation(start, index, address, given, asked, where))
                given = self._given(address, size)
                alive[address] = (index, given, size, stack)
                if given > SMALL_BYTES:
                    large.use(address)
            elif action in (FREE_REQUESTED, FREE_COMPLETED):
                if action == ends_at and address in alive:
                    start, given, asked, where = alive.pop(address)
                    done.append(Allocation(start, index, address, given, asked, where))
                if action == leaves_at:
                    large.give_back(address)
            elif action == SEGMENT_ALLOC:
                large.add(address, size)
            elif action == SEGMENT_FREE:
                large.remove(address)
            elif action == OOM:
                self.failed.append((index, size))
        for address, (start, given, asked, where) in alive.items():
            block = self._blocks.get(address)
            self._unknown += block is None and bool(self._snapshot.segments)
            done.append(Allocation(start, self._end, address, block.bytes if block else given, asked, where))


def rounded(size: int, settings: Settings) -> int:
    """Return the size of the block that the allocator looks for when `size` bytes are requested."""
    if settings.roundup_divisions and size >= LEAST_BYTES:
        floor = 1 << (size.bit_length() - 1)
        parts = settings.roundup_divisions.get(min(max(floor, MIB), 2**15 * MIB), 0)
        if parts > 1 and size > LEAST_BYTES * parts:
            step = floor // parts
            return -(-size // step) * step
    return max(LEAST_BYTES, -(-size // LEAST_BYTES) * LEAST_BYTES)


class _LargePool:
    """Large pool's segments and the addresses of its pieces in use, from which the size of a given piece follows."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._settings = snapshot.settings
        self._used: list[int] = []
        came, went = {}, []
        events = snapshot.events
        for action, address, size in zip(events.action, events.address, events.bytes, strict=True):
            if action == SEGMENT_ALLOC:
                came[address] = size
            elif action == SEGMENT_FREE and address not in came:
                went.append((address, size))  # the block existed before recording
        there = [(s.address, s.bytes) for s in snapshot.segments if s.address not in came]
        self._size = dict([*there, *went])
        self._starts = sorted(self._size)

    def piece(self, address: int, given: int) -> int:
        """Return the bytes of the piece at `address` that a request of `given` bytes gets."""
        at = bisect_right(self._used, address)
        following = self._used[at] if at < len(self._used) else None
        segment = bisect_right(self._starts, address) - 1
        if segment < 0 or self._settings.expandable_segments:
            return given
        end = self._starts[segment] + self._size[self._starts[segment]]
        rest = (end if following is None or following > end else following) - address - given
        limit = self._settings.max_split_bytes
        splits = rest > SMALL_BYTES and (limit is None or given < limit)
        return given if splits or rest < 0 else given + rest

    def use(self, address: int) -> None:
        insort(self._used, address)

    def give_back(self, address: int) -> None:
        at = bisect_left(self._used, address)
        if at < len(self._used) and self._used[at] == address:
            del self._used[at]

    def add(self, address: int, size: int) -> None:
        if address not in self._size:
            insort(self._starts, address)
        self._size[address] = size

    def remove(self, address: int) -> None:
        if self._size.pop(address, None) is not None:
            del self._starts[bisect_left(self._starts, address)]
