"""Waits of a recorded step: which activities a call of the host waits for, and which an activity of another stream.

The file names these activities, or the times show them: an activity that ended just before the wait ended is its cause.
An activity that ended later than the wait cannot be its cause.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from cs_systems.analysis.replay.recorded import Recorded
from cs_systems.readers._stalls import Kind, kind
from cs_systems.readers.forms.columns import UNKNOWN, Bools, Floats, Ints
from cs_systems.readers.forms.trace import Trace

SYNCS = (Kind.DEVICE_SYNC, Kind.STREAM_SYNC, Kind.EVENT_SYNC)
US = 1e-6
SKEW_S = 20 * US  # most time by which the clocks of host and device may differ
AT_ONCE_S = 15 * US  # from the end of an activity to the start of one that waited for it
CLOSE_S = 200 * US  # from the end of an activity to the end of a call that frees memory
LATE_S = 3 * US  # later than its stream and its launch explain


class Named(NamedTuple):
    """Wait that the file names, with calls of `Recorded`; None is unknown."""

    stream: int | None  # number in `Recorded`
    waiting: int | None
    device: int | None
    event: int | None  # the call that recorded the event


class Enqueued:
    """Activities of each stream by the order of their calls, and when they ended."""

    def __init__(self, recorded: Recorded) -> None:
        self.recorded = recorded
        order, stream = recorded.position, recorded.stream[recorded.position]
        self.streams = range(len(recorded.of_stream))
        self.of: list[Ints] = np.split(order, np.searchsorted(stream, self.streams[1:]))
        self.calls = [np.maximum.accumulate(recorded.call[of]) for of in self.of]
        call = np.concatenate(self.calls)
        by_call = np.argsort(call, kind="stable")
        self._number, self._call = stream[by_call], call[by_call]
        self._by_end = np.argsort(recorded.done_s, kind="stable")
        self._end_s = recorded.done_s[self._by_end]
        self.ends = [np.maximum.accumulate(recorded.done_s[of]) for of in self.of]

    def used(self, since: int, before: int) -> list[int]:
        """Return the streams with an activity that was launched from one call on and before another."""
        a, b = np.searchsorted(self._call, (since, before)).tolist()
        found: list[int] = np.unique(self._number[a:b]).tolist()
        return found

    def ending(self, since_s: float, by_s: float) -> list[int]:
        """Return the streams with an activity that ended between two times."""
        a, b = np.searchsorted(self._end_s, since_s), np.searchsorted(self._end_s, by_s, "right")
        found: list[int] = np.unique(self.recorded.stream[self._by_end[a:b]]).tolist()
        return found

    def last(self, stream: int, before: int) -> int | None:
        """Return the last activity of a stream that was launched before a call."""
        at = int(np.searchsorted(self.calls[stream], before)) - 1
        return int(self.of[stream][at]) if at >= 0 else None

    def first(self, stream: int, after: int) -> int | None:
        """Return the first activity of a stream that was launched by a call or after it."""
        at = int(np.searchsorted(self.calls[stream], after))
        return int(self.of[stream][at]) if at < len(self.of[stream]) else None

    def ended(self, stream: int, before: int, by_s: float) -> int | None:
        """Return the last activity of a stream that was launched before a call and had ended by a time."""
        at = min(np.searchsorted(self.calls[stream], before), np.searchsorted(self.ends[stream], by_s, "right")) - 1
        return int(self.of[stream][at]) if at >= 0 else None


class WaitEdges(NamedTuple):
    """Activities that calls and other activities wait for.

    awaited: call → activities that it waits for. depends: activity → activities of other streams. inside: activities
    that run inside their call, which waits for them. guessed: stream waits without a cause in the file.
    """

    awaited: dict[int, list[int]]
    depends: dict[int, list[int]]
    inside: Bools
    guessed: int


def kinds(recorded: Recorded) -> tuple[list[Kind | None], Ints]:
    """Return (kinds, codes) of the calls; None for a mark."""
    of = [None if number == 0 else kind(name) for number, name in enumerate(recorded.name.values)]
    known = list(dict.fromkeys(of))
    return known, np.array([known.index(one) for one in of], np.int64)[recorded.name.codes]


def of_kind(recorded: Recorded, *wanted: Kind | None) -> Ints:
    """Return the calls of some kinds, in order."""
    known, codes = kinds(recorded)
    return np.flatnonzero(np.isin(codes, [known.index(one) for one in wanted if one in known]))


def named(trace: Trace, recorded: Recorded) -> dict[int, Named]:
    """Return the waits that the file names, by their call."""
    waits, found = trace.waits, dict[int, Named]()
    if not len(waits):
        return found
    position = np.full(len(trace.calls) + 1, UNKNOWN)
    mine = np.flatnonzero(recorded.trace_call != UNKNOWN)
    position[recorded.trace_call[mine]] = mine
    streams = {one: number for number, one in enumerate(recorded.of_stream)}
    rows = zip(
        *(
            c.tolist()
            for c in (
                position[waits.call],
                waits.stream,
                waits.waiting_stream,
                waits.device,
                position[waits.event_call],
            )
        ),
        strict=True,
    )
    for call, stream, waiting, device, event in rows:
        if call != UNKNOWN:
            found[call] = Named(
                streams.get((device, stream)),
                streams.get((device, waiting)),
                None if device == UNKNOWN else device,
                None if event == UNKNOWN else event,
            )
    return found


def waits_of(trace: Trace, recorded: Recorded, late_s: Floats) -> WaitEdges:
    """Return the waits of a recorded step.

    late_s: for each activity, how much later it began than its stream and its launch explain.
    """
    by_file, queue = named(trace, recorded), Enqueued(recorded)
    inside = _runs_inside(recorded)
    awaited = dict(_host_waits(recorded, queue, by_file, inside))
    depends, guessed = _stream_waits(recorded, queue, by_file, late_s)
    return WaitEdges(awaited, depends, inside, guessed)


def _runs_inside(recorded: Recorded) -> Bools:
    """Return for each activity whether its call waits for it: a blocking copy, or one from or to pageable memory."""
    call = recorded.call
    pageable = recorded.label.codes_where(lambda name: name.endswith("pageable"))
    known, codes = kinds(recorded)
    blocking = np.array([one is Kind.BLOCKING_COPY for one in known])[codes[call]]
    copies = recorded.kind.codes_where(lambda kind: kind != "kernel")
    # One from pageable memory begins while the host stages it, and may end when the call has just returned.
    began = recorded.begin_s < recorded.end_s[call] + SKEW_S
    return np.asarray(copies & (call != UNKNOWN) & ~recorded.lost & (pageable | blocking) & began)


def _host_waits(
    recorded: Recorded, queue: Enqueued, by_file: Mapping[int, Named], inside: Bools
) -> Iterable[tuple[int, list[int]]]:
    for copy in np.flatnonzero(inside).tolist():
        yield int(recorded.call[copy]), [copy]
    known, codes = kinds(recorded)
    launching = set(recorded.call[inside].tolist())
    launched = _launched(recorded)
    has_one_device = len({device for device, _ in recorded.of_stream}) <= 1
    waited = dict[int, int]()  # thread → its last call that waited for all that was launched before it
    for i in of_kind(recorded, *SYNCS, Kind.ALLOCATION).tolist():
        if i in launching:
            continue
        what, start_s, end_s = known[codes[i]], float(recorded.start_s[i]), float(recorded.end_s[i])
        said, thread = by_file.get(i), int(recorded.thread[i])
        used = queue.used(waited.get(thread, UNKNOWN), i)
        last = {z: k for z in used if (k := queue.last(z, i)) is not None}
        if what is Kind.DEVICE_SYNC and (has_one_device or not said or said.device is None):
            waited[thread] = i
        if said and said.event is not None:
            streams = [said.stream] if said.stream is not None else queue.streams
            found = [k for z in streams if (k := queue.last(z, said.event)) is not None]
        elif said and said.stream is not None:
            found = [k] if (k := queue.last(said.stream, i)) is not None else []
        elif what is Kind.DEVICE_SYNC:
            found = [k for z, k in last.items() if not said or said.device in (None, recorded.of_stream[z][0])]
        elif what is Kind.ALLOCATION:
            ended = [k for k in last.values() if start_s + 5 * US < recorded.done_s[k] <= end_s + US]
            found = [k for k in ended if end_s - recorded.done_s[k] < CLOSE_S]
        else:
            by = end_s + SKEW_S
            of = last.values() if what is Kind.STREAM_SYNC else (queue.ended(z, i, by) for z in used)
            ended = [k for k in of if k is not None and start_s < recorded.done_s[k] <= by]
            found = [max(ended, key=lambda k: float(recorded.done_s[k]))] if ended else []
            if not found and what is Kind.STREAM_SYNC and (k := _around(recorded, launched, i)[0]) is not None:
                found = [last[z]] if (z := int(recorded.stream[k])) in last else []
        if found := [k for k in found if recorded.done_s[k] <= end_s + SKEW_S]:
            yield i, found
    for ends, idle in zip(recorded.marks[:, 1].tolist(), recorded.until_idle, strict=True):
        if idle:
            yield ends, [k for z in queue.streams if (k := queue.last(z, ends)) is not None]


def _launched(recorded: Recorded) -> dict[int, tuple[Ints, Ints]]:
    """Return (activities, their calls) that each thread launched, in order."""
    own = np.flatnonzero((recorded.call != UNKNOWN) & ~recorded.lost)
    call = recorded.call[own]
    thread = recorded.thread[call]
    return {number: (own[thread == number], call[thread == number]) for number in np.unique(thread).tolist()}


def _around(recorded: Recorded, launched: Mapping[int, tuple[Ints, Ints]], call: int) -> tuple[int | None, int | None]:
    """Return the last activity that the thread of a call launched before it, and the first after it."""
    thread = int(recorded.thread[call])
    if thread not in launched:
        return None, None
    mine, calls = launched[thread]
    at = int(np.searchsorted(calls, call))
    return int(mine[at - 1]) if at else None, int(mine[at]) if at < len(mine) else None


def _stream_waits(
    recorded: Recorded, queue: Enqueued, by_file: Mapping[int, Named], late_s: Floats
) -> tuple[dict[int, list[int]], int]:
    """Return (activity → activities of other streams that it waits for, how many waits were guessed)."""
    depends: dict[int, list[int]] = defaultdict(list)
    guessed = 0
    launched = _launched(recorded)
    for i in of_kind(recorded, Kind.STREAM_WAIT).tolist():
        said = by_file.get(i)
        if said and said.waiting is not None:
            target = queue.first(said.waiting, i)
            targets = [] if target is None else [target]
        else:
            targets = [k for z in queue.streams if (k := queue.first(z, i)) is not None]
        if not targets:
            continue
        if said and said.event is not None and said.waiting is not None:
            streams = [said.stream] if said.stream is not None else [z for z in queue.streams if z != said.waiting]
            sources = [k for z in streams if (k := queue.last(z, said.event)) is not None]
            sources = [k for k in sources if recorded.done_s[k] <= recorded.begin_s[targets[0]] + SKEW_S]
            depends[targets[0]] += sources
            continue
        guessed += 1
        for k in targets:
            if late_s[k] > LATE_S and (tight := _tight(recorded, queue, i, k)):
                depends[k] += tight
                break
        else:
            k = targets[0] if said and said.waiting is not None else _around(recorded, launched, i)[1]
            if k is not None:
                z = int(recorded.stream[k])
                device = recorded.of_stream[z][0]
                last = (
                    queue.last(other, i)
                    for other in queue.streams
                    if other != z and recorded.of_stream[other][0] == device
                )
                depends[k] += [m for m in last if m is not None and recorded.done_s[m] <= recorded.begin_s[k] + 2 * US]
    return {k: sorted(set(found)) for k, found in depends.items() if found}, guessed


def _tight(recorded: Recorded, queue: Enqueued, call: int, k: int) -> list[int]:
    """Return what ended on other streams just before an activity began."""
    begin_s, found = float(recorded.begin_s[k]), []
    for z in queue.ending(begin_s - AT_ONCE_S, begin_s + 2 * US):
        m = None if z == recorded.stream[k] else queue.ended(z, call, begin_s + 2 * US)
        if m is not None and begin_s - recorded.done_s[m] < AT_ONCE_S:
            found.append(m)
    return found
