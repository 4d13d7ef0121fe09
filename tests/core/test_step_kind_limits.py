"""Tests of the limits for kinds of steps: series on either side of each limit, without noise unless it is tested."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

from cs_systems.core.step_kinds import step_kinds


def kinds(durations: Sequence[float]) -> list[tuple[int, int | None]]:
    """Return the number of steps of each kind and the distance between them."""
    return [(len(kind.positions), kind.every) for kind in step_kinds(durations)]


def slow(times: float, places: Sequence[int], steps: int = 30) -> list[float]:
    """Return durations of 1 s, multiplied by `times` at these positions."""
    return [times if i in places else 1.0 for i in range(steps)]


@pytest.mark.parametrize(
    ("times", "found"), [(2.99, [(30, None)]), (3.0, [(29, None), (1, None)]), (3.01, [(29, None), (1, None)])]
)
def test_single_slow_step_is_a_kind_from_three_times_the_usual_duration(
    times: float, found: list[tuple[int, int | None]]
) -> None:
    assert kinds(slow(times, [12])) == found


@pytest.mark.parametrize(("steps", "count"), [(77, 2), (78, 1)])
def test_single_slow_step_is_a_kind_from_5_percent_of_all_time(steps: int, count: int) -> None:
    """4 s of 80 s are a twentieth."""
    assert len(kinds(slow(4.0, [12], steps))) == count


@pytest.mark.parametrize(
    ("times", "found"), [(1.99, [(30, None)]), (2.0, [(28, None), (2, None)]), (2.01, [(28, None), (2, None)])]
)
@pytest.mark.parametrize("places", [(3, 4), (3, 17)])
def test_several_slow_steps_are_a_kind_from_twice_the_usual_duration(
    times: float, found: list[tuple[int, int | None]], places: tuple[int, ...]
) -> None:
    assert kinds(slow(times, places)) == found


@pytest.mark.parametrize(("places", "every"), [((4, 14), None), ((4, 14, 24), 10), ((4, 14, 25), None)])
def test_three_slow_steps_are_enough_for_a_fixed_distance(places: tuple[int, ...], every: int | None) -> None:
    assert kinds(slow(5.0, places)) == [(30 - len(places), None), (len(places), every)]


def spread_out(width: float, gap: float, above: int) -> list[float]:
    """Return 30 durations in random order, with even logarithms from 0 to `width`, and `above` behind a gap."""
    below = 30 - above
    logs = [width * i / (below - 1) for i in range(below)] + [width + gap] * above
    return random.Random(1).sample([math.exp(log) for log in logs], 30)


@pytest.mark.parametrize(
    ("width", "above", "least"),
    [
        # From the tenth to the ninetieth percent of the steps; wider by 5 in 30, because so few steps show it badly.
        (2.0, 1, 2.0 * 24 / 28 * 35 / 30),
        (3.0, 2, 3.0 * 23 / 27 * 35 / 30 / 2),
        (3.0, 3, 3.0 * 22 / 26 * 35 / 30 / 2),
    ],
)
def test_kinds_are_separated_by_a_gap_that_is_wide_compared_with_the_spread(
    width: float, above: int, least: float
) -> None:
    assert kinds(spread_out(width, least - 0.01, above)) == [(30, None)]
    assert kinds(spread_out(width, least + 0.01, above)) == [(30 - above, None), (above, None)]


@pytest.mark.parametrize(
    ("steps", "places", "every"),
    [(23, (0, 11, 22), 11), (11, (1, 4, 7, 10), 3)],
    ids=["half of the steps apart", "in a short series"],
)
def test_regular_slow_steps_are_found_without_a_gap_to_the_others(
    steps: int, places: tuple[int, ...], every: int
) -> None:
    """The others take between half and twice the usual duration; the first and the last slow step take the longest."""
    others = steps - len(places)
    durations = random.Random(0).sample([4 ** (i / others - 0.5) for i in range(others)], others)
    for place in places:
        durations.insert(place, 2.2 if place in (places[0], places[-1]) else 2.1)
    assert kinds(durations) == [(others, None), (len(places), every)]


@pytest.mark.parametrize(("steps", "found"), [(21, [(21, None)]), (24, [(21, None), (3, 8)])])
def test_three_regular_slow_steps_among_many_are_not_chance(steps: int, found: list[tuple[int, int | None]]) -> None:
    """Compare with chance: 27 of 1,330 places of 3 steps among 21 are at a fixed distance, 35 of 2,024 among 24.

    The others reach up to the slow steps, so that no gap shows them.
    """
    durations = slow(2.0, range(3, steps, steps // 3), steps)
    for place, time_s in ((0, 1.2), (6, 1.4), (13, 1.6), (16, 1.8)):
        durations[place] = time_s
    assert kinds(durations) == found


def test_four_kinds_are_distinguished() -> None:
    for counts, expected in (((60, 20, 6, 2), [60, 20, 6, 2]), ((200, 20, 5, 3, 2), [220, 5, 3, 2])):
        durations = [10.0**level for level, count in enumerate(counts) for _ in range(count)]
        assert [len(kind.positions) for kind in step_kinds(durations)] == expected


def test_kinds_have_their_median_and_total() -> None:
    common, rare = step_kinds([1.0, 1.0, 1.0, 9.0, 1.0, 1.0, 1.0, 9.0, 1.0, 1.0, 1.0, 9.0])
    assert (common.positions, common.median_s, common.total_s) == ((0, 1, 2, 4, 5, 6, 8, 9, 10), 1.0, 9.0)
    assert (rare.positions, rare.median_s, rare.total_s, rare.every) == ((3, 7, 11), 9.0, 27.0, 4)


def test_steps_that_alternate_are_two_kinds() -> None:
    assert kinds([1.0, 5.0] * 6) == [(6, 2), (6, 2)]


@pytest.mark.parametrize("bad", [0.0, -1.0, float("inf"), float("nan")])
def test_impossible_durations_are_not_divided(bad: float) -> None:
    assert kinds([*slow(5.0, (4, 14, 24)), bad]) == [(31, None)]
    assert kinds([]) == []


@pytest.mark.parametrize(("durations", "found"), [
    ([1.0, 5.0], [(2, None)]), ([1.0, 1.0, 5.0], [(2, None), (1, None)]), ([1.0, 5.0, 1.0], [(2, None), (1, None)]),
])  # fmt: skip
def test_one_of_three_steps_can_stand_alone(durations: list[float], found: list[tuple[int, int | None]]) -> None:
    assert kinds(durations) == found


def test_every_second_step_is_a_kind_where_no_gap_shows_it() -> None:
    others = [1.0, 1.1, 1.2, 1.4, 1.9, 2.5] * 2
    assert kinds([time_s for other in others for time_s in (other, 3.0)]) == [(12, 2), (12, 2)]
    assert kinds([*others, *[3.0] * 12]) == [(24, None)]


def test_spread_of_twenty_steps_is_without_two_at_either_end() -> None:
    """Place 21 even logarithms from 0 to 2: the third and the third last are 1.6 apart; 5 of 22 steps make it more."""
    least = 1.6 * (1 + 5 / 22)
    for gap, found in ((least - 0.01, [(22, None)]), (least + 0.01, [(21, None), (1, None)])):
        durations = [math.exp(0.1 * place) for place in range(21)]
        assert kinds(random.Random(1).sample([*durations, math.exp(2 + gap)], 22)) == found


def test_steps_have_at_most_four_kinds() -> None:
    found = step_kinds([4.0**level for _ in range(10) for level in range(5)])
    assert [(len(kind.positions), kind.every) for kind in found] == [(20, None), (10, 5), (10, 5), (10, 5)]
