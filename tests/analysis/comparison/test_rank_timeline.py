"""Data of the page of several ranks, in exact ns: boxes of communication and computation by aligned clocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from cs_systems.analysis.attribution.overlap import Intervals, union
from cs_systems.analysis.comparison import rank_timeline
from cs_systems.analysis.comparison.rank_timeline import TRANSFER, UNKNOWN, WAITING, clocks, clocks_ahead, joined, view
from cs_systems.analysis.comparison.ranks import Merged, Rank, merged
from cs_systems.readers.forms.trace import Step
from tests.analysis.comparison.test_limits import call, rank

S = 10**9  # ns


def spans(*intervals: tuple[float, float]) -> Intervals:
    starts, ends = np.array(intervals).T
    return union(starts, ends)


def two(**known: Any) -> list[Rank]:
    """Return two ranks, of which the second waits from 3 to 4 s; its clock is 2 s ahead, and it also calls alone."""
    phases = {"forward": spans((1.5, 2.5)), "backward": spans((0.25, 1.0), (4.25, 4.5), (5.75, 5.875), (6.0, 6.5))}
    shared = {"size_bytes": 4, "group": "a"}
    marks = (Step("step", 1.0, 3.0, number=7), Step("step", 3.0, 6.0, number=8))
    late = {"forward": spans((2.5, 3.0), (3.5, 4.0), (8.0, 8.5))}
    return [
        rank(0, call(4.0, 5.0, **shared), marks=marks, phases=phases, host="x", **known),
        rank(1, call(5.0, 7.0, **shared), call(7.5, 8.0, name="send"), marks=(Step("step", 3.0, 8.0),), phases=late),
    ]


def test_view_has_boxes_of_all_ranks_from_the_first_moment_on() -> None:
    found = view(merged(two()))
    first, second = found["ranks"]
    assert (found["end_ns"], found["joined_ns"], found["hidden_calls"]) == (5 * S, 0, 0)
    assert found["steps"] == {"number": [7, 8], "start": [0, 2 * S], "duration": [2 * S, 3 * S]}
    assert found["phases"] == ["forward", "backward"]
    assert found["kinds"] == [
        {"name": "all_reduce", "group": "a", "bytes": 4}, {"name": "send", "group": "", "bytes": None},
    ]  # fmt: skip
    assert found["matches"] == {"last": [0], "transfer": [S]}
    assert first["host"] == "x"
    assert first["calls"] == {"start": [3 * S], "duration": [S], "state": [TRANSFER], "kind": [0], "match": [0]}
    assert second["calls"] == {
        "start": [2 * S, 3 * S, 45 * S // 10], "duration": [S, S, S // 2], "state": [WAITING, TRANSFER, UNKNOWN],
        "kind": [0, 0, 1], "match": [0, 0, None],
    }  # fmt: skip


def test_computation_outside_of_the_steps_is_not_drawn() -> None:
    first, second = view(merged(two()))["ranks"]
    assert first["compute"] == {
        "start": [S // 2, 325 * S // 100, 475 * S // 100], "duration": [S, S // 4, S // 8], "phase": [0, 1, 1],
    }  # fmt: skip
    assert second["compute"] == {"start": [S // 2], "duration": [S // 2], "phase": [0]}


def test_computation_of_a_trace_without_steps_is_drawn_up_to_its_last_call() -> None:
    phases = {"forward": spans((0.25, 0.5))}
    with_call, without = view(merged([rank(0, call(1.0, 2.0), phases=phases), rank(1, phases=phases)]))["ranks"]
    assert (with_call["compute"]["start"], without["compute"]["start"]) == ([S // 4], [])


def test_view_begins_with_the_first_moment_of_any_rank() -> None:
    ranks = [rank(0, call(4.0, 5.0)), rank(1, call(2.5, 3.0, name="send"), call(5.0, 7.0))]
    assert view(merged(ranks))["ranks"][0]["calls"]["start"] == [35 * S // 10]
    assert view(merged([rank(0, call(4.0, 5.0)), rank(1)]))["ranks"][0]["calls"]["start"] == [4 * S]


@pytest.mark.parametrize(("marks", "end_ns"), [((), 1), ((Step("step", 0.0, 3.0),), 3 * S)])
def test_view_ends_with_the_last_step(marks: tuple[Step, ...], end_ns: int) -> None:
    assert view(merged([rank(0, marks=marks)]))["end_ns"] == end_ns


@pytest.mark.parametrize(
    ("most", "drawn", "hidden", "steps"),
    [
        (4, ([3 * S], [2 * S, 3 * S, 45 * S // 10]), 0, 3),
        (2, ([3 * S], [2 * S, 3 * S]), 1, 1),
        (1, ([], [2 * S]), 3, 1),
    ],
)
def test_later_calls_than_are_drawn_are_counted_without_their_waits(
    most: int, drawn: tuple[list[int], list[int]], hidden: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_timeline, "MOST_CALLS", most)
    found = view(merged(two()))
    first, second = found["ranks"]
    assert (first["calls"]["start"], second["calls"]["start"], found["hidden_calls"]) == (*drawn, hidden)
    assert (found["steps"]["number"], len(first["compute"]["start"])) == ([7, 8], steps)


@pytest.mark.parametrize(("most", "starts", "joined_ns"), [(3, [0, 2, 5], 0), (2, [0, 5], 1000), (1, [0], 2000)])
def test_pauses_are_joined_until_few_boxes_are_left(
    most: int, starts: list[int], joined_ns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pauses up to 1 µs are joined first, then up to 2 µs."""
    us = 1e-6
    monkeypatch.setattr(rank_timeline, "MOST_SPANS", most)
    phases = {"forward": spans((0.0, us), (1.9 * us, 3 * us), (4.9 * us, 6 * us))}
    job = merged([rank(0, marks=(Step("step", 0.0, 1.0),), phases=phases)])
    found = view(job)
    assert [round(start / 1000) for start in found["ranks"][0]["compute"]["start"]] == starts
    assert found["joined_ns"] == joined_ns


def test_pauses_up_to_a_length_are_joined() -> None:
    found = joined(spans((0.0, 1.0), (2.0, 3.0), (4.5, 5.0)), 1.0)
    assert (found.start_s.tolist(), found.end_s.tolist()) == ([0.0, 4.5], [3.0, 5.0])


def alone(began_s: Sequence[float | None], *calls: tuple[int, ...]) -> Merged:
    """Return ranks that began at these times, in collectives of these groups of ranks that end 1 s apart."""
    ranks = []
    for number, began in enumerate(began_s):
        own = [call(0.0, 1.0 + of.index(number), group=str(of)) for of in calls if number in of]
        ranks.append(rank(number, *own, began_s=began))
    return merged(ranks)


@pytest.mark.parametrize(
    ("began_s", "groups", "ahead_s"),
    [
        ([10.0, 4.0, 8.0], [(0, 1)], {0: 0.0, 1: 1.0, 2: 2.0}),
        ([10.0, 4.0, 8.0], [(1, 2)], {0: 0.0, 1: 6.0, 2: 7.0}),
        ([None, 4.0, 8.0], [(1, 2)], {0: 0.0, 1: 0.0, 2: 1.0}),
        ([10.0, None, 8.0], [(1, 2)], {0: 0.0, 1: 0.0, 2: 1.0}),
    ],
)
def test_clocks_that_no_collective_aligns_are_those_of_the_hosts(
    began_s: list[float | None], groups: list[tuple[int, ...]], ahead_s: dict[int, float]
) -> None:
    assert clocks_ahead(alone(began_s, *groups)) == ahead_s


@pytest.mark.parametrize(
    ("began_s", "named"),
    [
        (
            [0.0] * 2,
            "No collective connects rank 1 with rank 0: times there are by the hosts' clocks, which may differ.",
        ),
        ([0.0, None], "No collective connects rank 1 with rank 0: do not compare their times."),
        ([0.0] * 9, "No collective connects ranks 1, 2, 3, 4, 5, 6, 7, 8 with rank 0: times there are by the hosts'"),
        (
            [0.0] * 10,
            "No collective connects ranks 1, 2, 3, 4, 5, 6, 7, 8 … with rank 0: times there are by the hosts'",
        ),
    ],
)
def test_ranks_that_no_collective_aligns_are_named(began_s: list[float | None], named: str) -> None:
    assert clocks(alone(began_s)).startswith(named)


@pytest.mark.parametrize(
    ("ends", "words"),
    [
        ((1.0, 3.25, 5.75), "by 250 ms in the median and at most 500 ms: shorter waits are uncertain."),
        ((1.0, 3.0, 5.0), "by 1.00 ns in the median and at most 1.00 ns: shorter waits are uncertain."),
    ],
)
def test_ends_of_aligned_collectives_differ_by_the_median_and_at_most(ends: tuple[float, ...], words: str) -> None:
    calls = [call(start_s, start_s + 1.0) for start_s in (0.0, 2.0, 4.0)]
    late = [call(one.start_s, end_s) for one, end_s in zip(calls, ends, strict=True)]
    both = [call(6.0, 7.0, name="broadcast"), call(6.0, 9.0, name="broadcast")]  # which does not end at once
    ranks = [rank(number, *own, one) for number, (own, one) in enumerate(zip((calls, late), both, strict=True))]
    assert clocks(merged(ranks)) == (
        f"Clocks are aligned by the ends of 3 collectives. Afterwards the ends of one differ {words}"
    )
