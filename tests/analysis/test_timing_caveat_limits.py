"""Limits of the caveats of timings: each is absent on one side of its limit, and given on the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from cs_systems.analysis.timing_caveats import launch_bound_phases, load_in_words, of_spread, timing_caveats
from cs_systems.core.caveats import Caveat
from tests.analysis.test_timing_caveats import CLEAN, codes, samples


def of(measurement: Any, before: Any = CLEAN, after: Any = CLEAN) -> tuple[Caveat, ...]:
    return timing_caveats(measurement, before, after)


@pytest.mark.parametrize(("lag_s", "phases"), [(0.0999, ["backward"]), (0.1, []), (-0.01, ["backward"])])
def test_phase_that_ends_soon_after_its_submission_is_launch_bound(lag_s: float, phases: list[str]) -> None:
    (sample, *_) = samples().samples
    sample = replace(sample, phases_s={"backward": 1.0, "loss": 0.0}, lag_s={"backward": lag_s, "loss": 0.0})
    assert launch_bound_phases(replace(samples(), samples=(sample,))) == phases


@pytest.mark.parametrize(("count", "found"), [(2, ["few-samples"]), (3, [])])
def test_three_steps_show_a_spread(count: int, found: list[str]) -> None:
    assert codes(samples(count=count)) == found


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (0, "0 timed steps are too few to show a spread"),
        (1, "1 timed step is too few to show a spread"),
        (2, "2 timed steps are too few to show a spread"),
    ],
)
def test_too_few_steps_are_counted(count: int, message: str) -> None:
    assert [caveat.message for caveat in of_spread(samples(count=count), "step")] == [message]


@pytest.mark.parametrize(
    ("load", "cores", "words"),
    [
        (None, 4, ""), (1.0, None, ""), (None, None, ""), (1.5, 2, " (load average 1.5 on 2 cores)"),
        (2.5, 2, " (load average 2.5 on 2 cores)"), (2.6, 2, " (load average 2.6 on 2 cores, other programs)"),
        (1.0, 1, " (load average 1.0 on 1 core)"), (0.5, 1, " (load average 0.5 on 1 core)"),
    ],
)  # fmt: skip
def test_load_is_told_where_it_and_the_cores_are_known(load: float | None, cores: int | None, words: str) -> None:
    before = replace(CLEAN, load_average=load, cpu_cores=cores, cpu_threads=1)
    assert load_in_words(before, replace(CLEAN, load_average=None)) == words


@pytest.mark.parametrize(
    ("slow", "is_short"), [((0,), True), ((0, 1, 2, 3), True), ((0, 1, 2, 3, 4), False), ((0, 8), False)]
)
def test_slow_first_steps_are_fewer_than_half_and_slower_than_all_later_ones(
    slow: tuple[int, ...], is_short: bool
) -> None:
    made = samples(count=10)
    steps = [replace(one, wall_s=2.0 if number in slow else 1.0) for number, one in enumerate(made.samples)]
    told = [caveat.message for caveat in of_spread(replace(made, samples=tuple(steps)), "step")]
    assert any("2.0 times as slow as the later ones" in message for message in told) is is_short


def told(walls: Sequence[float], rounds: Sequence[int] = ()) -> list[str]:
    made = samples(count=len(walls))
    steps = [
        replace(one, wall_s=wall_s, round=number)
        for one, wall_s, number in zip(made.samples, walls, rounds or [0] * len(walls), strict=True)
    ]
    return [caveat.message for caveat in of_spread(replace(made, samples=tuple(steps)), "step")]


@pytest.mark.parametrize(
    ("walls", "rounds", "is_short"),
    [
        ([2.0, *[1.0] * 5], (), True), ([2.0, *[1.0] * 4], (), False),  # 6 steps show it
        ([1.26, *[1.0] * 9], (), True), ([1.25, *[1.0] * 9], (), False),
        ([2.0, 1.5, 1.0, 1.0, 2.5, 2.5, *[1.0] * 6], (), True),  # only the second half is later
        ([2.0, *[1.0] * 9], [0] * 9 + [1], False),  # each round warms up
        ([2.0, *[1.0] * 9], [0] + [1] * 9, False),
    ],
)  # fmt: skip
def test_warm_up_is_too_short_if_first_steps_are_slower_than_the_second_half(
    walls: list[float], rounds: Sequence[int], is_short: bool
) -> None:
    assert any("warm-up too short" in message for message in told(walls, rounds)) is is_short


def test_slowness_of_first_steps_is_their_mean_over_the_later_median() -> None:
    (message,) = told([3.0, 2.0, *[1.0] * 8])
    assert "the first 2 timed steps are 2.5 times as slow as the later ones: warm-up too short" in message
    (message,) = told([2.0, *[1.0] * 9])
    assert "the first timed step is 2.0 times as slow as the later ones: warm-up too short" in message


@pytest.mark.parametrize(("clock_hz", "found"), [(97e6, []), (96.9e6, ["throttled"])])
def test_clock_below_97_percent_is_throttled(clock_hz: float, found: list[str]) -> None:
    capped = replace(CLEAN, throttle_reasons=("power cap",), sm_clock_hz=100e6, sm_clock_max_hz=100e6)
    assert codes(samples(sm_clock_hz=clock_hz), after=capped) == found
    messages = [caveat.message for caveat in of(samples(sm_clock_hz=clock_hz), after=capped)]
    assert messages == ["the SM clock was 97 of 100 MHz (power cap)"] * len(found)
    assert codes(samples(sm_clock_hz=clock_hz), before=capped, after=replace(capped, throttle_reasons=None)) == found


@pytest.mark.parametrize(
    ("known", "message"),
    [
        ({"compiles": 1}, "10 compilations during timed steps"),
        ({"device_mallocs": 3}, "30 cudaMalloc calls during timed steps"),
    ],
)
def test_events_of_all_timed_steps_are_counted(known: dict[str, int], message: str) -> None:
    assert [caveat.message for caveat in of(samples(**known))] == [message]


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (None, 2), (2, None)])
def test_caveat_counts_the_most_processes_seen_on_the_gpu(before: int | None, after: int | None) -> None:
    first, last = (replace(CLEAN, other_processes=count) for count in (before, after))
    (caveat,) = of(samples(), first, last)
    assert caveat.message == "2 other processes used the GPU"
