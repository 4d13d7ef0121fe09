"""Dependency graph of recorded steps: what each call and each activity of the GPU waits for, and how long it lasts.

Only recorded work has a duration: host segments between calls, the calls' own work, kernels and copies. Waits are
derived, with three constants of a trace:

    a call starts      when the one before on its thread has ended, or the thread that handed over to it, + its segment
    a call ends        at its start + its work, but not before what it waits for has ended + `return_s`
    an activity starts when its call has ended + `launch_s`, the one before on its stream + `gap_s`, and what its stream
                       waits for + `gap_s`

Recorded times stay where the trace holds no cause: the gaps between the nodes of a CUDA graph, activities whose launch
was not recorded, and those in flight when the first step begins. What no edge explains is counted: `unexplained_s`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from cs_systems.analysis.replay.recorded import Recorded, previous
from cs_systems.analysis.replay.waits import LATE_S, SYNCS, US, WaitEdges, of_kind, waits_of
from cs_systems.readers._stalls import Kind
from cs_systems.readers.forms.columns import UNKNOWN, Bools, Floats, Ints
from cs_systems.readers.forms.trace import Trace

QUEUE = 1020  # activities that one stream's launch queue holds
LEAST_QUEUE, NEAR_FULL = 500, 0.95
FEW = 3  # cases that a median needs
TOLERANCE_S = 10 * US  # tolerance of an activity's start; anything later by more is unexplained
CALL_TOLERANCE_S = 50 * US  # tolerance of a call's end
NEAR_S = 20 * US  # longest gap between two activities of a stream that were both queued
LEAST_BURST = 3  # calls of a thread in a row, if it takes turns with the main thread
# a thread with a larger share of calls that overlap the main thread's does not take turns with it
OVERLAPS = 0.05
USUAL_WAIT_S = 3 * US  # own work assumed for a call that waits, if no call of its name ran without waiting
LONG = 3.0  # times the usual duration of a launch: it was blocked
NEVER = -np.inf


class Constant(NamedTuple):
    """Delay of one kind: the median over a trace, and the quartiles."""

    value: float
    low: float
    high: float


class Constants(NamedTuple):
    """Delays of a trace: launch to start, between the activities of a stream, return from a wait."""

    launch: Constant
    gap: Constant
    back: Constant


# constants of a trace with few cases
USUAL = Constants(*(Constant(delay, delay, delay) for delay in (0.0, 1 * US, 5 * US)))


@dataclass(frozen=True)
class Costs:
    """Durations of a graph's nodes and delays of its edges, in s: what a change scales.

    Attributes:
        segment: host time before each call.
        work: each call's own host time.
        waits: whether a call waits for its awaited activities.
        blocks: whether a full launch queue blocks a call.
        lead: from a call's end to its activity; from the call's start if the activity runs inside the call.
        gap: from the end of the previous activity on the stream.
        link: from the end of an activity on another stream.
        duration: each activity's own.
        until: earliest end of each activity as set from outside, such as by the other ranks of a collective; -inf if
            not set.
        back: from the end of an activity to the end of each call, if it waits for it.
    """

    segment: Floats
    work: Floats
    waits: Bools
    blocks: bool
    lead: Floats
    gap: Floats
    link: float
    duration: Floats
    until: Floats
    back: Floats


@dataclass(frozen=True)
class Graph:
    """Edges of recorded steps; -1 is none.

    Attributes:
        recorded: the calls and activities.
        previous: the call before each on its thread.
        over: the call of another thread after which each call could start.
        before: the previous activity on its stream, for each activity.
        first: for each call, the index of its first activity; its activities end at the next call's first.
        waits: what calls and activities wait for.
        queue: how many activities the launch queue of a stream holds.
        slot: the activity that must have ended before a call finds room in the launch queue.
        fixed: start of each activity that is a boundary condition; NaN of others.
        costs: the recorded durations and delays.
        constants: usual delays of this trace.
        unexplained_s: delays that no edge explains, in sum.
    """

    recorded: Recorded
    previous: Ints
    over: Ints
    before: Ints
    first: Ints
    waits: WaitEdges
    queue: int
    slot: Ints
    fixed: Floats
    costs: Costs
    constants: Constants
    unexplained_s: float

    @cached_property
    def in_order(self) -> Bools:
        """Mask of the activities that follow the activity launched just before them on the same stream."""
        order = np.argsort(self.recorded.stream, kind="stable")
        return np.asarray(self.before == previous(order, self.recorded.stream))

    @property
    def launched(self) -> Bools:
        """Mask of the activities that a call of the graph launched."""
        return np.asarray(self.recorded.call != UNKNOWN)


def graph(trace: Trace, recorded: Recorded, usual: Constants = USUAL) -> Graph:
    """Return the graph of recorded steps; `usual` are the constants where there are too few cases."""
    r, calls, count = recorded, len(recorded.start_s), len(recorded.begin_s)
    by_thread = np.lexsort((np.arange(calls), r.thread))
    before_call, over = previous(by_thread, r.thread), _handovers(r)
    fork = (before_call == UNKNOWN) & (np.arange(calls) > 0)
    before_call[fork] = 0  # a thread's first call begins at a recorded time of the first step
    before = befores(r)
    started, returned = r.start_s[r.call], r.end_s[r.call]
    free = np.where(before == UNKNOWN, NEVER, r.done_s[before])
    launched = r.call != UNKNOWN
    same = (before != UNKNOWN) & (r.call[before] == r.call)
    node = r.node & same & launched
    kept = node | r.lost  # the recorded gap stays
    plain = launched & ~kept

    idle = plain & (free < started)
    # At first by the quickest, as the others may wait for another stream.
    latency = r.begin_s - returned
    kernels = r.kind.codes_where("kernel".__eq__)
    launch = Constant(*[_constant(latency[idle & kernels], usual.launch).low] * 3)
    gaps = r.begin_s - free
    queued = plain & (returned + max(launch.value, 0.0) + TOLERANCE_S < free)
    gap = _constant(gaps[queued & (np.abs(gaps) < NEAR_S)], usual.gap)
    explained = np.maximum(np.where(plain, returned + launch.value, NEVER), free + gap.value)
    waits = waits_of(trace, r, np.where(plain, r.begin_s - explained, 0.0))

    linked = free.copy()
    for k, sources in waits.depends.items():
        linked[k] = max(linked[k], float(r.done_s[sources].max()))
    idle &= linked < started
    launch = _constant(latency[idle & kernels], usual.launch)
    gap = _constant(gaps[queued & (linked == free) & (np.abs(gaps) < NEAR_S)], usual.gap)
    inside = waits.inside
    lead = np.where(inside, r.begin_s - started, launch.value)
    behind = inside & (r.begin_s < linked + gap.value + LATE_S)  # waited for the stream: its own lead is unknown
    lead[behind] = np.minimum(lead[behind], TOLERANCE_S)
    overlaps = queued & (gaps < min(gap.value, 0.0))
    of_gap = np.where((kept | overlaps) & np.isfinite(gaps), gaps, gap.value)
    release = np.where(inside, started, returned) + lead
    bound = np.maximum(np.where(plain, release, NEVER), linked + gap.value)

    fixed = np.where(launched, np.nan, r.begin_s)
    # The first activity of a stream may wait for work launched before the first step.
    boundary = plain & (before == UNKNOWN) & (r.begin_s > bound + CALL_TOLERANCE_S)
    fixed[boundary | (r.lost & (before == UNKNOWN))] = r.begin_s[boundary | (r.lost & (before == UNKNOWN))]
    late = np.where(plain & ~boundary, r.begin_s - bound, 0.0)
    unexplained_s = float(np.clip(late - TOLERANCE_S, 0.0, None).sum())

    work, returns, back, lost_s = _work(r, waits, usual)
    queue, work = _queue(r, waits, work)
    base = np.where(before_call == UNKNOWN, NEVER, r.end_s[before_call])
    base = np.maximum(base, np.where(over == UNKNOWN, NEVER, r.end_s[over]))
    base[0] = r.start_s[0]
    costs = Costs(
        segment=r.start_s - base,
        work=work,
        waits=np.ones(calls, bool),
        blocks=True,
        lead=lead,
        gap=of_gap,
        link=gap.value,
        duration=r.done_s - r.begin_s,
        until=np.full(count, NEVER),
        back=returns,
    )
    first = np.searchsorted(r.call, np.arange(calls + 1))
    return Graph(
        r,
        before_call,
        over,
        before,
        first,
        waits,
        queue,
        slots(r, r.position, queue),
        fixed,
        costs,
        Constants(launch, gap, back),
        unexplained_s + lost_s,
    )


def _constant(cases: Floats, usual: Constant) -> Constant:
    if len(cases) < FEW:
        return usual
    low, value, high = np.quantile(cases, [0.25, 0.5, 0.75]).tolist()
    return Constant(value, low, high)


def _handovers(r: Recorded) -> Ints:
    """Return for each call the call of another thread that handed over to it.

    The main thread and autograd's take turns: calls of one inside a gap of the other wait for it, and it for them.
    A thread that works at the same time as the main thread does not take turns.
    """
    over = np.full(len(r.start_s), UNKNOWN)
    for number in np.unique(r.thread[r.thread != r.main]).tolist():
        pair = np.flatnonzero((r.thread == r.main) | (r.thread == number))
        pair = pair[np.lexsort((pair, r.start_s[pair]))]
        pair = pair[r.name.codes[pair] != 0]
        if r.autograd and number not in r.autograd:
            continue
        if not r.autograd:
            other = r.thread[pair] == number
            reached = np.maximum.accumulate(np.where(other, NEVER, r.end_s[pair]))
            mains = np.where(other, np.inf, r.start_s[pair])
            coming = np.append(np.minimum.accumulate(mains[::-1])[::-1], np.inf)[1:]
            overlaps = other & ((reached > r.start_s[pair] + US) | (coming < r.end_s[pair] - US))
            bursts = int((other[1:] & ~other[:-1]).sum())
            if overlaps.sum() > OVERLAPS * other.sum() or bursts * LEAST_BURST > other.sum():
                continue
        a, b = pair[:-1], pair[1:]
        turns = (r.thread[a] != r.thread[b]) & (r.start_s[b] >= r.end_s[a] - US)
        a, b = a[turns], b[turns]
        newer = (over[b] == UNKNOWN) | (r.end_s[a] > r.end_s[over[b]])
        over[b[newer]] = a[newer]
    return over


def befores(r: Recorded) -> Ints:
    """Return the activity before each: of a graph's first node on a further stream, the node that ended before it."""
    before = r.before.copy()
    head = np.append(True, np.diff(r.call) != 0)[: len(r.call)]
    apart = r.node & ~head & (r.call != UNKNOWN) & ((before == UNKNOWN) | (r.call[before] != r.call))
    for k in np.flatnonzero(apart).tolist():
        nodes = np.arange(np.searchsorted(r.call, r.call[k]), k)
        ended = nodes[r.done_s[nodes] <= r.begin_s[k] + US]
        if len(ended):
            before[k] = ended[np.argmax(r.done_s[ended])]
    return before


def _work(r: Recorded, waits: WaitEdges, usual: Constants) -> tuple[Floats, Floats, Constant, float]:
    """Return (own work of each call, its return from a wait, the constant, delays of calls that nothing explains).

    A call that waited gets the usual work of calls of its name that did not wait. After a copy that it waited for, the
    host may copy on, and after a wait for memory it may map pages: the return of these is as recorded.
    """
    lasted = r.end_s - r.start_s
    awaited = np.array(list(waits.awaited), np.int64)
    ended = np.array([float(r.done_s[found].max()) for found in waits.awaited.values()])
    first = np.array([found[0] for found in waits.awaited.values()], np.int64)
    copies = waits.inside[first] & (r.call[first] == awaited)  # another call may wait for the same copy later
    works_on = copies | np.isin(awaited, of_kind(r, Kind.ALLOCATION))
    is_mark = r.name.codes[awaited] == 0
    # A call may still have waited for a moment if its activity had ended just before.
    waited = (copies | (ended > r.start_s[awaited] - TOLERANCE_S)) & ~is_mark
    tail = r.end_s[awaited] - ended
    back = _constant(tail[waited & ~works_on & (ended > r.start_s[awaited] + 5 * US)], usual.back)
    returns = np.where(r.name.codes == 0, 0.0, back.value)
    returns[awaited[works_on]] = tail[works_on]
    work, held, free = lasted.copy(), awaited[waited], np.ones(len(lasted), bool)
    free[held] = False
    by_name = np.argsort(r.name.codes[free], kind="stable")
    named, unheld = r.name.codes[free][by_name], lasted[free][by_name]
    for name in np.unique(r.name.codes[held]).tolist():
        alike = unheld[slice(*np.searchsorted(named, [name, name + 1]))]
        own = float(np.median(alike)) if len(alike) else USUAL_WAIT_S
        mine = held[r.name.codes[held] == name]
        work[mine] = np.minimum(lasted[mine], own)
    # A wait that returned long after its activity had ended, or that waited for nothing known.
    bound = np.maximum(r.start_s[held] + work[held], ended[waited] + returns[held])
    lost = float(np.clip(r.end_s[held] - bound - CALL_TOLERANCE_S, 0.0, None).sum())
    syncs = of_kind(r, *SYNCS)
    syncs = syncs[free[syncs]]
    lost += float(np.clip(lasted[syncs] - CALL_TOLERANCE_S, 0.0, None).sum())
    return work, returns, back, lost


def _queue(r: Recorded, waits: WaitEdges, work: Floats) -> tuple[int, Floats]:
    """Return (how many activities the launch queue of a stream holds, the calls' own work).

    The queue is as long as the trace shows where its launches are blocked, and else at least as long as it was filled.
    """
    order, stream = r.position, r.stream[r.position]
    own = (r.call[order] != UNKNOWN) & ~r.node[order] & ~r.lost[order]
    call, depth = np.maximum(r.call[order], 0), np.zeros(len(order), np.int64)
    for z in np.unique(stream).tolist():
        a, b = np.searchsorted(stream, [z, z + 1]).tolist()
        ends = np.maximum.accumulate(r.done_s[order[a:b]])
        depth[a:b] = np.arange(b - a) - np.searchsorted(ends, r.start_s[call[a:b]], "right")
    deepest = int(depth[own].max(initial=0))
    queue = max(QUEUE, deepest + 1)
    if deepest >= LEAST_QUEUE:
        lasted = (r.end_s - r.start_s)[call]
        shallow = lasted[own & (depth < LEAST_QUEUE / 2)]
        usual = float(np.median(shallow)) if len(shallow) >= FEW else float(np.quantile(lasted[own], 0.1))
        full = int(np.median(depth[own & (depth > 0.9 * deepest)]))
        at_limit = own & (depth >= NEAR_FULL * full)
        slow = at_limit & (lasted > LONG * usual)
        if slow.sum() >= 0.3 * at_limit.sum():
            queue, work = full, work.copy()
            held = call[at_limit]
            held = held[~np.isin(held, list(waits.awaited))]
            work[held] = np.minimum(work[held], usual)
    return queue, work


def slots(r: Recorded, order: Ints, queue: int) -> Ints:
    """Return the activity that must have ended before each call finds room in its stream's launch queue.

    order: the activities of each stream in turn, as it runs them.
    """
    slot, stream = np.full(len(r.start_s), UNKNOWN), r.stream[order]
    room = np.arange(len(order)) - queue
    own = (r.call[order] != UNKNOWN) & ~r.node[order] & ~r.lost[order] & (room >= np.searchsorted(stream, stream))
    slot[r.call[order[own]]] = order[room[own]]
    return slot


def with_quartiles(graph: Graph) -> list[Costs]:
    """Return the costs with unrecorded delays set to the constants' first and third quartiles."""
    costs, (launch, gap, back) = graph.costs, graph.constants
    return [
        replace(
            costs,
            lead=np.where(graph.waits.inside, costs.lead, launch[n]),
            gap=np.where(costs.gap == gap.value, gap[n], costs.gap),
            link=gap[n],
            back=np.where(costs.back == back.value, back[n], costs.back),
        )
        for n in (1, 2)
    ]
