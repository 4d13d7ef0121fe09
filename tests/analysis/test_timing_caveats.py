"""Caveats: each appears for samples with its problem, and none for clean samples."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from cs_systems.analysis.timing_caveats import timing_caveats
from cs_systems.record import Measurement, Sample
from tests.test_record import ENVIRONMENT

CLEAN = replace(ENVIRONMENT, throttle_reasons=(), sm_clock_hz=1.98e9, sm_clock_max_hz=1.98e9, other_processes=0)


def samples(count: int = 10, spread: float = 0.0, lag: float = 0.9, **known: Any) -> Measurement:
    return Measurement(
        "cuda_event",
        tuple(
            Sample(
                0, False, 1 + spread * i / count, {"forward": 0.4, "backward": 0.6}, {"forward": 0.1, "backward": 0.2},
                {"forward": 0.3, "backward": 0.6 * lag}, **known,
            )
            for i in range(count)
        ),
        0.0,
    )  # fmt: skip


def codes(measurement: Measurement, before: Any = CLEAN, after: Any = CLEAN) -> list[str]:
    found = timing_caveats(measurement, before, after)
    assert all(c.message and c.remedy for c in found)
    return [c.code for c in found]


def test_clean_samples_have_no_caveats() -> None:
    assert codes(samples()) == []


@pytest.mark.parametrize(
    ("measurement", "code"),
    [
        (samples(spread=0.5), "unstable"),
        (samples(count=2), "few-samples"),
        (samples(lag=0.01), "launch-bound"),
        (samples(compiles=1), "recompiled"),
        (samples(device_mallocs=3), "cudaMalloc"),
    ],
)
def test_each_caveat_has_its_code(measurement: Measurement, code: str) -> None:
    assert codes(measurement) == [code]


def test_profiler_and_nonfinite_loss_are_caveats() -> None:
    assert timing_caveats(samples(), CLEAN, CLEAN, loss=2.5) == ()
    assert [c.code for c in timing_caveats(samples(), CLEAN, CLEAN, profiler="nsys", loss=math.nan)] == [
        "profiled",
        "nan-loss",
    ]
    (infinite,) = timing_caveats(samples(), CLEAN, CLEAN, loss=-math.inf)
    assert (infinite.code, infinite.message) == ("inf-loss", "the loss is infinite, so that its times are left out")


def test_launch_bound_names_the_phase() -> None:
    (caveat,) = timing_caveats(samples(lag=0.01), CLEAN, CLEAN)
    assert caveat.message == "the GPU waited for kernel launches in: backward"


def test_only_the_judged_phase_gets_caveats() -> None:
    doubtful = samples(spread=0.5, lag=0.01)  # the step is unstable, backward is launch-bound
    assert timing_caveats(doubtful, CLEAN, CLEAN, phase="forward") == ()
    assert [c.code for c in timing_caveats(doubtful, CLEAN, CLEAN, phase="backward")] == ["launch-bound"]


def test_warm_up_steps_get_no_caveats() -> None:
    clean = samples()
    warm = tuple(replace(s, warmup=True, wall_s=99.0, compiles=5, device_mallocs=5) for s in clean.samples)
    assert codes(replace(clean, samples=warm + clean.samples)) == []


def test_throttling_needs_a_reason_and_a_low_clock() -> None:
    capped = replace(CLEAN, throttle_reasons=("power cap",))
    assert codes(samples(), after=capped) == []  # capped, but at full clock
    assert codes(samples(), after=replace(capped, sm_clock_hz=1.4e9)) == ["throttled"]
    assert codes(samples(), after=replace(CLEAN, sm_clock_hz=0.3e9)) == []  # idle, not throttled


@pytest.mark.parametrize(("clock", "found"), [(0.969, ["throttled"]), (0.97, []), (0.971, [])])
def test_clock_counts_as_low_below_97_percent_of_the_highest(clock: float, found: list[str]) -> None:
    capped = replace(CLEAN, throttle_reasons=("power cap",), sm_clock_max_hz=2e9)
    assert codes(samples(), after=replace(capped, sm_clock_hz=clock * 2e9)) == found


@pytest.mark.parametrize(("lag", "found"), [(0.09, ["launch-bound"]), (0.11, [])])
def test_phase_is_launch_bound_if_it_ends_within_a_tenth_of_its_time_after_submission(
    lag: float, found: list[str]
) -> None:
    assert codes(samples(lag=lag)) == found


def test_throttling_uses_clocks_measured_during_steps() -> None:
    """After the last step, the clock of a throttled card recovers and that of an idle card falls."""
    capped = replace(CLEAN, throttle_reasons=("power cap",))
    slow, quick = samples(sm_clock_hz=1.4e9), samples(sm_clock_hz=1.97e9)
    assert codes(slow, after=capped) == ["throttled"]
    assert "1400 of 1980 MHz (power cap)" in timing_caveats(slow, CLEAN, capped)[0].message
    assert codes(quick, after=replace(capped, sm_clock_hz=0.3e9)) == []


def test_other_processes_on_the_gpu_are_a_caveat() -> None:
    assert codes(samples(), before=replace(CLEAN, other_processes=2)) == ["shared-gpu"]


def test_unknown_values_get_no_caveats() -> None:
    unknown = replace(CLEAN, throttle_reasons=None, sm_clock_hz=None, sm_clock_max_hz=None, other_processes=None)
    measurement = samples(device_mallocs=None, compiles=None)
    without_lag = tuple(replace(s, lag_s=None) for s in measurement.samples)
    assert codes(replace(measurement, samples=without_lag), unknown, unknown) == []


def lasting(*walls: float) -> Measurement:
    return Measurement("monotonic", tuple(Sample(0, False, wall, {}, {}) for wall in walls), 0.0)


def message(measurement: Measurement, before: Any = CLEAN, after: Any = CLEAN, **known: Any) -> str | None:
    found = [c.message for c in timing_caveats(measurement, before, after, **known) if c.code == "unstable"]
    return found[0] if found else None


def test_slow_first_steps_are_a_short_warm_up() -> None:
    assert message(lasting(2.0, 2.2, 2.1, *[1.0] * 9)) == (
        "the first 3 timed steps are 2.1 times as slow as the later ones: warm-up too short"
    )
    assert message(lasting(2.0, *[1.0] * 9)) == (
        "the first timed step is 2.0 times as slow as the later ones: warm-up too short"
    )
    assert message(lasting(1.2, *[1.0] * 9)) is None, "within a quarter"
    evaluated = lasting(30.0, *[1.0] * 4, 20.0, *[1.0] * 4, 20.0, *[1.0] * 4, 20.0, *[1.0] * 4)
    assert message(evaluated, of_loop=True) is None, "the first step is one of those that do more"
    assert message(lasting(2.0, *[1.0] * 8, 2.1)) == "noisy: steps vary by 101%", "a later step is as slow"
    assert message(lasting(2.0, *[1.0] * 4)) == "noisy: steps vary by 60%", "five steps do not show what is usual"


def test_caveat_of_noise_names_other_load_of_the_machine() -> None:
    noisy = lasting(*[1.0, 1.0, 1.3] * 7)
    busy = replace(CLEAN, load_average=3.1, cpu_cores=2, cpu_threads=2)
    assert message(noisy) == "noisy: steps vary by 30%"
    assert message(noisy, busy, busy) == "noisy: steps vary by 30% (load average 3.1 on 2 cores, other programs)"
    quiet = replace(busy, load_average=1.0)
    assert message(noisy, quiet, busy) == "noisy: steps vary by 30% (load average 3.1 on 2 cores)"
    unused = replace(busy, cpu_cores=64)
    assert message(noisy, unused, unused) == "noisy: steps vary by 30% (load average 3.1 on 64 cores)"


def test_rare_slow_steps_of_a_loop_do_not_count_as_noise() -> None:
    evaluated = lasting(*[1.0, 1.01] * 9, 30.0, 31.0)
    assert message(evaluated, of_loop=True) is None
    assert message(evaluated) is not None, "a built-in step always does the same"
