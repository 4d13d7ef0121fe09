"""Times of a replay, by the rules of the graph written plainly, and the same steps twice in a row."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cs_systems.analysis.replay import replayed
from cs_systems.analysis.replay.graph import NEVER, Costs, Graph
from cs_systems.analysis.replay.recorded import previous
from cs_systems.analysis.replay.run import Times, repeated, replay, twice_costs
from cs_systems.analysis.replay.waits import US, WaitEdges
from cs_systems.readers.forms.columns import UNKNOWN
from tests.analysis.replay import simulated as s
from tests.analysis.replay.simulated import AUTOGRAD, MS, Copied, Host, Launch, Record, Run, Sync, Wait, simulated

LAUNCHES = tuple(Launch(10 * US, (7, 20)[n % 3 == 1]) for n in range(40))
BACKWARD = Run(AUTOGRAD, (Host(15 * US), *LAUNCHES, Record("half", 7), Wait(21, "half"), Launch(30 * US, 21)))
LINKED = (Record("done", 21), Wait(7, "done"), Launch(20 * US), Copied(30 * US, 7, "DtoH pageable"))
ALL = (Host(40 * US), *LAUNCHES, BACKWARD, *LINKED, s.Graph((5 * US,) * 4), Host(1 * MS), Sync(), *LAUNCHES[:7])
GRAPHS = (s.Graph((1 * US,) * 300), Host(1 * MS)) * 4
MANY = (*GRAPHS, *LAUNCHES * 7, Host(2 * MS))
BESIDE = [one for _ in range(100) for one in (Host(9 * US), Launch(2 * US, 21, "softmax", 6 * US))]


def by_the_rules(graph: Graph, costs: Costs) -> Times:
    """Return the times call by call, in the words of `graph.py`."""
    start, end = np.zeros(len(graph.previous)), np.zeros(len(graph.previous))
    begin, done = np.zeros(len(graph.before)), np.zeros(len(graph.before))
    r, waits = graph.recorded, graph.waits

    def run(k: int, causes: Sequence[float]) -> None:
        own = [graph.fixed[k]] if np.isfinite(graph.fixed[k]) else []
        stream = [done[graph.before[k]] + costs.gap[k]] if graph.before[k] != UNKNOWN else []
        linked = [done[m] + costs.link for m in waits.depends.get(k, ())]
        begin[k] = max([*causes, *own, *stream, *linked])
        done[k] = max(begin[k] + costs.duration[k], costs.until[k])

    for k in np.flatnonzero(r.call == UNKNOWN).tolist():
        begin[k] = graph.fixed[k]
        done[k] = begin[k] + costs.duration[k]
    of_call = defaultdict[int, list[int]](list)
    for k, i in enumerate(r.call.tolist()):
        of_call[i].append(k)
    for i in range(len(graph.previous)):
        ready = [end[other[i]] for other in (graph.previous, graph.over) if other[i] != UNKNOWN]
        start[i] = max(ready, default=0.0) + costs.segment[i]
        has_room = [done[graph.slot[i]]] if costs.blocks and graph.slot[i] != UNKNOWN else []
        submitted = max([start[i] + costs.work[i], *has_room])
        for k in of_call[i]:
            own = [] if r.lost[k] else [(start[i] if waits.inside[k] else submitted) + costs.lead[k]]
            run(k, own)
        waited = [done[k] + costs.back[i] for k in waits.awaited.get(i, ())] if costs.waits[i] else []
        end[i] = max([submitted, *waited])
    return Times(start, end, begin, done)


def assert_equal(found: Times, expected: Times) -> None:
    for field in fields(Times):
        assert getattr(found, field.name) == pytest.approx(getattr(expected, field.name), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("step", "beside"),
    [(ALL, ()), (MANY, ()), (LAUNCHES, BESIDE), (LAUNCHES * 7, ())],
    ids=["all", "many", "2", "ahead"],
)
def test_replay_gives_the_recorded_times(step: Sequence[object], beside: Sequence[object]) -> None:
    trace, steps, _ = simulated(step, 2, beside=beside)
    (part,) = replayed(trace, steps).parts
    assert_equal(part.times, Times.recorded(part.graph.recorded))
    assert_equal(by_the_rules(part.graph, part.graph.costs), part.times)


def drawn(seed: int, count: int = 700) -> tuple[Graph, Costs]:
    """Return a random graph of calls of three threads on three streams; a few calls and kernels wait."""
    rng = np.random.default_rng(seed)
    first = np.append(0, np.cumsum(rng.choice([0, 1, 1, 1, 3], count)))
    first[:2] = 4  # four activities in flight at the start, and a mark
    first = np.maximum.accumulate(first)
    ran = int(first[-1])
    call = np.append([UNKNOWN] * 4, np.repeat(np.arange(count), np.diff(first)))
    thread = np.repeat(rng.integers(0, 3, 1 + count // 60), 60)[:count]
    stream = np.where(rng.random(ran) < 0.1, 0, np.repeat(rng.integers(0, 3, 1 + ran // 50), 50)[:ran])
    before_call = previous(np.lexsort((np.arange(count), thread)), thread)
    few = [rng.random(size) < 0.004 for size in (count, ran, ran, ran, count)]
    early = np.flatnonzero(first[:-1] > 20)
    earlier = np.array([rng.integers(0, max(n, 1)) for n in range(max(count, ran))])
    before_call[1:][before_call[1:] == UNKNOWN] = 0
    over = np.where(np.append(False, np.diff(thread) != 0) | few[0], earlier[:count], UNKNOWN)
    over[0] = UNKNOWN
    late = np.flatnonzero(few[1] & (call > 1))
    slot = np.full(count, UNKNOWN)
    chosen = early[rng.random(len(early)) < 0.2]
    slot[chosen] = np.maximum(first[chosen] - rng.integers(1, 300, len(chosen)), 0)
    fixed = np.full(ran, np.nan)
    fixed[:4] = [0.0, 0.0, 5.0, 3.0]
    fixed[few[2] & (call > 1)] = rng.uniform(0, count)
    waits = WaitEdges(
        {int(i): sorted({int(first[i] - 1), int(earlier[first[i] - 1])}) for i in early if few[4][i]},
        {int(k): sorted({int(k - 1), int(earlier[k])}) for k in late},
        (rng.random(ran) < 0.004) & (call > 1),
        0,
    )
    r: Any = SimpleNamespace(call=call, stream=stream, lost=(rng.random(ran) < 0.004) & (call > 1))
    stream[:4] = [0, 1, 2, 2]
    before = previous(np.lexsort((np.arange(ran), stream)), stream)
    r.lost &= before != UNKNOWN
    costs = Costs(
        rng.uniform(-0.2, 1, count), rng.uniform(0, 1, count), rng.random(count) < 0.8, seed % 2 == 0,
        rng.uniform(0, 2, ran), rng.uniform(0, 0.2, ran), 0.3, rng.uniform(0, 1.5, ran),
        np.where(few[3], rng.uniform(0, 2 * count, ran), NEVER), rng.uniform(0, 1, count),
    )  # fmt: skip
    costs.duration[0] = 60  # until then, calls wait for room in the queue
    return Graph(r, before_call, over, before, first, waits, 300, slot, fixed, costs, None, 0.0), costs  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(6))
def test_replay_of_random_graphs_follows_the_rules(seed: int) -> None:
    graph, costs = drawn(seed)
    assert_equal(replay(graph, costs), by_the_rules(graph, costs))


def test_single_kernel_among_many_calls_ends_no_earlier_than_is_set() -> None:
    records = tuple(Record("a", 7) for _ in range(40))
    trace, steps, _ = simulated((*records, Launch(10 * US), *records), 2)
    graph = replayed(trace, steps).parts[0].graph
    costs = replace(graph.costs, until=np.full(len(graph.before), 1.0))
    assert replay(graph, costs).done_s[-1] == 1.0


@pytest.mark.parametrize("step", [ALL, LAUNCHES * 7], ids=["all", "ahead"])
def test_second_copy_of_the_steps_has_the_edges_of_the_first(step: Sequence[object]) -> None:
    trace, steps, _ = simulated(step, 4)
    (part,) = replayed(trace, steps).parts
    calls, ran, early = len(part.graph.previous), len(part.graph.before), int(part.graph.first[0])
    waits = part.graph.waits
    waits = waits._replace(awaited={**waits.awaited, calls - 1: [early]}, depends={**waits.depends, early: [early - 1]})
    graph = replace(part.graph, waits=waits)
    twice, costs = repeated(graph), twice_costs(graph, graph.costs)
    r, both = graph.recorded, twice.recorded
    assert {len(getattr(costs, name)) for name in ("segment", "work", "waits", "back")} == {2 * calls}
    own = ran - early
    for name in ("name", "thread", "start_s", "end_s", "trace_call"):
        assert list(getattr(both, name)) == 2 * list(getattr(r, name))
    for name in ("kind", "label", "stream", "begin_s", "done_s", "node", "lost", "trace_kernel"):
        column = list(getattr(r, name))
        assert list(getattr(both, name)) == column + column[early:]
    assert both.until_idle == (*r.until_idle, *r.until_idle)
    assert both.marks.tolist() == [*r.marks.tolist(), *(r.marks + calls).tolist()]
    assert both.call.tolist() == [*r.call.tolist(), *(r.call[early:] + calls).tolist()]
    assert twice.first.tolist() == [*graph.first.tolist(), *(graph.first[1:] + own).tolist()]
    for name in ("previous", "over"):
        edges = getattr(graph, name)
        again = np.where(edges == UNKNOWN, UNKNOWN, edges + calls).tolist()
        if name == "previous":
            again[0] = int(np.flatnonzero(r.thread == r.main)[-1])  # after the last call of the first copy
        assert getattr(twice, name).tolist() == [*edges.tolist(), *again]
    last = {stream: int(np.flatnonzero(r.stream == stream)[-1]) for stream in {*r.stream.tolist()}}

    def activity(k: int, stream: int) -> int:
        return k + own if k >= early else last[stream]

    before = [activity(k, stream) for k, stream in zip(graph.before[early:], r.stream[early:], strict=True)]
    assert twice.before.tolist() == [*graph.before.tolist(), *before]
    assert twice.waits.depends == graph.waits.depends | {
        k + own: [activity(m, r.stream[m]) for m in found] for k, found in graph.waits.depends.items()
    }
    assert twice.waits.awaited == graph.waits.awaited | {
        i + calls: [activity(k, r.stream[k]) for k in found] for i, found in graph.waits.awaited.items()
    }
    assert_equal(replay(twice, costs), by_the_rules(twice, costs))


def test_queue_of_repeated_steps_reaches_from_one_copy_to_the_next() -> None:
    trace, steps, _ = simulated((*LAUNCHES, Host(1 * MS)), 4)
    (part,) = replayed(trace, steps).parts
    twice = repeated(replace(part.graph, queue=30))
    mine = np.flatnonzero(twice.recorded.stream == twice.recorded.stream[-1])
    room = {int(twice.recorded.call[k]): int(of) for k, of in zip(mine[30:], mine[:-30], strict=True)}
    assert {call: int(twice.slot[call]) for call in room} == room
