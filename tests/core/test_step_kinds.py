"""Kinds of steps found in noisy durations: planted ones with their counts and times, and none in noise."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cs_systems.core import statistics
from cs_systems.core.step_kinds import step_kinds

NOISE = st.floats(1.0, 1.4)


@given(st.lists(st.floats(1.0, 1.9), min_size=1, max_size=80), st.floats(1e-6, 1e3))
def test_noise_is_one_kind(durations: list[float], unit: float) -> None:
    (kind,) = step_kinds([unit * duration for duration in durations])
    assert kind.positions == (*range(len(durations)),)
    assert kind.every is None


@given(st.data())
def test_planted_slow_steps_are_found_with_their_count_and_time(data: st.DataObject) -> None:
    every = data.draw(st.integers(2, 12), "every")
    first = data.draw(st.integers(0, every - 1), "first")
    count = data.draw(st.integers(3, 8), "count")
    times = data.draw(st.floats(3.0, 200.0), "times")
    total = data.draw(st.integers(first + every * (count - 1) + 1, first + every * count), "steps")
    noise = data.draw(st.lists(NOISE, min_size=total, max_size=total), "noise")
    planted = (*range(first, total, every),)
    durations = [each * (times if i in planted else 1.0) for i, each in enumerate(noise)]
    kinds = {kind.positions: kind for kind in step_kinds(durations)}
    assert {*kinds} == {planted, tuple(i for i in range(total) if i not in planted)}
    assert kinds[planted].every == every
    assert kinds[planted].total_s == pytest.approx(sum(durations[i] for i in planted))


def test_of_two_distances_that_are_as_rare_the_one_with_slow_steps_alone_is_found() -> None:
    """Every sixth of these steps is as seldom as slow by chance as every ninth."""
    durations = [3.0 if place % 9 == 1 else 1.25 if place in (7, 13) else 1.0 for place in range(23)]
    assert {kind.positions for kind in step_kinds(durations) if kind.every} == {(1, 10, 19)}


def test_steps_halfway_between_slow_ones_are_usual_if_they_are_no_slower_than_others() -> None:
    """Every fourth of these steps is slower than all others, and every eighth slow."""
    durations = [3.0 if place % 8 == 1 else 1.25 if place in (5, 13) else 1.0 for place in range(18)]
    assert [kind.positions for kind in step_kinds(durations) if kind.every] == [(1, 9, 17)]
    assert len(step_kinds(durations)) == 2


@given(st.lists(st.floats(1e-9, 1e9) | st.sampled_from([0.0, float("inf"), float("nan")]), max_size=60))
def test_each_step_has_exactly_one_kind(durations: list[float]) -> None:
    found = sorted(i for kind in step_kinds(durations) for i in kind.positions)
    assert found == [*range(len(durations))]


@pytest.mark.parametrize("spread", [0.05, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("steps", [20, 36, 200])
def test_noise_of_any_spread_is_rarely_two_kinds(spread: float, steps: int) -> None:
    rng = random.Random(1)
    several = sum(len(step_kinds([rng.lognormvariate(0, spread) for _ in range(steps)])) > 1 for _ in range(200))
    assert several <= 0.05 * 200


def test_slow_steps_are_found_in_strong_noise_with_late_steps() -> None:
    """Steps that another program delays are as long as those of the kind, but come at no fixed distance."""
    rng = random.Random(4)
    durations = [rng.lognormvariate(0, 0.3) * (6 if i % 10 == 4 else 1) for i in range(100)]
    for late in (17, 42):
        durations[late] = 6.0
    assert (*range(4, 100, 10),) in [kind.positions for kind in step_kinds(durations)]


def test_two_kinds_of_slow_steps_are_distinguished() -> None:
    rng = random.Random(5)
    durations = [rng.lognormvariate(0, 0.05) * (15 if i % 20 == 9 else 5 if i % 10 == 9 else 1) for i in range(100)]
    kinds = [(len(kind.positions), kind.every) for kind in step_kinds(durations)]
    assert kinds == [(90, None), (5, 20), (5, 20)]


@pytest.mark.parametrize(
    ("slow", "expected"),
    [
        ((3, 17, 22), [(27, None), (3, None)]),  # at no fixed distance
        ((0, 1), [(28, None), (2, None)]),
        ((12,), [(29, None), (1, None)]),
        ((), [(30, None)]),
    ],
)
def test_slow_steps_at_irregular_distances_are_separated_by_a_gap(
    slow: tuple[int, ...], expected: list[tuple[int, int | None]]
) -> None:
    durations = [1.0 + 0.01 * (i % 3) + (10 if i in slow else 0) for i in range(30)]
    assert [(len(kind.positions), kind.every) for kind in step_kinds(durations)] == expected


def test_slow_steps_that_follow_each_other_are_one_kind() -> None:
    kinds = step_kinds([1.0, 1.0, 1.0, 21.0, 21.0] * 8)
    assert [(len(kind.positions), kind.every) for kind in kinds] == [(24, None), (16, None)]


def test_one_late_short_step_is_not_a_kind() -> None:
    assert len(step_kinds([1.0 + 0.01 * (i % 3) for i in range(100)] + [3.5])) == 1


def test_hundred_thousand_steps_are_divided_quickly() -> None:
    rng = random.Random(6)
    durations = [rng.lognormvariate(0, 0.1) * (8 if i % 50 == 7 else 1) for i in range(100_000)]
    began = time.process_time()
    assert [kind.every for kind in step_kinds(durations)] == [None, 50]
    assert time.process_time() - began < 30


def test_slow_steps_at_a_fixed_distance_do_not_count_as_instability() -> None:
    rng = random.Random(7)
    durations = [rng.lognormvariate(0, 0.01) * (10 if i % 5 == 4 else 1) for i in range(40)]
    assert statistics.unstable(durations) == []
    shuffled = rng.sample(durations, len(durations))
    assert statistics.unstable(shuffled)[0].startswith("steps vary by ")
