"""Recorded work of a part of a trace as columns: the host's calls, and the kernels and copies that they launched.

A mark is a call of no duration on the main thread at the begin of each step, and at the end of the last one. Calls are
in an order in which each comes after all that it can depend on, and activities in the order of their calls.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cs_systems.analysis.attribution.kernel_families import family
from cs_systems.readers.forms.columns import UNKNOWN, Bools, Categorical, Floats, Ints, distinct
from cs_systems.readers.forms.trace import Step, Trace

MARK = "mark"
AUTOGRAD = "autograd::engine::evaluate_function"
_ROUNDS = 8  # attempts to order the calls of threads that launch into one stream


@dataclass(frozen=True)
class Recorded:
    """Calls and activities of consecutive steps; times are in s from the begin of the first.

    Attributes:
        name: name of each call.
        thread: its thread.
        start_s, end_s: its times.
        trace_call: its index in the trace, UNKNOWN for a mark.
        marks: the calls that mark the begins of the steps, and the end of the last.
        until_idle: for each step, whether it lasts until its own work has ended.
        main: the thread of the marks.
        autograd: threads of autograd, as far as the file tells; None if it does not.
        call: the call of each activity; UNKNOWN for one that was launched before the first step and ended in it.
        stream: the number of its stream, over all devices.
        of_stream: device of each stream, and its number there.
        begin_s, done_s: when it began and ended.
        kind: kernel, memcpy or memset.
        label: kernel's name, or direction and kind of memory of a copy.
        node: whether a CUDA graph launched it.
        lost: whether its launch was not recorded; its call is then the one before it on its stream.
        trace_kernel: its index among the trace's kernels, UNKNOWN for a copy.
    """

    name: Categorical[str]
    thread: Ints
    start_s: Floats
    end_s: Floats
    trace_call: Ints
    marks: Ints
    until_idle: tuple[bool, ...]
    main: int
    autograd: frozenset[int] | None
    call: Ints
    stream: Ints
    of_stream: tuple[tuple[int, int], ...]
    begin_s: Floats
    done_s: Floats
    kind: Categorical[str]
    label: Categorical[str]
    node: Bools
    lost: Bools
    trace_kernel: Ints

    @functools.cached_property
    def position(self) -> Ints:
        """Activities in the order in which their streams ran them, one stream after the other."""
        return np.lexsort((self.done_s, self.begin_s, self.stream))

    @functools.cached_property
    def before(self) -> Ints:
        """Previous activity of each activity's stream, UNKNOWN for the first."""
        return previous(self.position, self.stream)

    @functools.cached_property
    def families(self) -> tuple[tuple[str, ...], Ints]:
        """Families of the kernels, and the family of each activity, UNKNOWN for copies."""
        known: dict[str, int] = {}
        codes = [known.setdefault(family(label), len(known)) for label in self.label.values]
        of = np.array(codes, np.int64)[self.label.codes]
        return tuple(known), np.where(self.trace_kernel == UNKNOWN, UNKNOWN, of)


def previous(order: Ints, group: Ints) -> Ints:
    """Return for each item the one before it in its group, UNKNOWN for the first; `order` has the groups in turn."""
    found = np.full(len(order), UNKNOWN)
    same = group[order[1:]] == group[order[:-1]]
    found[order[1:][same]] = order[:-1][same]
    return found


def recorded(trace: Trace, steps: Sequence[Step]) -> Recorded:
    """Return the recorded work of consecutive steps of a trace.

    Calls of a thread that launches nothing, such as one that only asks for events, are left out.
    """
    calls, from_s, to_s = trace.calls, steps[0].start_s, steps[-1].end_s
    first, last = np.searchsorted(calls.start_s, [from_s, to_s], "left").tolist()
    call, begin_s, done_s, device, of_device = (
        np.concatenate([getattr(trace.kernels, name), getattr(trace.copies, name)])
        for name in ("call", "start_s", "end_s", "device", "stream")
    )
    one, stream = distinct(device, of_device)
    unknown = call == UNKNOWN
    # An activity without a recorded launch, before any with one on its stream, was launched before the recording.
    known_s = np.full(len(one), np.inf)
    np.minimum.at(known_s, stream[~unknown], begin_s[~unknown])
    earlier = np.where(unknown, (begin_s < from_s) | (begin_s < known_s[stream]), call < first)
    lost = unknown & ~earlier
    inside = np.where(lost, begin_s < to_s, (call >= first) & (call < last))
    chosen = np.flatnonzero(inside | (earlier & (done_s > from_s) & ((begin_s < to_s) | ~unknown)))

    own = np.unique(np.concatenate([calls.thread[call[inside & ~lost]], [main := _main(trace, steps, first, last)]]))
    wanted = first + np.flatnonzero(np.isin(calls.thread[first:last], own))
    times = np.array([[step.start_s, step.end_s] for step in steps]).ravel()
    at_s, thread = (
        np.concatenate([times, calls.start_s[wanted]]),
        np.concatenate([np.full(len(times), main), calls.thread[wanted]]),
    )
    position = np.full(last - first, UNKNOWN)
    position[wanted - first] = len(times) + np.arange(len(wanted))
    launched = np.full(len(chosen), UNKNOWN)
    has_call = inside[chosen] & ~lost[chosen]
    launched[has_call] = position[call[chosen[has_call]] - first]
    order = _order(at_s, thread, launched, stream[chosen], begin_s[chosen], done_s[chosen])
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    launched[has_call] = rank[launched[has_call]]
    _adopt(launched, lost[chosen], stream[chosen], begin_s[chosen], done_s[chosen])
    sorted_ = np.lexsort((begin_s[chosen], launched))
    chosen, launched = chosen[sorted_], launched[sorted_]

    names = {MARK: 0}
    codes = np.array([names.setdefault(name, len(names)) for name in calls.name.values], np.int64)
    count = len(trace.kernels)
    kinds = Categorical(
        ["kernel", *trace.copies.kind.values], np.concatenate([np.zeros(count, np.int64), 1 + trace.copies.kind.codes])
    )
    labels = dict[str, int]()
    of_function = np.array([labels.setdefault(f.name, len(labels)) for f in trace.kernels.function.values], np.int64)
    of_copy = np.array([labels.setdefault(name, len(labels)) for name in trace.copies.name.values], np.int64)
    label = np.concatenate([of_function[trace.kernels.function.codes], of_copy[trace.copies.name.codes]])
    ends = np.concatenate([times, calls.end_s[wanted]])[order]
    return Recorded(
        name=Categorical(
            list(names), np.concatenate([np.zeros(len(times), np.int64), codes[calls.name.codes[wanted]]])[order]
        ),
        thread=thread[order],
        start_s=at_s[order] - from_s,
        end_s=ends - from_s,
        trace_call=np.concatenate([np.full(len(times), UNKNOWN), wanted])[order],
        marks=rank[: len(times)].reshape(-1, 2),
        until_idle=_until_idle(steps, call, calls.start_s, done_s),
        main=main,
        autograd=_autograd(trace),
        call=launched,
        stream=stream[chosen],
        of_stream=tuple(zip(device[one].tolist(), of_device[one].tolist(), strict=True)),
        begin_s=begin_s[chosen] - from_s,
        done_s=done_s[chosen] - from_s,
        kind=kinds.take(chosen),
        label=Categorical(list(labels), label[chosen]),
        node=np.concatenate([trace.kernels.in_graph, np.zeros(len(trace.copies), bool)])[chosen],
        lost=lost[chosen],
        trace_kernel=np.where(chosen < count, chosen, UNKNOWN),
    )


def _main(trace: Trace, steps: Sequence[Step], first: int, last: int) -> int:
    """Return the thread that runs the steps: of their ranges, else the one with the most calls outside autograd."""
    ranges = trace.ranges
    exact = ranges.thread[(ranges.start_s == steps[0].start_s) & (ranges.name.codes_where(steps[0].name.__eq__))]
    if len(exact):
        return int(exact[0])
    threads, counts = np.unique(trace.calls.thread[first:last], return_counts=True)
    if not len(threads):
        return UNKNOWN
    own = ~np.isin(threads, list(_autograd(trace) or ()))
    return int(threads[np.argmax(np.where(own | ~own.any(), counts, -1))])


def _autograd(trace: Trace) -> frozenset[int] | None:
    if trace.operators is None:
        return None
    return frozenset(
        trace.operators.thread[
            trace.operators.signature.codes_where(lambda one: one.name.startswith(AUTOGRAD))
        ].tolist()
    )


def _until_idle(steps: Sequence[Step], call: Ints, started_s: Floats, done_s: Floats) -> tuple[bool, ...]:
    """Return for each step whether it ends exactly when its last kernel does, as the profile's steps then do."""
    launched = started_s[call[call != UNKNOWN]]
    done_s = done_s[call != UNKNOWN]
    found = []
    for step in steps:
        own = done_s[(launched >= step.start_s) & (launched < step.end_s)]
        found.append(bool(len(own)) and float(own.max()) == step.end_s)
    return tuple(found)


def _order(at_s: Floats, thread: Ints, call: Ints, stream: Ints, begin_s: Floats, done_s: Floats) -> Ints:
    """Return an order of the calls in which each comes after the one before on its thread, and on its stream.

    That is the order of their starts, unless two threads launched into one stream at once: the one that started later
    may have been the first to enter its launch.
    """
    key, by_thread = at_s.copy(), np.lexsort((at_s, thread))
    ran = np.flatnonzero(call != UNKNOWN)
    ran = ran[np.lexsort((done_s[ran], begin_s[ran], stream[ran]))]
    for _ in range(_ROUNDS):
        later = _running(key[call[ran]], stream[ran])
        behind = later > key[call[ran]]
        if not behind.any():
            break
        np.maximum.at(key, call[ran[behind]], np.nextafter(later[behind], np.inf))
        key[by_thread] = _running(key[by_thread], thread[by_thread])
    return np.lexsort((np.arange(len(key)), at_s, key))


def _running(values: Floats, group: Ints) -> Floats:
    """Return the running maximum within each group; the groups come in turn."""
    found = values.copy()
    edges = np.flatnonzero(np.diff(group)) + 1
    for part in np.split(found, edges):
        np.maximum.accumulate(part, out=part)
    return found


def _adopt(call: Ints, lost: Bools, stream: Ints, begin_s: Floats, done_s: Floats) -> None:
    """Give activities without a recorded launch the call of the one before on their stream."""
    if not lost.any():
        return
    order = np.lexsort((done_s, begin_s, stream))
    for k, before in zip(order.tolist(), previous(order, stream)[order].tolist(), strict=True):
        if lost[k]:
            call[k] = 0 if before == UNKNOWN else max(call[before], 0)
