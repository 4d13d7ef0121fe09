"""Causes of slow first steps: each step compared with the steady state, with the known events in it."""

from __future__ import annotations

from statistics import median
from typing import Annotated, TypedDict

from cs_systems.core import statistics
from cs_systems.core.tables import Column, table
from cs_systems.record import Measurement, Sample

# A step within this share of the steady median, or within the timed steps' own spread, is steady.
STEADY = 0.05
# A clock below this fraction of the steady steps' clock slows a compute-bound step visibly.
CLOCK_STEADY = 0.97


class WarmupRow(TypedDict):
    """Step with its time and the known events in it; None means that a counter was not read."""

    step: int
    warmup: Annotated[bool, Column("warm-up")]
    wall_s: Annotated[float, Column("time", own_unit=True)]
    excess_s: Annotated[
        float, Column("above steady", "above steady: time beyond the median of the timed steps", own_unit=True)
    ]
    compile_s: float | None
    device_mallocs: int | None
    sm_clock_hz: float | None
    cause: str | None  # the explanations, in a fixed order; None for a steady step


@table("every step, warm-up included", "step warmup wall_s excess_s cause")
def warmup_curve(measurement: Measurement) -> list[WarmupRow]:
    """Return one row per step, warm-up first.

    Time that no counter explains is named "first use" in the first step (lazy loading of kernels,
    library handles, the autograd thread), and "unexplained" later.
    """
    timed = measurement.timed
    summary = statistics.summary([s.wall_s for s in timed])
    steady_s = summary.median
    noise_s = max(STEADY * steady_s, summary.p90 - steady_s)
    clocks = [s.sm_clock_hz for s in timed if s.sm_clock_hz]
    steady_hz = median(clocks) if clocks else None
    return [
        {
            "step": i,
            "warmup": s.warmup,
            "wall_s": s.wall_s,
            "excess_s": s.wall_s - steady_s,
            "compile_s": s.compile_s,
            "device_mallocs": s.device_mallocs,
            "sm_clock_hz": s.sm_clock_hz,
            "cause": _cause(s, i, s.wall_s - steady_s, noise_s, steady_hz),
        }
        for i, s in enumerate(measurement.samples)
    ]


def _cause(sample: Sample, index: int, excess_s: float, noise_s: float, steady_hz: float | None) -> str | None:
    if excess_s <= noise_s:
        return None
    causes = []
    compile_s = sample.compile_s or 0.0
    if compile_s > STEADY * excess_s:
        causes.append(f"compile and autotune {compile_s:.2f} s")
    if sample.device_mallocs:
        causes.append(f"{sample.device_mallocs} cudaMalloc")
    if steady_hz and sample.sm_clock_hz and sample.sm_clock_hz < CLOCK_STEADY * steady_hz:
        causes.append(f"clock {sample.sm_clock_hz / 1e6:.0f} of {steady_hz / 1e6:.0f} MHz")
    rest_s = excess_s - compile_s
    if index == 0 and rest_s > noise_s:
        causes.append("first use: lazy loading of kernels, library handles, threads")
    return "; ".join(causes) or "unexplained"
