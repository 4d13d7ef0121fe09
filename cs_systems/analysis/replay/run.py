"""Replay of a graph: the earliest time of every call and activity, and the duration of each step by these times."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cs_systems.analysis.replay.graph import NEVER, Costs, Graph, slots
from cs_systems.analysis.replay.recorded import Recorded
from cs_systems.analysis.replay.waits import WaitEdges
from cs_systems.readers.forms.columns import UNKNOWN, Categorical, Floats, Ints


@dataclass(frozen=True)
class Times:
    """When the calls started and ended, and the activities began and ended, in s from the begin of the first step."""

    start_s: Floats
    end_s: Floats
    begin_s: Floats
    done_s: Floats

    @classmethod
    def recorded(cls, r: Recorded) -> Times:
        return cls(r.start_s, r.end_s, r.begin_s, r.done_s)


def replay(graph: Graph, costs: Costs | None = None) -> Times:
    """Return the earliest times, with the recorded durations and delays or others."""
    costs = costs or graph.costs
    calls, count = len(graph.previous), len(graph.before)
    start, end, begin, done = [0.0] * calls, [0.0] * calls, [0.0] * count, [0.0] * count
    previous, over, before = graph.previous.tolist(), graph.over.tolist(), graph.before.tolist()
    segment, work, back = costs.segment.tolist(), costs.work.tolist(), costs.back.tolist()
    slot = graph.slot.tolist() if costs.blocks else [UNKNOWN] * calls
    lead, gap, duration, link = costs.lead.tolist(), costs.gap.tolist(), costs.duration.tolist(), costs.link
    first = graph.first.tolist()
    awaited = {i: found for i, found in graph.waits.awaited.items() if costs.waits[i]}
    depends, fixed, until = graph.waits.depends, graph.fixed.tolist(), costs.until.tolist()
    fixes, decided = {*np.flatnonzero(~np.isnan(graph.fixed)).tolist()}, bool((costs.until > NEVER).any())
    inside = {*np.flatnonzero(graph.waits.inside).tolist()}
    lost = {*np.flatnonzero(graph.recorded.lost).tolist()}
    for k in range(first[0]):
        begin[k] = fixed[k]
        done[k] = fixed[k] + duration[k]
    at = start[0]
    for i in range(calls):
        at = end[previous[i]] if previous[i] >= 0 else 0.0
        if over[i] >= 0 and end[over[i]] > at:
            at = end[over[i]]
        start[i] = at = at + segment[i]
        ends = at + work[i]
        if slot[i] >= 0 and done[slot[i]] > ends:
            ends = done[slot[i]]
        for k in range(first[i], first[i + 1]):
            released = (at if k in inside else NEVER if k in lost else ends) + lead[k]
            if before[k] >= 0 and done[before[k]] + gap[k] > released:
                released = done[before[k]] + gap[k]
            if k in depends:
                released = max(released, max(done[m] for m in depends[k]) + link)
            if k in fixes:
                released = max(released, fixed[k])
            begin[k] = released
            done[k] = released + duration[k]
            if decided and until[k] > done[k]:
                done[k] = until[k]
        if i in awaited:
            ends = max(ends, max(done[k] for k in awaited[i]) + back[i])
        end[i] = ends
    return Times(np.array(start), np.array(end), np.array(begin), np.array(done))


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

    What is in flight at the begin of the second time is what the first time left behind.
    """
    r, calls, count = graph.recorded, len(graph.previous), len(graph.before)
    early = int(graph.first[0])  # activities in flight at the begin
    own = count - early
    last_of_stream = np.full(len(r.of_stream), UNKNOWN)
    last_of_stream[r.stream[r.position]] = r.position  # the last assignment of a stream counts

    def activity(k: Ints) -> Ints:
        """Return the second time's number of activities."""
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
        graph.launch,
        graph.gap,
        graph.back,
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
