"""Tests of growth from step to step: memory that is kept, and steps that become slower."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from cs_systems.analysis.comparison.loop_growth import (
    ALIKE,
    FEWEST,
    LEAST_ALIKE,
    LEAST_PHASE_S,
    fastest,
    follows_inputs,
    is_of_machine,
    memory_growth,
    time_growth,
)

MIB = 2**20


def test_steady_growth_of_memory_is_found() -> None:
    found = memory_growth([(step, 1000 * MIB + 40.0 * MIB * step) for step in range(5, 45)])
    assert found is not None
    assert found.steps == 39
    assert found.per_step == pytest.approx(40 * MIB)
    assert found.last - found.first == pytest.approx(39 * 40 * MIB)


@pytest.mark.parametrize(
    "readings",
    [
        [1000.0] * 40,  # constant
        [1000.0 + 40 * min(step, 8) for step in range(40)],  # an allocator's pools fill
        [1000.0 + 800 * (step >= 20) for step in range(40)],  # a jump
        [1000.0 + 0.1 * step for step in range(40)],  # too little to matter
        [1000.0 + 40 * step for step in range(9)],  # too few readings
        [1000.0 + 40 * min(step, 14) + 40 * max(step - 28, 0) for step in range(40)],  # two pools, one after the other
    ],
)
def test_memory_that_settles_or_jumps_does_not_grow(readings: list[float]) -> None:
    assert memory_growth([(step, size * MIB) for step, size in enumerate(readings)]) is None


@pytest.mark.parametrize(("rest", "is_growth"), [(4, True), (12, False)])
def test_memory_grows_if_it_rises_in_each_fifth_of_the_steps(rest: int, is_growth: bool) -> None:
    """A rest of a few steps, as until the next garbage collection, does not end the growth."""
    sizes = [40.0 * MIB * (min(step, 12) + max(step - 12 - rest, 0)) for step in range(40)]
    assert (memory_growth([*enumerate(sizes)]) is not None) is is_growth


def test_noise_of_times_is_no_growth() -> None:
    for seed in range(30):
        rng = random.Random(seed)
        assert time_growth([(step, rng.lognormvariate(0, 0.5)) for step in range(40)]) is None
    rising = time_growth([(step, 0.02 + 0.001 * step) for step in range(40)])
    assert rising is not None
    assert rising.per_step == pytest.approx(0.001)


def of_levels(levels: Sequence[float]) -> list[tuple[int, float]]:
    """Return two readings around each level."""
    return [*enumerate(level + apart for level in levels for apart in (-1e6, 1e6))]


@pytest.mark.parametrize(
    ("readings", "grows"),
    [
        ([(step, 3.2e6 * step) for step in range(11)], True),  # by 32 MB
        ([(step, 3.19e6 * step) for step in range(11)], False),
        ([(step, 4e6 * step) for step in range(10)], True),
        ([(step, 9e6 * step) for step in range(9)], False),
        (of_levels([0.0, 3e7, 16e7, 28e7, 40e7]), True),  # the least rise is 0.3 times the mean one
        (of_levels([0.0, 2.9e7, 16e7, 28e7, 40e7]), False),
    ],
)
def test_memory_grows_from_the_limits_on(readings: list[tuple[int, float]], grows: bool) -> None:
    assert (memory_growth(readings) is not None) is grows


FLAT = [10.0] * 6 + [11.0] * 2  # of most pairs of its steps, none takes longer
# 18 of 120 pairs fall, so that 84 more rise than fall: 0.7 of them.
TWISTED = [3, 2, 1, 0, 7, 6, 5, 4, 8, 9, 10, 11, 15, 14, 13, 12]
SLOWER = [10.0 * step for step in range(10)]


@pytest.mark.parametrize(
    ("durations", "grows"),
    [
        ([10.0 + step / 3 for step in range(9)] + [13.01], True),
        ([10.0 + step / 3 for step in range(9)] + [12.99], False),
        ([10.0 + step / 4 for step in range(13)], True),  # exactly 1.3 times as long
        ([12.0 * min(step, 5) + 4.0 * step for step in range(20)], True),  # most of the rise is in the first quarter
        ([100.0 + each for each in [*SLOWER, *(90.0 + 3 * step for step in range(1, 11))]], True),
        ([100.0 + each for each in [*SLOWER, *(90.0 + 2.9 * step for step in range(1, 11))]], False),
        ([*FLAT, *(2 * each for each in FLAT)], False),
        ([5.0 + each for each in TWISTED], True),
        ([5.0 + each for each in [*TWISTED[:8], 9, 8, *TWISTED[10:]]], False),
        ([each if step % 2 == 0 else 0.0 for step, each in enumerate(range(1, 121))], True),  # every second is read
        ([each if step % 2 == 0 else 0.0 for step, each in enumerate(range(1, 120))], False),
    ],
)
def test_steps_become_slower_from_the_limits_on(durations: list[float], grows: bool) -> None:
    assert (time_growth([*enumerate(durations)]) is not None) is grows


def test_growth_is_a_line_through_the_medians_of_both_ends() -> None:
    """A single slow step at an end is not the first or last time."""
    found = time_growth([(5 + step, 100.0 + step**2) for step in range(20)])
    assert found == (19, 100.0, 306.5 + 19.0 * 1.5 + 100.0, 19.0)
    line = [(step, 10.0 + step) for step in range(20)]
    assert time_growth(line) == (19, 10.0, 29.0, 1.0)
    assert time_growth([*line[:-1], (19, 290.0)]) == (19, 10.0, 29.0, 1.0)
    assert time_growth([(5, 5.0), *((5 + step, 10.0 + step) for step in range(1, 20))]) == (19, 10.0, 29.0, 1.0)


@pytest.mark.parametrize(
    ("least", "most", "follows"),
    [(26.0, 210.0, False), (27.0, 210.0, True), (27.0, 230.0, False), (210.0, 210.0, False)],
)
def test_inputs_that_grow_less_than_their_steps_follow_a_schedule(least: float, most: float, follows: bool) -> None:
    """From step 1 to step 20, all batches so far would grow by 10.5 times, and a schedule by 1.3 times less."""
    sizes = [(step, least + (210.0 - least) * (step - 1) / 19) for step in range(1, 20)] + [(20, most)]
    assert follows_inputs(sizes) is follows


@pytest.mark.parametrize("steps", [60, 120])
def test_fastest_of_each_few_steps_show_growth_on_a_busy_machine(steps: int) -> None:
    rng = random.Random(0)
    noise = [1 + rng.expovariate(1.5) for _ in range(steps)]
    flat = [(step, 0.01 * noise[step]) for step in range(steps)]
    rising = [(step, (0.01 + 0.09 * step / steps) * noise[step]) for step in range(steps)]
    assert time_growth(flat) is None
    assert time_growth(fastest(flat)) is None
    assert time_growth(fastest(rising)) is not None
    assert fastest(flat[:9]) == flat[:9]


def test_fastest_step_of_each_of_15_groups_is_kept() -> None:
    assert fastest([(step, 1.0 + step % 2) for step in range(30)]) == [(step, 1.0) for step in range(0, 30, 2)]


def rising(first_s: float, rise: float, count: int = FEWEST) -> list[float]:
    """Return times of which the last third is longer than the first by a rise, as a share."""
    third = count // 3
    return [first_s * (1 + rise * (n >= count - third)) for n in range(count)]


SLOWER = {"forward": rising(4e-3, 0.9), "backward": rising(8e-3, 0.9), "optimizer": rising(1e-3, 0.9)}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, True),
        ({"optimizer": rising(1e-3, 0.0)}, False),  # the gradients of more and more earlier steps
        ({"optimizer": rising(1e-3, 0.9 * ALIKE)}, True),  # noise
        ({"optimizer": rising(1e-3, 0.9 * ALIKE / 2)}, False),
        ({"other": rising(5e-3, 9.0)}, False),  # a list of all losses is read again
        ({"zero_grad": rising(0.9 * LEAST_PHASE_S, 0.0)}, True),  # too short to be judged
        ({"zero_grad": rising(LEAST_PHASE_S, 0.0)}, False),
        ({"optimizer": [1e-3] * (FEWEST - 1)}, False),  # two phases are too few
        ({name: rising(1e-3, LEAST_ALIKE * 1.01) for name in SLOWER}, True),
        ({name: rising(1e-3, LEAST_ALIKE * 0.99) for name in SLOWER}, False),
    ],
)
def test_steps_whose_phases_all_become_slower_alike_are_those_of_a_slower_machine(
    changed: dict[str, list[float]], expected: bool
) -> None:
    assert is_of_machine(SLOWER | changed) == expected
