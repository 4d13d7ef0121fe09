"""Tests of the slow begin of a loop."""

from __future__ import annotations

import random

import pytest

from cs_systems.analysis.comparison.loop_start import slow_start


def test_first_steps_that_are_slow_are_counted_in_spite_of_noise() -> None:
    for seed in range(20):
        rng = random.Random(seed)
        times_s = [(0.02 if n < 14 else 0.002) * rng.lognormvariate(0, 0.3) for n in range(60)]
        found = slow_start(times_s, 30)
        assert found is not None
        assert found.steps == 14
        assert found.each_s / found.later_s == pytest.approx(10, rel=0.4)


@pytest.mark.parametrize(
    "times_s",
    [
        [0.01] * 60,
        [0.3, 0.1, *[0.01] * 58],  # what every loop does once
        [0.1 if n % 5 == 0 else 0.01 for n in range(60)],
        [0.01 + 0.001 * n for n in range(60)],  # grows
        [*[0.1] * 40, *[0.01] * 20],  # the last steps are the odd ones
        [*[0.1] * 12, *[0.01] * 5],  # too few later ones
        [*[0.019] * 20, *[0.01] * 40],  # less than twice as slow
    ],
)
def test_loop_with_usual_first_steps_has_no_slow_start(times_s: list[float]) -> None:
    assert slow_start(times_s, len(times_s) // 2) is None


def test_noise_does_not_count_as_a_slow_start() -> None:
    for seed in range(50):
        rng = random.Random(seed)
        assert slow_start([rng.lognormvariate(0, 0.5) for _ in range(60)], 30) is None


@pytest.mark.parametrize(
    ("first", "later", "most", "steps"),
    [
        ([4.0] * 3, [1.0] * 6, 9, 3),
        ([4.0] * 2, [1.0] * 7, 9, None),
        ([4.0] * 3, [1.0] * 5, 9, None),
        ([4.0] * 4, [1.0] * 8, 3, 3),  # no longer than is asked for
        ([2.0] * 3, [1.0] * 6, 9, 3),  # twice as slow
        ([1.99] * 3, [1.0] * 6, 9, None),
        ([1.0, *[4.0] * 9], [1.0] * 12, 99, 10),  # a tenth of the first steps is fast
        ([1.0, *[4.0] * 8], [1.0] * 12, 99, None),
        ([4.0] * 3, [1.0, 1.0, 1.0, 4.0, 1.0, 1.0, 1.0, 4.0, 1.0, 1.0], 3, 3),  # a fifth of the later steps is slow
        ([4.0] * 3, [1.0, 1.0, 4.0, 1.0, 4.0, 1.0, 1.0, 4.0, 1.0, 1.0], 3, None),
        ([2.0, 4.0, 4.0], [1.0] * 6, 3, 3),  # at the limit of 2 s, a step is slow
        ([4.0] * 3, [1.0, 1.0, 1.0, 1.0, 2.0, 2.0], 3, None),
        ([4.0] * 3, [0.0] * 6, 9, None),  # steps without a time
    ],
)
def test_start_is_slow_from_its_limits_on(first: list[float], later: list[float], most: int, steps: int | None) -> None:
    found = slow_start([*first, *later], most)
    assert (found and found.steps) == steps
