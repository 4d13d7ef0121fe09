"""Tables of a memory snapshot: plain rows with every column always present."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, groupby
from operator import itemgetter
from typing import Annotated, Any, TypedDict

from cs_systems.analysis.memory.allocations import BEFORE
from cs_systems.analysis.memory.annotations import by_annotation
from cs_systems.analysis.memory.categories import ACTIVATIONS, CATEGORIES, UNKNOWN, Attributed, Attribution
from cs_systems.analysis.memory.out_of_memory import out_of_memory
from cs_systems.analysis.memory.tensor_names import TensorNames
from cs_systems.core.tables import Column, Table, by_name, first, table

MOST_GROUPS = 5  # categories in a short answer, the largest


class SnapshotFileRow(TypedDict):
    """Memory snapshot in a list of several."""

    file: Annotated[str, Column(beside=50)]
    device: int
    events: Annotated[int, Column(drop=2)]
    duration_s: float | None
    peak_bytes: int | None
    reserved_bytes: Annotated[int | None, Column("reserved then")]  # at the peak
    category: Annotated[str | None, Column("largest")]  # the largest at the peak
    category_share: Annotated[float | None, Column("its share")]  # share of the peak
    out_of_memory: Annotated[int, Column("OOM")]  # failed allocations


class Sums(TypedDict):
    """Sum over allocations."""

    allocations: Annotated[int, Column("count")]
    bytes: Annotated[int, Column("memory")]  # as the allocator gave them
    rounding_bytes: int  # more than requested


class CompositionRow(Sums):
    """Category and phase of the peak's memory."""

    category: str
    phase: Annotated[str | None, Column("allocated in")]
    share: Annotated[float | None, Column("share of peak", drop=9)]  # share of the peak


class LayerRow(Sums):
    """Layer of the activations at the peak; a line of code where the layer is not known."""

    layer: str
    share: Annotated[float | None, Column("share of activations", drop=9)]  # share of the activations


class AllocationsRow(TypedDict):
    """Equal allocations."""

    bytes: Annotated[int, Column("size")]  # bytes of one tensor
    allocations: Annotated[int, Column("count")]
    total_bytes: int
    category: str
    name: str | None  # name of the tensor
    where: str | None  # line of code; without a stack the phase
    described: Annotated[str | None, Column("tensor; source line")]  # name and where
    layers: str | None  # the first and the last


class StretchRow(TypedDict):
    """Stretch of events in one phase; times are None without a clock."""

    phase: str | None
    first_event: int
    events: Annotated[int, Column(drop=2)]
    start_s: float | None  # from the first event of the snapshot
    duration_s: Annotated[float | None, Column(drop=1)]
    before_bytes: int  # allocated
    peak_bytes: Annotated[int, Column("maximum")]
    after_bytes: int
    is_peak: Annotated[bool, Column("peak")]  # whether the peak of the snapshot is in it


class PoolRow(TypedDict):
    """Pool of the allocator at the end of the snapshot."""

    pool: str
    segments: int
    reserved_bytes: int
    allocated_bytes: int
    pending_free_bytes: int
    free_segments_bytes: Annotated[int, Column(drop=3)]  # whole segments, which `empty_cache` would return
    inactive_split_bytes: Annotated[int, Column("inactive")]  # pieces between blocks
    inactive_splits: Annotated[int, Column("splits", drop=1)]
    largest_split_bytes: Annotated[int, Column("largest", drop=2)]


class SegmentRow(TypedDict):
    """Segment of the allocator at the end of the snapshot."""

    address: Annotated[str, Column("segment")]
    pool: str
    stream: int
    reserved_bytes: int
    allocated_bytes: int
    inactive_split_bytes: Annotated[int, Column("inactive")]
    inactive_splits: Annotated[int, Column("splits", drop=1)]
    largest_split_bytes: Annotated[int, Column("largest", drop=2)]


class DeviceRow(TypedDict):
    """Device of a snapshot, or all of them."""

    device: str
    events: Annotated[int, Column(drop=2)]
    segments: int
    peak_bytes: int | None  # of all devices: the highest sum at one time
    peak_time_s: Annotated[float | None, Column("peak at")]  # from the first event of any device
    peak_reserved_bytes: Annotated[int | None, Column("reserved then")]  # at the peak
    end_bytes: Annotated[int, Column("at the end")]  # allocated at the end
    reserved_bytes: int | None  # at the end
    highest_reserved_bytes: int | None
    out_of_memory: Annotated[int, Column("failed")]  # requests that failed


class DifferenceRow(TypedDict):
    """Group of allocations at the peaks of two snapshots."""

    what: str
    a_bytes: Annotated[int, Column("baseline", own_unit=True)]
    b_bytes: Annotated[int, Column("candidate", own_unit=True)]
    difference_bytes: Annotated[int, Column("change", own_unit=True)]  # the candidate's less the baseline's
    a_allocations: Annotated[int, Column("baseline count")]
    b_allocations: Annotated[int, Column("candidate count")]


def _largest(rows: Sequence[CompositionRow]) -> Sequence[CompositionRow]:
    """Return the rows of most memory, in their order."""
    most = {id(row) for row in sorted(rows, key=lambda row: -row["bytes"])[:MOST_GROUPS]}
    return [row for row in rows if id(row) in most]


@table("memory at the peak, by category", "category phase allocations bytes share", brief=_largest)
def composition(found: Attribution, names: TensorNames) -> list[CompositionRow]:
    """Return the peak's memory by category and phase.

    The bytes add up to the peak's; `unknown` is always present.
    """
    groups: dict[tuple[str, str | None], list[Attributed]] = {(UNKNOWN, None): []}
    for a in found.alive_at(found.replay.peak_event):
        groups.setdefault((a.category, a.phase), []).append(a)
    order = list(CATEGORIES)
    rows: list[CompositionRow] = [
        {"category": category, "phase": phase, **_sums(group), "share": _share(group, found.replay.peak_bytes)}
        for (category, phase), group in groups.items()
    ]
    return sorted(rows, key=lambda row: (order.index(row["category"]), -row["bytes"]))


def _sums(group: Sequence[Attributed]) -> Sums:
    given = sum(a.allocation.bytes for a in group)
    asked = sum(a.allocation.requested_bytes for a in group)
    return {"allocations": len(group), "bytes": given, "rounding_bytes": given - asked}


def _share(group: Iterable[Attributed], whole: int) -> float | None:
    return sum(a.allocation.bytes for a in group) / whole if whole else None


@table("activations at the peak, by layer", "layer allocations bytes share", brief=first(3))
def layers(found: Attribution, names: TensorNames) -> list[LayerRow]:
    """Return the activations at the peak by layer, in the order in which forward made them, else by line of code."""
    groups: dict[str, list[Attributed]] = defaultdict(list)
    for a in found.alive_at(found.replay.peak_event):
        if a.category == ACTIVATIONS:
            groups[a.layer or where(found, a) or "unknown"].append(a)
    whole = sum(a.allocation.bytes for group in groups.values() for a in group)
    return [{"layer": layer, **_sums(group), "share": _share(group, whole)} for layer, group in groups.items()]


_ALLOCATIONS = "bytes allocations total_bytes category layers described"


@table("largest allocations at the peak", _ALLOCATIONS, name="top", most=10, brief=first(3))
def at_peak(found: Attribution, names: TensorNames) -> list[AllocationsRow]:
    """Return the allocations at the peak, equal ones grouped, the largest single allocation first."""
    return _grouped(found, names, found.alive_at(found.replay.peak_event))


@table("still allocated at the end", _ALLOCATIONS, name="alive", most=10)
def at_end(found: Attribution, names: TensorNames) -> list[AllocationsRow]:
    """Return the allocations at the end of the snapshot, grouped as in `at_peak`."""
    return _grouped(found, names, found.alive_at(len(found.replay.snapshot.events) - 1))


def _grouped(found: Attribution, names: TensorNames, chosen: Iterable[Attributed]) -> list[AllocationsRow]:
    groups: dict[tuple[int, str, str | None, str | None], list[Attributed]] = defaultdict(list)
    for a in chosen:
        groups[a.allocation.bytes, a.category, names.name(a), where(found, a)].append(a)
    rows: list[AllocationsRow] = [
        {
            "bytes": size,
            "allocations": len(group),
            "total_bytes": size * len(group),
            "category": category,
            "name": name,
            "where": place,
            "described": "; ".join(filter(None, (name, place))) or None,
            "layers": _span([a.layer for a in group]),
        }
        for (size, category, name, place), group in groups.items()
    ]
    return sorted(rows, key=lambda row: (-row["bytes"], -row["total_bytes"]))


def _span(layers: Iterable[str | None]) -> str | None:
    """Return the first and the last layer as text."""
    known = list(dict.fromkeys(layer for layer in layers if layer))
    if not known:
        return None
    first, last = known[0], known[-1]
    common = first.rpartition(" ")[0]  # `block 0 … 3`
    last = last.removeprefix(f"{common} ") if common else last
    return first if len(known) == 1 else f"{first} … {last}"


def where(found: Attribution, a: Attributed) -> str | None:
    """Return the line of code of an allocation; without a stack the phase that made it, or None."""
    return found.sites[a.allocation.stack] or a.phase


@table(
    "allocated memory by phase",
    "phase start_s duration_s events before_bytes peak_bytes after_bytes is_peak",
    most=10,
)
def timeline(found: Attribution, names: TensorNames) -> list[StretchRow]:
    """Return one row for each stretch of events in one phase."""
    replay, events = found.replay, found.replay.snapshot.events
    at, allocated = allocated_over_events(found)
    rows: list[StretchRow] = []
    phases = [place.phase for place in found.places]
    index = 0
    for phase, group in groupby(phases):
        count = sum(1 for _ in group)
        first, last = index, index + count - 1
        index += count
        low, high = bisect_right(at, first) - 1, bisect_right(at, last)
        before = allocated[bisect_right(at, first - 1) - 1]
        rows.append(
            {
                "phase": phase,
                "first_event": first,
                "events": count,
                "start_s": (events.time_us[first] - events.time_us[0]) / 1e6 if events.time_us else None,
                "duration_s": (events.time_us[last] - events.time_us[first]) / 1e6 if events.time_us else None,
                "before_bytes": before,
                "peak_bytes": max([before, *allocated[low:high]]),
                "after_bytes": allocated[high - 1],
                "is_peak": replay.has_peak and first <= replay.peak_event <= last,
            }
        )
    return rows


def allocated_over_events(found: Attribution) -> tuple[list[int], list[int]]:
    """Return (events at which it changes, bytes allocated from there on), beginning at BEFORE."""
    end = len(found.replay.snapshot.events)
    changes: dict[int, int] = defaultdict(int)
    for a in found.replay.allocations:
        changes[a.start] += a.bytes
        if a.end < end:
            changes[a.end] -= a.bytes
    changes.setdefault(BEFORE, 0)
    at = sorted(changes)
    return at, list(accumulate(changes[event] for event in at))


@table(
    "reserved but unallocated memory at the end, by pool",
    "pool segments reserved_bytes allocated_bytes free_segments_bytes inactive_split_bytes inactive_splits "
    "largest_split_bytes",
)
def fragmentation(found: Attribution, names: TensorNames) -> list[PoolRow]:
    """Return reserved and allocated memory at the end, by pool."""
    rows: list[PoolRow] = []
    segments = found.replay.snapshot.segments
    for pool in sorted({s.pool for s in segments}):
        of_pool = [s for s in segments if s.pool == pool]
        free = [(s, b) for s in of_pool for b in s.blocks if b.state == "inactive"]
        whole = sum(b.bytes for s, b in free if b.bytes == s.bytes)
        between = [b.bytes for s, b in free if b.bytes < s.bytes]
        states: dict[str, int] = defaultdict(int)
        for s in of_pool:
            for b in s.blocks:
                states[b.state] += b.bytes
        rows.append(
            {
                "pool": pool,
                "segments": len(of_pool),
                "reserved_bytes": sum(s.bytes for s in of_pool),
                "allocated_bytes": states["active_allocated"],
                "pending_free_bytes": states["active_pending_free"],
                "free_segments_bytes": whole,
                "inactive_split_bytes": sum(between),
                "inactive_splits": len(between),
                "largest_split_bytes": max(between, default=0),
            }
        )
    return rows


@table(
    "segments at the end, most fragmented first",
    "address pool reserved_bytes allocated_bytes inactive_split_bytes inactive_splits largest_split_bytes",
    most=10,
)
def segments(found: Attribution, names: TensorNames) -> list[SegmentRow]:
    """Return the segments at the end, first those with the most memory that is neither used nor returnable."""
    rows: list[SegmentRow] = []
    for s in found.replay.snapshot.segments:
        free = [b.bytes for b in s.blocks if b.state == "inactive"]
        split = sum(free) if sum(free) < s.bytes else 0
        rows.append(
            {
                "address": f"{s.address:#x}",
                "pool": f"{s.pool}, private" if s.private else s.pool,
                "stream": s.stream,
                "reserved_bytes": s.bytes,
                "allocated_bytes": sum(b.bytes for b in s.blocks if b.state == "active_allocated"),
                "inactive_split_bytes": split,
                "inactive_splits": len(free) if split else 0,
                "largest_split_bytes": max(free) if split else 0,
            }
        )
    return sorted(rows, key=lambda row: (-row["inactive_split_bytes"], -row["reserved_bytes"]))


def file_row(found: Attribution, file: str) -> SnapshotFileRow:
    """Return the row of one snapshot in a list of several."""
    replay, by_category = found.replay, Counter[str]()
    for attributed in found.alive_at(replay.peak_event) if replay.has_peak else ():
        by_category[attributed.category] += attributed.allocation.bytes
    times = replay.snapshot.events.time_us
    largest = by_category.most_common(1)
    return {
        "file": file,
        "device": replay.snapshot.device,
        "events": len(replay.snapshot.events),
        "duration_s": (times[-1] - times[0]) / 1e6 if times else None,
        "peak_bytes": replay.peak_bytes if replay.has_peak else None,
        "reserved_bytes": replay.reserved_at(replay.peak_event) if replay.has_peak else None,
        "category": largest[0][0] if largest else None,
        "category_share": largest[0][1] / replay.peak_bytes if largest and replay.peak_bytes else None,
        "out_of_memory": len(replay.out_of_memory),
    }


@table(
    "memory at the peak, candidate compared with baseline",
    "what a_bytes b_bytes difference_bytes a_allocations b_allocations",
)
def differences(
    a: Attribution, b: Attribution, by: Callable[[Attribution, Attributed], str | None]
) -> list[DifferenceRow]:
    """Compare the peaks of two snapshots, grouped by `by`, the largest difference first."""
    sides: list[dict[str, list[int]]] = []
    for found in (a, b):
        groups: dict[str, list[int]] = defaultdict(list)
        for each in found.alive_at(found.replay.peak_event):
            groups[by(found, each) or "no stack"].append(each.allocation.bytes)
        sides.append(groups)
    left, right = sides
    rows: list[DifferenceRow] = [
        {
            "what": what,
            "a_bytes": sum(left.get(what, ())),
            "b_bytes": sum(right.get(what, ())),
            "difference_bytes": sum(right.get(what, ())) - sum(left.get(what, ())),
            "a_allocations": len(left.get(what, ())),
            "b_allocations": len(right.get(what, ())),
        }
        for what in dict.fromkeys([*left, *right])
    ]
    return sorted(rows, key=lambda row: -abs(row["difference_bytes"]))


@table(
    "devices",
    "device events peak_bytes peak_time_s peak_reserved_bytes end_bytes reserved_bytes highest_reserved_bytes "
    "out_of_memory",
    notes=(
        "the row `all` is the sum of the devices over time; its peak is less than the sum of peaks at different times",
    ),
)
def devices(found: Sequence[Attribution]) -> list[DeviceRow]:
    """Return a row for each device and one of their sum over time, which is unknown without a clock on every device."""
    first = min((r.replay.snapshot.events.time_us[0] for r in found if r.replay.snapshot.events.time_us), default=0)
    rows: list[DeviceRow] = []
    for one in found:
        replay, snapshot = one.replay, one.replay.snapshot
        times, peak = snapshot.events.time_us, replay.peak_event
        rows.append(
            {
                "device": str(snapshot.device),
                "events": len(snapshot.events),
                "segments": len(snapshot.segments),
                "peak_bytes": replay.peak_bytes if replay.has_peak else None,
                "peak_time_s": (times[peak] - first) / 1e6 if times and replay.has_peak and peak > BEFORE else None,
                "peak_reserved_bytes": replay.reserved_at(peak) if replay.has_peak else None,
                "end_bytes": replay.end_bytes,
                "reserved_bytes": sum(s.bytes for s in snapshot.segments) if snapshot.segments else None,
                "highest_reserved_bytes": replay.highest_reserved_bytes,
                "out_of_memory": len(replay.out_of_memory),
            }
        )
    are_timed = all(one.replay.has_peak and one.replay.snapshot.events.time_us for one in found)
    allocated = [_over_time(one, zip(*allocated_over_events(one), strict=True)) for one in found] if are_timed else []
    reserved = [_over_time(one, one.replay.reserved_bytes) for one in found] if are_timed else []
    (peak_us, peak_bytes), (_, highest) = _highest(allocated), _highest(reserved)
    total: DeviceRow = {
        "device": "all",
        "events": sum(row["events"] for row in rows),
        "segments": sum(row["segments"] for row in rows),
        "peak_bytes": peak_bytes,
        "peak_time_s": (peak_us - first) / 1e6 if peak_us else None,
        "peak_reserved_bytes": _sum(_at(levels, peak_us) for levels in reserved) if are_timed else None,
        "end_bytes": sum(row["end_bytes"] for row in rows),
        "reserved_bytes": _sum(row["reserved_bytes"] for row in rows),
        "highest_reserved_bytes": highest,
        "out_of_memory": sum(row["out_of_memory"] for row in rows),
    }
    return [*rows, total]


Levels = list[tuple[int, int]]  # (µs, bytes from then on); 0 µs is before the first event


def _over_time(found: Attribution, levels: Iterable[tuple[int, int]]) -> Levels:
    times = found.replay.snapshot.events.time_us
    return [(0 if event == BEFORE else times[event], size) for event, size in levels]


def _highest(of_devices: Sequence[Levels]) -> tuple[int, int | None]:
    """Return (µs, bytes) of the highest sum; the bytes are None if a device's are unknown."""
    if not of_devices or not all(of_devices):
        return 0, None
    now = [levels[0][1] for levels in of_devices]
    best, total = (0, sum(now)), sum(now)
    changes = ((time, device, size) for device, levels in enumerate(of_devices) for time, size in levels[1:])
    for time, device, size in sorted(changes, key=itemgetter(0)):
        total += size - now[device]
        now[device] = size
        if total > best[1]:
            best = time, total
    return best


def _at(levels: Levels, time_us: int) -> int | None:
    at = bisect_right(levels, time_us, key=itemgetter(0))
    return levels[at - 1][1] if at else None


def _sum(sizes: Iterable[int | None]) -> int | None:
    """Return the sum, or None if one of the sizes is unknown."""
    known = list(sizes)
    return None if None in known else sum(size for size in known if size is not None)


FILES = Table(
    "files",
    SnapshotFileRow,
    "peaks of the snapshots",
    "file device events peak_bytes reserved_bytes category category_share out_of_memory",
)
TABLES = by_name(composition, layers, at_peak, timeline, by_annotation, out_of_memory, fragmentation, segments, at_end)


AT_PEAK, AT_HIGHEST, AT_END = "at the peak", "where the history is highest", "at the end"


def moment(*, has_peak: bool, has_events: bool) -> str:
    """Return a phrase for the moment that the tables show; without events, only the end of the recording is known."""
    return AT_PEAK if has_peak else AT_HIGHEST if has_events else AT_END


def tables_at(when: str) -> dict[str, Table[Any]]:
    """Return the tables with the captions and headings of that moment."""
    if when == AT_PEAK:
        return {**TABLES}
    then = {"composition": {"share": "share"}, "annotations": {"at_peak_bytes": "then"}}
    return {
        name: replace(table, caption=table.caption.replace(AT_PEAK, when), headings=then.get(name, {}))
        for name, table in TABLES.items()
    }
