"""Replay of a graph: the earliest time of every call and activity, and the duration of each step by these times."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cs_systems.analysis.replay.graph import NEVER, Costs, Graph, slots
from cs_systems.analysis.replay.recorded import Recorded
from cs_systems.analysis.replay.waits import WaitEdges
from cs_systems.readers.forms.columns import UNKNOWN, Bools, Categorical, Floats, Ints

SHORT = 24  # calls that take longer as a stretch than one by one
CHUNK = 256  # calls of a stretch at once; fewer than any launch queue holds


@dataclass(frozen=True)
class Times:
    """When the calls started and ended, and the activities began and ended, in s from the start of the first step."""

    start_s: Floats
    end_s: Floats
    begin_s: Floats
    done_s: Floats

    @classmethod
    def recorded(cls, r: Recorded) -> Times:
        return cls(r.start_s, r.end_s, r.begin_s, r.done_s)


def replay(graph: Graph, costs: Costs | None = None) -> Times:
    """Return the earliest times, with the recorded durations and delays or others.

    Stretches of calls of one thread without waits are computed as running maxima of sums, in which each sum is a path
    through the graph; the others call by call.
    """
    costs = costs or graph.costs
    run = _Run(graph, costs)
    alone, begins = _alone(graph, costs), _begins(graph)
    begins |= alone
    begins[np.flatnonzero(alone) + 1] |= True
    edges = np.flatnonzero(begins).tolist()
    scalar = alone[edges].tolist()
    for at, until, is_alone in zip(edges, [*edges[1:], len(graph.previous)], scalar, strict=True):
        if is_alone or until - at < SHORT:
            run.calls(at, until)
        else:
            run.stretch(at, until)
    return Times(run.start, run.end, run.begin, run.done)


def _begins(graph: Graph) -> Bools:
    """Return for each call whether it does not simply follow the call before it; one more entry for the end."""
    found = np.ones(len(graph.previous) + 1, bool)
    found[1:-1] = (graph.previous != np.arange(len(graph.previous)) - 1)[1:] | (graph.over != UNKNOWN)[1:]
    return found


def _alone(graph: Graph, costs: Costs) -> Bools:
    """Return for each call whether it or its activity waits; a False is added for the end of the calls."""
    found = np.zeros(len(graph.previous) + 1, bool)
    waiting = np.array(list(graph.waits.awaited), np.int64)
    found[waiting[costs.waits[waiting]]] = True
    call, regular = graph.recorded.call, ~(graph.waits.inside | graph.recorded.lost) & np.isnan(graph.fixed)
    regular[list(graph.waits.depends)] = False
    regular &= (costs.until == NEVER) & graph.in_order
    found[call[~regular & (call != UNKNOWN)]] = True
    return found


class _Run:
    """Times of one replay; stretches are written as arrays, single calls through views of the same memory."""

    def __init__(self, graph: Graph, costs: Costs) -> None:
        self.graph, self.costs = graph, costs
        self.start, self.end = np.zeros(len(graph.previous)), np.zeros(len(graph.previous))
        self.begin, self.done = np.zeros(len(graph.before)), np.zeros(len(graph.before))
        early = int(graph.first[0])
        self.begin[:early] = graph.fixed[:early]
        self.done[:early] = self.begin[:early] + costs.duration[:early]
        self.slot = graph.slot if costs.blocks else np.full(len(graph.slot), UNKNOWN)
        self.views: tuple[Any, ...] = tuple(
            column.data  # an index of it is a Python number
            for column in (
                *(self.start, self.end, self.begin, self.done),
                *(graph.previous, graph.over, graph.before, graph.first, self.slot, graph.fixed),
                *(costs.segment, costs.work, costs.back, costs.lead, costs.gap, costs.duration, costs.until),
                *(costs.waits, graph.waits.inside, graph.recorded.lost),
            )
        )

    def calls(self, at: int, until: int) -> None:
        """Compute the times of some calls and of what they launch, one after the other."""
        start, end, begin, done, *views = self.views
        previous, over, before, first, slot, fixed, *views = views
        segment, work, back, lead, gap, duration, decided, waits, inside, lost = views
        awaited, depends, link = self.graph.waits.awaited, self.graph.waits.depends, self.costs.link
        for i in range(at, until):
            now = end[previous[i]] if previous[i] >= 0 else 0.0
            if over[i] >= 0 and end[over[i]] > now:
                now = end[over[i]]
            start[i] = now = now + segment[i]
            ends = now + work[i]
            if slot[i] >= 0 and done[slot[i]] > ends:
                ends = done[slot[i]]
            for k in range(first[i], first[i + 1]):
                released = (now if inside[k] else NEVER if lost[k] else ends) + lead[k]
                if before[k] >= 0 and done[before[k]] + gap[k] > released:
                    released = done[before[k]] + gap[k]
                if k in depends:
                    released = max(released, max(done[m] for m in depends[k]) + link)
                if fixed[k] > released:  # never for NaN
                    released = fixed[k]
                begin[k] = released
                done[k] = max(released + duration[k], decided[k])
            if waits[i] and i in awaited:
                ends = max(ends, max(done[k] for k in awaited[i]) + back[i])
            end[i] = ends

    def stretch(self, at: int, until: int) -> None:
        """Compute the times of calls that follow one another, with activities that follow their streams."""
        graph, costs = self.graph, self.costs
        previous, over = int(graph.previous[at]), int(graph.over[at])
        now = max(self.end[previous] if previous >= 0 else 0.0, self.end[over] if over >= 0 else NEVER)
        for a in range(at, until, CHUNK):
            b = min(a + CHUNK, until)
            k, m = graph.first[[a, b]].tolist()
            slot = self.slot[a:b]
            if (slot >= k).any():  # room in the queue depends on these very launches
                self.calls(a, b)
                now = self.end[b - 1]
                continue
            path = np.cumsum(costs.segment[a:b] + costs.work[a:b])
            room = np.where(slot == UNKNOWN, NEVER, self.done[slot]) if m else NEVER
            self.end[a:b] = path + np.maximum.accumulate(np.maximum(room - path, now))
            self.start[a:b] = np.append(now, self.end[a : b - 1]) + costs.segment[a:b]
            now = self.end[b - 1]
            stream = graph.recorded.stream[k:m]
            for own in (k + np.flatnonzero(stream == z) for z in np.unique(stream).tolist()):
                lasts = costs.duration[own]
                path = np.cumsum(costs.gap[own] + lasts)
                before = int(graph.before[own[0]])
                free = self.done[before] if before >= 0 else NEVER
                released = self.end[graph.recorded.call[own]] + costs.lead[own] + lasts
                self.done[own] = path + np.maximum.accumulate(np.maximum(released - path, free))
                self.begin[own] = self.done[own] - lasts


def step_times(graph: Graph, times: Times) -> Floats:
    """Return (time on the host, time on the GPU) of each step, as rows.

    On the GPU a step lasts from its begin, or the end of the work of earlier steps if that is later, to the end of its
    work. A loop of such steps takes the longer of both for a step.
    """
    done = np.maximum.accumulate(np.append(NEVER, times.done_s))  # of the activities before each
    found = []
    for begins, ends in graph.recorded.marks.tolist():
        begin_s, end_s = times.start_s[begins], times.end_s[ends]
        earlier, all_done = done[graph.first[begins]], done[graph.first[ends]]
        found.append((end_s - begin_s, all_done - max(earlier, begin_s)))
    return np.array(found)


def total(steps: Floats) -> float:
    """Return the duration of steps together, from `step_times`: of the host or of the GPU, whichever takes longer."""
    return float(steps.sum(axis=0).max())


def repeated(graph: Graph) -> Graph:
    """Return the graph of the same steps twice in a row, as a loop repeats them.

    Activities in flight at the start of the second copy are those that the first copy leaves unfinished.
    """
    r, calls, count = graph.recorded, len(graph.previous), len(graph.before)
    early = int(graph.first[0])  # activities in flight at the start
    own = count - early
    last_of_stream = np.full(len(r.of_stream), UNKNOWN)
    last_of_stream[r.stream[r.position]] = r.position  # the last assignment of a stream counts

    def activity(k: Ints) -> Ints:
        """Return the activities' numbers in the second copy."""
        of_first = np.where(k >= early, k + own, last_of_stream[r.stream[np.maximum(k, 0)]] if count else k)
        return np.where(k == UNKNOWN, UNKNOWN, of_first)

    last_of_thread = {t: int(np.flatnonzero(r.thread == t)[-1]) for t in np.unique(r.thread).tolist()}
    again = np.where(graph.previous == UNKNOWN, UNKNOWN, graph.previous + calls)
    again[0] = last_of_thread[r.main]
    before = activity(graph.before)[early:]
    alone = (before == UNKNOWN) & graph.launched[early:]
    before[alone] = last_of_stream[r.stream[early:][alone]]
    depends = {k + own: activity(np.array(found)).tolist() for k, found in graph.waits.depends.items() if k >= early}
    awaited = {i + calls: activity(np.array(found)).tolist() for i, found in graph.waits.awaited.items()}

    def both(column: NDArray[Any]) -> NDArray[Any]:
        return np.concatenate([column, column[early:]])

    def texts(column: Categorical[str]) -> Categorical[str]:
        return Categorical(column.values, both(column.codes))

    tiled: dict[str, Any] = {
        name: np.tile(getattr(r, name), 2) for name in ("thread", "start_s", "end_s", "trace_call")
    }
    own_columns = ("stream", "begin_s", "done_s", "node", "lost", "trace_kernel")
    columns: dict[str, Any] = {name: both(getattr(r, name)) for name in own_columns}
    twice = replace(
        r,
        name=Categorical(r.name.values, np.tile(r.name.codes, 2)),
        marks=np.concatenate([r.marks, r.marks + calls]),
        until_idle=r.until_idle * 2,
        call=np.concatenate([r.call, r.call[early:] + calls]),
        kind=texts(r.kind),
        label=texts(r.label),
        **tiled,
        **columns,
    )
    order = np.concatenate([r.position, r.position[r.position >= early] + own])
    order = order[np.argsort(twice.stream[order], kind="stable")]
    waits = WaitEdges(
        graph.waits.awaited | awaited, graph.waits.depends | depends, both(graph.waits.inside), graph.waits.guessed
    )
    return Graph(
        twice,
        np.concatenate([graph.previous, again]),
        np.concatenate([graph.over, np.where(graph.over == UNKNOWN, UNKNOWN, graph.over + calls)]),
        np.concatenate([graph.before, before]),
        np.concatenate([graph.first, graph.first[1:] + own]),
        waits,
        graph.queue,
        slots(twice, order, graph.queue),
        np.concatenate([graph.fixed, np.full(own, np.nan)]),
        twice_costs(graph, graph.costs),
        graph.constants,
        graph.unexplained_s,
    )


def twice_costs(graph: Graph, costs: Costs) -> Costs:
    """Return the costs of `repeated(graph)`."""
    early = int(graph.first[0])
    of_call: dict[str, Any] = {name: np.tile(getattr(costs, name), 2) for name in ("segment", "work", "waits", "back")}
    own: dict[str, Any] = {
        name: np.concatenate([column := getattr(costs, name), column[early:]])
        for name in ("lead", "gap", "duration", "until")
    }
    return replace(costs, **of_call, **own)
