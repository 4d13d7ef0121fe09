"""Text around the tables of a memory snapshot."""

from __future__ import annotations

from collections.abc import Sequence

from cs_systems.analysis.comparison import NAMED_FROM, SIDES
from cs_systems.analysis.memory.allocations import BEFORE
from cs_systems.analysis.memory.categories import UNKNOWN, Attribution
from cs_systems.analysis.memory.tables import DifferenceRow, moment, tables_at
from cs_systems.analysis.memory.tensor_names import TensorNames
from cs_systems.core.units import counted, human, signed
from cs_systems.record import Row
from cs_systems.report import origins

MOST_CAUSES = 5


def heading(found: Attribution, names: TensorNames, recorded: Sequence[str] = ()) -> list[str]:
    """Return the snapshot's description, its origin, its peak, and which information is unknown or inferred."""
    replay = found.replay
    snapshot = replay.snapshot
    of = f" of {', '.join(map(str, snapshot.devices))}" if len(snapshot.devices) > 1 else ""
    segments = counted(len(snapshot.segments), "segment")
    return [
        f"{snapshot.source} · device {snapshot.device}{of} · {_events(found)} · {segments}",
        *recorded,
        _peak(found),
        *_cut(found),
        *_out_of_memory(found),
        *_sidecar(found),
        *(f"missing: {what}" for what in snapshot.missing),
        *replay.doubts,
        *found.notes,
        *([names.note] if names.note else []),
    ]


def shown_moment(found: Attribution) -> str:
    """Return a phrase for the moment that the tables show: the peak, or the end of the history."""
    return moment(has_peak=found.replay.has_peak, has_events=len(found.replay.snapshot.events) > 0)


def _events(found: Attribution) -> str:
    events = found.replay.snapshot.events
    during = human((events.time_us[-1] - events.time_us[0]) / 1e6, "s") if events.time_us else None
    return counted(len(events), "event") + (f" in {during}" if during else "")


def _peak(found: Attribution) -> str:
    replay = found.replay
    event, events = replay.peak_event, replay.snapshot.events
    highest = replay.highest_reserved_bytes
    size = f"{human(replay.peak_bytes, 'bytes')} ({replay.peak_bytes:,} bytes)"
    if not len(events):
        over = "" if highest is None else f"; reserved {human(highest, 'bytes')}"
        return f"allocated at the end: {size}{over}"
    if not replay.has_peak:
        begins = f"{_beginning(found)} with {counted(replay.before_allocations, 'allocation')}"
        return f"peak unknown, {begins} and has {counted(len(events), 'event')}; highest in it {size}"
    when = "before the first event, after an earlier peak if there was one"
    if event > BEFORE:
        phase = found.places[event].phase
        when = f"at event {event:,}"
        if events.time_us:
            when += f", {human((events.time_us[event] - events.time_us[0]) / 1e6, 's')} after the first"
        when += f", in {phase}" if phase else ""
    reserved = replay.reserved_at(event)
    if reserved is None or highest is None:
        return f"peak {size} {when}"
    over = f"reserved then {human(reserved, 'bytes')}"
    return f"peak {size} {when}; {over}" + (
        f", highest reserved {human(highest, 'bytes')}" if highest > reserved else ""
    )


def _beginning(found: Attribution) -> str:
    times = found.replay.snapshot.events.time_us
    began_unix_s = times[0] * 1e-6 if times else 0.0
    return f"the history begins at {origins.moment(began_unix_s) or 'its event 0'}"


def _cut(found: Attribution) -> list[str]:
    """Return the line for a history that begins in the middle of the program, with the evidence for it."""
    replay, count = found.replay, len(found.replay.snapshot.events)
    before = f"{_beginning(found)} with {human(replay.before_bytes, 'bytes')} allocated"
    unknown = "an earlier peak is unknown"
    if replay.is_cut:
        lost = counted(replay.lost_allocations, "block")
        why = f"{lost} with a stack but no event" if replay.lost_allocations else f"exactly {count:,} events"
        return [f"history cut ({why}): {before}, and {unknown}; record with a larger max_entries"]
    freed = sum(a.start == BEFORE and a.end < count for a in replay.allocations)
    if freed and replay.has_peak:
        return [f"{before}, and frees {freed} of the {counted(replay.before_allocations, 'allocation')}; {unknown}"]
    return []


def doubt(found: Attribution) -> str | None:
    """Return the line of the heading that says why the program's peak is unknown or uncertain.

    None if it is certain.
    """
    if len(found.replay.snapshot.events) and not found.replay.has_peak:
        return _peak(found)
    return next(iter(_cut(found)), None) if found.replay.is_cut else None


def _out_of_memory(found: Attribution) -> list[str]:
    return [
        f"out of memory at event {oom.event:,}: {human(oom.requested_bytes, 'bytes')} requested, "
        + (f"{human(oom.device_free_bytes, 'bytes')} free on the device, " if oom.device_free_bytes is not None else "")
        + f"{human(oom.allocated_bytes, 'bytes')} allocated"
        + (f", at {place}" if (place := found.sites[oom.stack]) else "")
        for oom in found.replay.out_of_memory
    ]


def _sidecar(found: Attribution) -> list[str]:
    sidecar = found.replay.snapshot.sidecar
    if sidecar is None or sidecar.max_allocated_bytes is None:
        return []
    off = sidecar.max_allocated_bytes - found.replay.peak_bytes
    if not off:
        return ["the peak equals torch.cuda.max_memory_allocated(), to the byte"]
    return [
        f"torch.cuda.max_memory_allocated() returned {sidecar.max_allocated_bytes:,} bytes: "
        f"{abs(off):,} {'more' if off > 0 else 'less'} than the peak of the events"
    ]


def notes(name: str, found: Attribution, rows: Sequence[Row]) -> list[str]:
    """Return the notes under a table."""
    if name == "composition":
        unknown = sum(row["bytes"] for row in rows if row["category"] == UNKNOWN)
        rounding = sum(row["rounding_bytes"] for row in rows)
        whole = sum(row["bytes"] for row in rows)
        when = shown_moment(found)
        total = f"total {whole:,} bytes {when}; category unknown for {unknown:,}"
        return [f"{total}; {human(rounding, 'bytes')} more than requested, because the allocator rounds up"]
    if name == "out_of_memory":
        return [
            f"event {row['event']:,}" + (f", at {row['where']}" if row["where"] else "") + f": {row['cause']}"
            for row in rows[:MOST_CAUSES]
        ]
    if name == "annotations" and rows:
        when = shown_moment(found)
        title = tables_at(when)[name].titles["at_peak_bytes"]
        return [
            f"count, {title}: allocations made under the name, and their bytes alive {when}; maximum, change: of all "
            "allocated memory during a range"
        ]
    if name == "fragmentation" and rows:
        idle = sum(row["reserved_bytes"] - row["allocated_bytes"] for row in rows)
        return [f"{human(idle, 'bytes')} reserved but not allocated; empty_cache() would return the empty segments"]
    return []


def difference_heading(
    a: Attribution, b: Attribution, recorded_a: Sequence[str] = (), recorded_b: Sequence[str] = ()
) -> list[str]:
    left, right = a.replay.peak_bytes, b.replay.peak_bytes
    sides = [
        " · ".join([f"{side}: {x.replay.snapshot.source}", _highest(x), *recorded])
        for side, x, recorded in zip(SIDES, (a, b), (recorded_a, recorded_b), strict=True)
    ]
    return [
        *sides,
        f"change: {signed(right - left, 'bytes')} ({right - left:+,} bytes)",
    ]


def difference_opening(a: Attribution, b: Attribution, rows: Sequence[DifferenceRow]) -> str:
    """Return the difference of two known peaks in a sentence, with the categories that it comes from; else ""."""
    if not (a.replay.has_peak and b.replay.has_peak):
        return ""
    left, right = a.replay.peak_bytes, b.replay.peak_bytes
    if left == right:
        return f"the candidate's peak is {human(right, 'bytes')}, as the baseline's"
    most = abs(rows[0]["difference_bytes"]) if rows else 0
    named = [row for row in rows[:MOST_CAUSES] if abs(row["difference_bytes"]) > NAMED_FROM * most]
    causes = ", ".join(f"{row['what']} {signed(row['difference_bytes'], 'bytes')}" for row in named)
    sizes = f"{human(right, 'bytes')} instead of {human(left, 'bytes')} ({signed(right - left, 'bytes')})"
    return f"the candidate's peak is {sizes}" + f": {causes}" * bool(causes)


def _highest(found: Attribution) -> str:
    size = f"{found.replay.peak_bytes:,} bytes"
    return f"peak {size}" if found.replay.has_peak else f"peak unknown, {size} {shown_moment(found)}"
