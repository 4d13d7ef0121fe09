"""Limits of the caveats: each is absent on one side of its limit, and given on the other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cs_systems.core.caveats import (
    Caveat,
    caveats,
    cut_short,
    launch_bound_phases,
    not_restored,
    of_spread,
    recomputed,
    skipped_steps,
)
from tests.core.test_caveats import CLEAN, codes, samples


def of(measurement: Any, before: Any = CLEAN, after: Any = CLEAN) -> tuple[Caveat, ...]:
    return caveats(measurement, before, after)


@pytest.mark.parametrize(("lag_s", "phases"), [(0.0999, ["backward"]), (0.1, []), (-0.01, ["backward"])])
def test_phase_that_ends_within_a_tenth_of_it_after_its_submission_is_launch_bound(
    lag_s: float, phases: list[str]
) -> None:
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


@pytest.mark.parametrize(("clock_hz", "found"), [(97e6, []), (96.9e6, ["throttled"])])
def test_clock_below_97_percent_is_throttled(clock_hz: float, found: list[str]) -> None:
    capped = replace(CLEAN, throttle_reasons=("power cap",), sm_clock_hz=100e6, sm_clock_max_hz=100e6)
    assert codes(samples(sm_clock_hz=clock_hz), after=capped) == found
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
def test_most_processes_seen_on_the_gpu_count(before: int | None, after: int | None) -> None:
    first, last = (replace(CLEAN, other_processes=count) for count in (before, after))
    (caveat,) = of(samples(), first, last)
    assert caveat.message == "2 other processes used the GPU"


@pytest.mark.parametrize(
    ("timed", "done", "earlier"),
    [
        (1, 8, "--steps 2:8, or Recorder(warmup=2, steps=6)"),
        (5, 8, "--steps 2:8, or Recorder(warmup=2, steps=6)"),
        (6, 8, None),  # no more steps than were timed
        (1, 100, "--steps 2:100, or Recorder(warmup=2, steps=98)"),
        (2, 7, "--steps 1:7, or Recorder(warmup=1, steps=6)"),
        (3, 4, None),
        (0, 3, None),  # too short for a warm-up
        (0, None, None),
    ],
)
def test_short_loop_is_told_which_steps_it_could_time(timed: int, done: int | None, earlier: str | None) -> None:
    caveat = cut_short(timed, 50, done, "the loop ended")
    after = f" after {done}" if done else ""
    assert caveat.message == f"{timed} of 50 steps were timed, because the loop ended{after}"
    assert caveat.remedy == "let the loop run longer" + (
        f", or time earlier steps: cs-systems run {earlier}" if earlier else ""
    )


def test_loop_that_an_error_ended_is_told_to_correct_it() -> None:
    caveat = cut_short(1, 50, 8, "the loop ended with ValueError: bad", ["kineto", "memory_snapshot"])
    assert caveat.message == (
        "1 of 50 steps were timed, because the loop ended after 8 with ValueError: bad; no profile by kineto and no "
        "memory snapshot was recorded"
    )
    assert caveat.remedy == "correct the error, and record again"


def test_numbers_of_caveats_have_their_units() -> None:
    assert recomputed(0.25).message.startswith("25% of backward repeats forward")
    assert "scale 65,536 at first, 1e06 at last" in skipped_steps(1, 9, 65536.0, 1e6).message
    assert "scale 1 at first, 0.5 at last" in skipped_steps(1, 9, 1.0, 0.5).message
    assert "(scale 999,999 at first)" in skipped_steps(1, 9, 999999.0, None).message


def test_five_names_of_what_could_not_be_restored_are_shown() -> None:
    assert "changed a, b, c, d, e, and could not" in not_restored([*"abcde"]).message
    assert "changed a, b, c, d, e and 2 more, and could not" in not_restored([*"abcdefg"]).message
