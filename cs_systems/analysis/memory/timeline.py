"""Data for the page of a memory snapshot, as plain JSON: allocations over time, and the segments at the end.

`view(attribution, names)` returns columns of numbers that index lists of names, so that a million events are a few
megabytes. Of more than MOST_ALLOCATIONS allocations, those with the most bytes × time are drawn one by one, since these
are visible; the rest of a category is one band, with its maximum in each of BINS stretches of time.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import TypedDict

from cs_systems.analysis.memory.allocations import BEFORE
from cs_systems.analysis.memory.categories import CATEGORIES, Attributed, Attribution
from cs_systems.analysis.memory.phases import ANYWHERE, INNERMOST, NO_STACK
from cs_systems.analysis.memory.sites import python_frames, short_file
from cs_systems.analysis.memory.tensor_names import TensorNames
from cs_systems.config import Phase
from cs_systems.readers.snapshot import Events, Stack

MOST_ALLOCATIONS = 300_000
MOST_BLOCKS = 50_000
MOST_FRAMES = 40  # most frames kept of a stack, the innermost ones
BINS = 2000


class MomentView(TypedDict):
    """Memory at one moment."""

    at_ns: int
    bytes: int
    reserved: int | None
    by: list[int]  # bytes by category, in the order of `categories`


class Allocations(TypedDict):
    """Columns with one entry for each allocation that is drawn alone, by its start."""

    later_ns: list[int]  # since the start of the one before
    duration_ns: list[int]
    bytes: list[int]
    unasked_bytes: list[int]  # more than requested
    before: list[int]  # indices of those made before the first event
    made: list[int | None]  # event that allocated it; None before the first
    freed: list[int | None]  # event that freed it; None if it is still allocated at the end
    category: list[int]  # index in `categories`
    stack: list[int]  # index in `stacks`; layer, phase and name, too, index the lists of texts
    layer: list[int]
    phase: list[int]
    name: list[int]


class Rest(TypedDict):
    """Allocations that are not drawn alone: [category, from ns, to ns, bytes] of each band."""

    allocations: int
    bands: list[list[int]]


class SegmentView(TypedDict):
    """Segment at the end, with columns of its blocks."""

    address: str
    pool: str
    stream: int
    private: bool
    bytes: int
    size: list[int]  # bytes of each block
    pending: list[int]  # indices of the blocks that are pending free
    category: list[int]  # index in `categories`; -1 for a free block
    stack: list[int]
    name: list[int]
    layer: list[int]


class StackColumns(TypedDict):
    """Frames of the stacks as texts, and each stack as indices of frames."""

    frames: list[str | None]
    stacks: list[list[int]]


class View(StackColumns):
    """Data of the page of a snapshot; times are in ns from the first event. Lists of texts begin with None."""

    end_ns: int
    timed: bool  # whether the snapshot has a clock
    events: int
    peak: MomentView | None  # None: unknown
    highest: MomentView  # of the history
    categories: list[str]
    rules: list[tuple[str, str]]
    phase_rules: list[tuple[str, str]]
    allocations: Allocations
    rest: Rest
    reserved: list[list[int]]  # [time in ns, bytes reserved from this time on]
    segments: list[SegmentView]
    hidden_segments: int
    names: list[str | None]
    layers: list[str | None]
    phases: list[str | None]


def view(found: Attribution, names: TensorNames) -> View:
    """Return the page's data."""
    replay = found.replay
    moments = _moments(replay.snapshot.events)
    end_ns = (moments[-1] if moments else 0) + 1000
    texts = {kind: _Texts() for kind in ("names", "layers", "phases")}
    stacks = _Stacks(replay.snapshot.stacks)

    def begins(a: Attributed) -> int:
        return 0 if a.allocation.start == BEFORE else moments[a.allocation.start]

    def ends(a: Attributed) -> int:
        return end_ns if a.allocation.end == len(moments) else moments[a.allocation.end]

    drawn, rest = _most_seen(found.allocations, begins, ends)
    columns = _columns(drawn, len(moments), begins, ends, names, texts, stacks)
    highest: MomentView = {
        "at_ns": 0 if replay.peak_event == BEFORE else moments[replay.peak_event],
        "bytes": replay.peak_bytes,
        "reserved": replay.reserved_at(replay.peak_event),
        "by": _by_category(found.alive_at(replay.peak_event)),
    }
    return {
        "end_ns": end_ns,
        "timed": bool(replay.snapshot.events.time_us),
        "events": len(moments),
        "peak": highest if replay.has_peak else None,
        "highest": highest,
        "categories": [*CATEGORIES],
        "rules": [*CATEGORIES.items()],
        "phase_rules": [*((rule.phase, rule.why) for rule in (*ANYWHERE, *INNERMOST)), (Phase.BACKWARD, NO_STACK)],
        "allocations": columns,
        "rest": {"allocations": len(rest), "bands": _bands(rest, begins, ends, end_ns)},
        "reserved": [[0 if e == BEFORE else moments[e], reserved] for e, reserved in replay.reserved_bytes],
        "segments": (segments := _segments(found, names, texts, stacks)),
        "hidden_segments": len(replay.snapshot.segments) - len(segments),
        "names": texts["names"].texts,
        "layers": texts["layers"].texts,
        "phases": texts["phases"].texts,
        **stacks.columns(),
    }


def _moments(events: Events) -> array[int]:
    """Return the time of each event in ns from the first, all distinct: events of one µs share it evenly.

    Without a clock each event takes a µs.
    """
    if not events.time_us:
        return array("q", range(0, len(events) * 1000, 1000))
    first, times = events.time_us[0], events.time_us
    moments = array("q")
    index = 0
    while index < len(times):
        after = index + 1
        while after < len(times) and times[after] <= times[index]:
            after += 1
        step = 1000 // (after - index) or 1
        start = max((times[index] - first) * 1000, moments[-1] + 1 if moments else 0)
        moments.extend(start + n * step for n in range(after - index))
        index = after
    return moments


def _by_category(alive: Iterable[Attributed]) -> list[int]:
    sums = dict.fromkeys(CATEGORIES, 0)
    for a in alive:
        sums[a.category] += a.allocation.bytes
    return [*sums.values()]


class _Texts:
    """Map from each text to a number; None is the first."""

    def __init__(self) -> None:
        self.texts: list[str | None] = [None]
        self._numbers: dict[str | None, int] = {None: 0}

    def number(self, text: str | None) -> int:
        number = self._numbers.get(text)
        if number is None:
            number = self._numbers[text] = len(self.texts)
            self.texts.append(text)
        return number


class _Stacks:
    """Requested stacks, as numbers of frames."""

    def __init__(self, stacks: Sequence[Stack]) -> None:
        self._stacks = stacks
        self._numbers: dict[int, int] = {0: 0}
        self._frames = _Texts()
        self._made: list[list[int]] = [[]]

    def number(self, stack: int) -> int:
        number = self._numbers.get(stack)
        if number is None:
            number = self._numbers[stack] = len(self._made)
            frames = python_frames(self._stacks[stack])[:MOST_FRAMES]
            self._made.append([self._frames.number(f"{short_file(f.file)}:{f.line} {f.function}") for f in frames])
        return number

    def columns(self) -> StackColumns:
        return {"frames": self._frames.texts, "stacks": self._made}


Moment = Callable[[Attributed], int]


def _most_seen(
    allocations: Sequence[Attributed], begins: Moment, ends: Moment
) -> tuple[list[Attributed], list[Attributed]]:
    """Return (the allocations with the most bytes × time, in the order of their start; all others)."""
    if len(allocations) <= MOST_ALLOCATIONS:
        return sorted(allocations, key=begins), []
    by_area = sorted(allocations, key=lambda a: -a.allocation.bytes * (ends(a) - begins(a)))
    return sorted(by_area[:MOST_ALLOCATIONS], key=begins), by_area[MOST_ALLOCATIONS:]


def _columns(
    drawn: Sequence[Attributed],
    events: int,
    begins: Moment,
    ends: Moment,
    names: TensorNames,
    texts: dict[str, _Texts],
    stacks: _Stacks,
) -> Allocations:
    order = {category: number for number, category in enumerate(CATEGORIES)}
    starts = [begins(a) for a in drawn]
    return {
        "later_ns": [start - before for before, start in zip([0, *starts], starts, strict=False)],
        "duration_ns": [ends(a) - start for a, start in zip(drawn, starts, strict=True)],
        "bytes": [a.allocation.bytes for a in drawn],
        "unasked_bytes": [a.allocation.bytes - a.allocation.requested_bytes for a in drawn],
        "before": [index for index, a in enumerate(drawn) if a.allocation.start == BEFORE],
        "made": [None if a.allocation.start == BEFORE else a.allocation.start for a in drawn],
        "freed": [None if a.allocation.end == events else a.allocation.end for a in drawn],
        "category": [order[a.category] for a in drawn],
        "stack": [stacks.number(a.allocation.stack) for a in drawn],
        "layer": [texts["layers"].number(a.layer) for a in drawn],
        "phase": [texts["phases"].number(a.phase) for a in drawn],
        "name": [texts["names"].number(names.name(a)) for a in drawn],
    }


def _bands(rest: Iterable[Attributed], begins: Moment, ends: Moment, end_ns: int) -> list[list[int]]:
    """Return the maximum of the rest of a category in each stretch of time."""
    changes: dict[str, list[tuple[int, int]]] = {}
    for a in rest:
        of_category = changes.setdefault(a.category, [])
        of_category += [(begins(a), a.allocation.bytes), (ends(a), -a.allocation.bytes)]
    bands: list[list[int]] = []
    width = -(-end_ns // BINS)
    for number, category in enumerate(CATEGORIES):
        now, most = 0, [0] * (BINS + 1)
        at = 0
        for moment, change in sorted(changes.get(category, ())):
            while at < min(moment // width, BINS):
                at += 1
                most[at] = now
            now += change
            most[at] = max(most[at], now)
        for n, bytes in enumerate(most):
            begin, end = n * width, min((n + 1) * width, end_ns)
            if n and bytes == most[n - 1] and bytes:
                bands[-1][2] = end
            elif bytes and begin < end:
                bands.append([number, begin, end, bytes])
    return bands


def _segments(found: Attribution, names: TensorNames, texts: dict[str, _Texts], stacks: _Stacks) -> list[SegmentView]:
    """Return the segments by pool and address, with their blocks as columns.

    Of too many blocks, the blocks of the largest segments are returned.
    """
    replay = found.replay
    order = {category: number for number, category in enumerate(CATEGORIES)}
    alive = {a.allocation.address: a for a in found.alive_at(len(replay.snapshot.events) - 1)}
    chosen, blocks = [], 0
    for segment in sorted(replay.snapshot.segments, key=lambda s: -s.bytes):
        blocks += len(segment.blocks)
        if blocks > MOST_BLOCKS:
            break
        chosen.append(segment)
    made: list[SegmentView] = []
    for segment in sorted(chosen, key=lambda s: (s.pool, s.stream, s.address)):
        owners = [alive.get(b.address) if b.state == "active_allocated" else None for b in segment.blocks]
        made.append(
            {
                "address": f"{segment.address:#x}",
                "pool": segment.pool,
                "stream": segment.stream,
                "private": segment.private,
                "bytes": segment.bytes,
                "size": [b.bytes for b in segment.blocks],
                "pending": [n for n, b in enumerate(segment.blocks) if b.state == "active_pending_free"],
                "category": [-1 if a is None else order[a.category] for a in owners],
                "stack": [0 if a is None else stacks.number(a.allocation.stack) for a in owners],
                "name": [0 if a is None else texts["names"].number(names.name(a)) for a in owners],
                "layer": [0 if a is None else texts["layers"].number(a.layer) for a in owners],
            }
        )
    return made
