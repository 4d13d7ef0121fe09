"""Costs and edges of a graph, from calls and kernels at given times."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from cs_systems.analysis.replay import replayed
from cs_systems.analysis.replay.graph import (
    Constant,
    Constants,
    Graph,
    _queue,
    befores,
    slots,
    with_quartiles,
)
from cs_systems.analysis.replay.run import replay
from cs_systems.analysis.replay.waits import US
from cs_systems.readers.forms.columns import UNKNOWN
from tests.analysis.replay.given import LAUNCH, SYNC, WAIT, Called, Ran, made, recorded_of
from tests.analysis.replay.simulated import OTHER, Host, Launch, Machine, Sync, simulated


def idle_launches(count: int, latency: float, since: float = 0) -> tuple[list[Called], list[Ran]]:
    """Return launches of 5 µs, 100 µs apart; their kernels of 10 µs start a latency later."""
    starts = [since + 100.0 * number for number in range(1, count + 1)]
    calls = [Called(LAUNCH, start, start + 5) for start in starts]
    return calls, [Ran(n, start + 5 + latency, start + 15 + latency) for n, start in enumerate(starts)]


def queued(gaps: Sequence[float]) -> tuple[list[Called], list[Ran]]:
    """Return launches while a kernel of 1 ms runs, and their kernels with these gaps in between."""
    calls = [Called(LAUNCH, 10.0 * n, 10.0 * n + 5) for n in range(1, len(gaps) + 2)]
    ran = [Ran(0, 15, 1015)]
    for number, gap in enumerate(gaps, 1):
        begin = ran[-1].done + gap
        ran.append(Ran(number, begin, begin + 20))
    return calls, ran


@pytest.mark.parametrize(("first", "segment"), [(5.0, 5.0), (150.0, 150.0)])
def test_first_call_of_another_thread_counts_from_the_begin_of_the_steps(first: float, segment: float) -> None:
    calls = sorted([Called(LAUNCH, 100, 105), Called(LAUNCH, first, first + 5, OTHER)], key=lambda one: one.start)
    number = 1 + calls.index(next(one for one in calls if one.thread == OTHER))
    assert made(calls, [Ran(0, 200, 210), Ran(1, 210, 220)]).costs.segment[number] == pytest.approx(segment * US)


def test_nodes_of_a_graph_keep_their_recorded_gaps() -> None:
    nodes = [Ran(0, begin, begin + 10, node=True) for begin in (110, 127, 139)]
    assert made([Called("cudaGraphLaunch", 100, 105)], nodes).costs.gap[1:] == pytest.approx([7 * US, 2 * US])


@pytest.mark.parametrize(("free", "launch"), [(99.0, 4.0), (100.0, 0.0)])
def test_usual_latency_is_that_of_launches_into_an_idle_stream(free: float, launch: float) -> None:
    """A stream that ends its work just as the launch begins is not idle before."""
    calls = [Called(LAUNCH, 100.0 * n, 100.0 * n + 5) for n in range(1, 5)]
    ran = [Ran(n, 100.0 * (n + 1) + 9, 100.0 * (n + 1) + free) for n in range(4)]
    assert made(calls, ran).constants.launch.value == pytest.approx(launch * US)


def test_kernel_within_the_usual_latency_of_its_launch_was_not_queued() -> None:
    calls, ran = idle_launches(3, latency=30)
    for number, start in enumerate((400.0, 450.0, 500.0, 550.0), 3):
        calls.append(Called(LAUNCH, start, start + 5))
        ran.append(Ran(number, start + 30, start + 75))  # the one before ended 5 µs earlier, 20 µs after the launch
    found = made(calls, ran)
    assert found.constants.launch.value == pytest.approx(30 * US)
    assert found.constants.gap.value == pytest.approx(1 * US)
    assert found.unexplained_s == 0


@pytest.mark.parametrize(("last", "gap"), [(19.5, 2.0), (20.5, 1.0)])
def test_usual_gap_is_the_median_of_those_under_twenty_microseconds(last: float, gap: float) -> None:
    assert made(*queued([2, 2, last])).constants.gap.value == pytest.approx(gap * US)


def test_gaps_that_the_usual_one_explains_are_not_late() -> None:
    found = made(*queued([8, 8, 8, 8]))
    assert (found.constants.gap.value, found.unexplained_s) == (pytest.approx(8 * US), 0)


def test_only_kernels_that_overlap_keep_their_gap() -> None:
    found = made(*queued([1, 1, 1, 1, 0.5, 0, -2]))
    assert found.costs.gap[1:] == pytest.approx(np.array([1, 1, 1, 1, 1, 1, -2]) * US)


@pytest.mark.parametrize(("late", "unexplained"), [(9.5, 0.0), (10.5, 0.5), (12.0, 2.0), (100.0, 90.0)])
def test_kernel_that_starts_late_is_unexplained_beyond_ten_microseconds(late: float, unexplained: float) -> None:
    calls, ran = idle_launches(4, latency=4)
    ran[-1] = ran[-1]._replace(begin=ran[-1].begin + late, done=ran[-1].done + late)
    found = made(calls, ran)
    assert found.unexplained_s == pytest.approx(unexplained * US)
    assert np.isnan(found.fixed).all()


@pytest.mark.parametrize(("late", "is_fixed"), [(49.0, False), (51.0, True)])
def test_late_start_of_a_streams_first_kernel_is_a_boundary(late: float, is_fixed: bool) -> None:
    calls, ran = idle_launches(4, latency=4)
    ran[0] = ran[0]._replace(begin=ran[0].begin + late, done=ran[0].done + late)
    found = made(calls, ran)
    assert found.unexplained_s == pytest.approx(0.0 if is_fixed else (late - 10) * US)
    assert found.fixed[0] == pytest.approx((109 + late) * US) if is_fixed else np.isnan(found.fixed[0])
    assert np.isnan(found.fixed[1:]).all()


@pytest.mark.parametrize(("after", "lead"), [(3.5, 10.0), (4.5, 204.5)])
def test_lead_of_a_copy_that_waited_for_its_stream_is_short(after: float, lead: float) -> None:
    """A copy from pageable memory begins within 4 µs of the end of the kernel before it, or later for its own sake."""
    calls = [Called(LAUNCH, 10, 15), Called("cudaMemcpyAsync", 100, 400)]
    ran = [Ran(0, 15, 300), Ran(1, 300 + after, 380, name="HtoD pageable")]
    assert made(calls, ran).costs.lead[1] == pytest.approx(lead * US)


class Late(NamedTuple):
    """Times of two kernels after a wait of a stream: when their launches returned and when they began, in µs."""

    first: tuple[float, float] = (501, 505)
    second: tuple[float, float] = (506, 514)
    before: float | None = None  # end of the kernel before the first on its stream
    lost: bool = False


@pytest.mark.parametrize(
    "late",
    [
        Late(),
        Late((480, 505), before=504),
        Late((480, 505), before=501.5),
        Late((501, 505), before=509.5),  # overlaps
        Late(lost=True),
    ],
)
def test_kernel_that_its_launch_or_stream_explains_did_not_wait_for_another_stream(late: Late) -> None:
    """A kernel ended at 500 µs; of two that start soon after, the second alone is late."""
    calls, ran = idle_launches(3, latency=4)
    calls += [Called(LAUNCH, 410, 415), Called(LAUNCH, 430, 435), Called(WAIT, 440, 442)]
    ran += [Ran(3, 419, 500, 1), Ran(4, 439, late.before or 450, 2)]
    calls += [Called(LAUNCH, late.first[0] - 5, late.first[0]), Called(LAUNCH, late.second[0] - 2, late.second[0])]
    ran += [Ran(6, late.first[1], 600, 2, lost=late.lost), Ran(7, late.second[1], 600, 3)]
    found = made(calls, ran)
    assert found.waits.depends == {6: [3] if late.before is None else [3, 4]}
    assert found.waits.guessed == 1


def test_first_node_on_a_further_stream_follows_the_node_that_ended_last_before_it() -> None:
    calls = [Called(LAUNCH, 10, 15), Called("cudaGraphLaunch", 100, 105)]
    nodes = [Ran(1, begin, done, stream, node=True) for begin, done, stream in
             [(110, 120, 0), (111, 114, 1), (119.5, 130, 2), (121, 125, 3), (125, 128, 1), (131, 140, 4)]]  # fmt: skip
    ran = [Ran(0, 20, 30, 2), *nodes]
    # a node that ended up to 1 µs after the begin counts, too; the first node waits for its launch alone
    assert befores(recorded_of(calls, ran)).tolist() == [UNKNOWN, UNKNOWN, UNKNOWN, 1, 1, 2, 3]
    nodes[2] = nodes[2]._replace(begin=118.5)
    assert befores(recorded_of(calls, [ran[0], *nodes]))[3] == 2
    apart = [one._replace(node=False) for one in nodes]
    assert befores(recorded_of(calls, [ran[0], *apart])).tolist() == [UNKNOWN, UNKNOWN, UNKNOWN, 0, UNKNOWN, 2, UNKNOWN]
    early = [one._replace(call=None) for one in nodes]
    assert befores(recorded_of(calls[:1], [*early, Ran(0, 200, 210, 2)])).tolist() == [*[UNKNOWN] * 4, 1, UNKNOWN, 2]


def waiting(waits: Sequence[tuple[float, float, float]]) -> Graph:
    """Return the graph of a kernel, and a wait for it, each: the kernel's end, the wait's begin and its end."""
    calls, ran = [], []
    for number, (done, start, end) in enumerate(waits):
        at = 1000.0 * number
        calls += [Called(LAUNCH, at + 10, at + 15), Called(SYNC, at + start, at + end)]
        ran.append(Ran(2 * number, at + 19, at + done))
    return made(calls, ran)


def test_usual_return_from_a_wait_is_that_of_waits_that_lasted() -> None:
    long, short = (300, 200, 306), (202, 200, 203)
    assert waiting([long] * 3 + [short] * 3).constants.back.value == pytest.approx(6 * US)


def test_own_work_of_a_wait_is_that_of_calls_that_did_not_wait() -> None:
    found = waiting([(300, 200, 306), (30, 200, 207), (30, 200, 209), (30, 200, 220)])
    assert found.costs.work[[2, 4, 6, 8]] == pytest.approx(np.array([9, 7, 9, 20]) * US)
    assert found.unexplained_s == 0


def test_wait_that_lasts_as_long_as_its_own_work_is_explained() -> None:
    found = waiting([(195, 200, 300), (30, 200, 300)])
    assert found.costs.work[[2, 4]] == pytest.approx([100 * US] * 2)
    assert found.unexplained_s == pytest.approx(50 * US)  # of the one that waited for nothing


def test_usual_constants_replay_a_machine_with_few_cases() -> None:
    """Launches that start at once, kernels 1 µs apart, and 5 µs to return from a wait."""
    step = (Host(50 * US), *(Launch(10 * US) for _ in range(10)), Sync(), Host(20 * US))
    trace, steps, _ = simulated(step, 4, Machine(launch_s=0.0, gap_s=1 * US, return_s=5 * US))
    assert replayed(trace, steps).error < 1e-9


def test_step_that_lasts_until_its_work_has_ended_is_replayed_without_a_return() -> None:
    step = (Host(50 * US), *(one for _ in range(3) for one in (Launch(20 * US), Sync())), Launch(300 * US))
    trace, steps, _ = simulated((*step, Host(400 * US)), 4)
    ends = trace.kernels.end_s[-5::4]
    steps = [one._replace(end_s=float(end)) for one, end in zip(steps, ends, strict=True)]
    found = replayed(trace, steps)
    assert found.parts[0].graph.recorded.until_idle == (True, True)
    assert found.parts[0].replayed_s == pytest.approx(found.parts[0].recorded_s)


def queue_of(lasted: Sequence[float], done: Sequence[float] | None = None, node: Sequence[int] = ()) -> int:
    """Return the length of the queue of a stream, of launches 8 s apart; without ends, no kernel has ended."""
    start_s, number = np.arange(len(lasted)) * 8.0, np.arange(len(lasted))
    r: Any = SimpleNamespace(
        position=number, stream=np.zeros(len(lasted), int), call=number, lost=np.zeros(len(lasted), bool),
        start_s=start_s, end_s=start_s + lasted, node=np.isin(number, node),
        done_s=8.0 * len(lasted) + number if done is None else np.array(done),
    )  # fmt: skip
    return _queue(r, SimpleNamespace(awaited={}), np.array(lasted))[0]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("lasted", "queue"),
    [
        ([*[1.0] * 125, *[2.0] * 361, *[4.4] * 15], 1020),  # launches into a short queue last 1.5, the median of 250
        ([*[1.0] * 125, *[2.0] * 361, *[4.6] * 15], 475),
        ([*[1.0] * 125, *[2.0] * 361, *[5.9] * 15], 475),
        ([1.0] * 497 + [4.0] * 14, 1020),
        ([1.0] * 496 + [4.0] * 15, 485),
        ([1.0] * 491 + [4.0] * 15, 480),  # 0.3 of the 50 at the limit
    ],
)
def test_queue_is_full_where_launches_last_longer_than_into_a_short_one(lasted: Sequence[float], queue: int) -> None:
    assert queue_of(lasted) == queue


@pytest.mark.parametrize(("few", "queue"), [(3, 1020), (2, 475)])
def test_three_launches_into_a_short_queue_give_their_usual_duration(few: int, queue: int) -> None:
    lasted = [2.0] * 3 + [1.0] * 483 + [4.0] * 15
    assert queue_of(lasted, node=range(few, 300)) == queue


def test_queue_holds_only_kernels_that_have_not_ended() -> None:
    assert queue_of([1.0] * 1100, [8.0 * n + 4 for n in range(1100)]) == 1020


def test_launch_finds_room_when_the_kernel_at_the_queues_end_is_done() -> None:
    calls = [Called(LAUNCH, 10.0 * n, 10.0 * n + 5) for n in range(10)]
    ran = [Ran(n, 1000 + n, 1000 + n, n // 5) for n in range(10)]
    ran[4] = ran[4]._replace(node=True)
    ran[8] = ran[8]._replace(lost=True)
    r = recorded_of(calls, ran)
    assert slots(r, r.position, 2).tolist() == [-1, -1, -1, 0, 1, -1, -1, -1, 5, -1, 7, -1]


def test_quartiles_replace_what_was_not_recorded_alone() -> None:
    calls, ran = queued([1, 1, 1, -2])
    calls += [Called("cudaMemcpyAsync", 2000, 2100), Called(SYNC, 2200, 2210)]
    found = made(calls, [*ran, Ran(5, 2020, 2095, name="HtoD pageable")])
    named = Constants(*(Constant(value, low, high) for value, low, high in
                        [(found.costs.lead[0], 0.1, 0.2), (found.costs.gap[1], 0.3, 0.4),
                         (found.costs.back[1], 0.5, 0.6)]))  # fmt: skip
    known = Graph(**{**vars(found), "constants": named})
    for costs, (launch, gap, back) in zip(with_quartiles(known), [(0.1, 0.3, 0.5), (0.2, 0.4, 0.6)], strict=True):
        assert costs.lead.tolist() == pytest.approx([launch] * 5 + [20 * US])
        assert costs.gap.tolist() == pytest.approx([gap] * 4 + [-2 * US, gap])
        assert costs.link == gap
        assert costs.back.tolist() == pytest.approx([0, *[back] * 5, 5 * US, back, 0])
    assert len(replay(found).start_s) == len(calls) + 2
