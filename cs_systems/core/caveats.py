"""Caveats: reasons to doubt a timing, each with its remedy. Pure functions over samples.

The limits are constants in this module, with their reasons. A caveat never changes a number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from cs_systems.core import statistics

if TYPE_CHECKING:
    from cs_systems.record import Environment, Measurement


@dataclass(frozen=True)
class Caveat:
    """Doubt about a result, as data: a `code` to group by, the observation, and its remedy."""

    code: str
    message: str
    remedy: str


# The device waited for the host if it finishes a phase this soon after the host submitted it, as a share of the phase.
LAUNCH_BOUND_LAG = 0.10
# Below this share of its highest clock while throttled, a GPU is measurably slower.
CLOCK_LIMIT = 0.97


def caveats(
    measurement: Measurement,
    before: Environment,
    after: Environment,
    *,
    profiler: str = "none",
    loss: float | None = None,
    phase: str | None = None,
) -> tuple[Caveat, ...]:
    """Return all caveats about a measurement.

    Args:
        measurement: the samples to judge.
        before: the environment before the measurement.
        after: the environment after the measurement.
        profiler: the profiler that was active, or "none".
        loss: the loss of the last step; None where there is none.
        phase: the only phase to judge, where the others merely prepare it; None judges the step and all its phases.
    """
    return (
        *_profiled(profiler),
        *_unstable(measurement, phase or "step"),
        *_launch_bound(measurement, [phase] if phase else measurement.phase_names()),
        *(caveat for check in (_recompiled, _allocated) for caveat in check(measurement)),
        *_machine(measurement, before, after),
        *_no_number(loss),
    )


def _profiled(profiler: str) -> Iterator[Caveat]:
    """Yield a caveat if a profiler was active: its overhead is in the times."""
    if profiler != "none":
        remedy = "use cs-systems time to measure times, and a profile to find shares and causes"
        yield Caveat("profiled", f"the times include the overhead of {profiler}", remedy)


def _no_number(loss: float | None) -> Iterator[Caveat]:
    if loss is not None and not math.isfinite(loss):
        code, what = ("nan-loss", "NaN") if math.isnan(loss) else ("inf-loss", "infinite")
        yield Caveat(code, f"the loss is {what}", "lower the learning rate or use another precision")


def _unstable(m: Measurement, phase: str) -> Iterator[Caveat]:
    durations = m.durations_s(phase)
    if len(durations) < 3:
        yield Caveat(
            "few-samples",
            f"{len(durations)} timed steps are too few to estimate the spread",
            "raise --steps to 10 or more",
        )
        return
    if reasons := statistics.unstable(durations):
        yield Caveat(
            "unstable",
            "; ".join(reasons),
            "close other programs, raise --warmup and --steps, compare medians only with --rounds and --repeats",
        )


def _launch_bound(m: Measurement, phases: Iterable[str]) -> Iterator[Caveat]:
    bound = []
    for phase in phases:
        shares = [s.lag_s[phase] / s.phases_s[phase] for s in m.timed if s.lag_s and s.phases_s[phase] > 0]
        if shares and median(shares) < LAUNCH_BOUND_LAG:
            bound.append(phase)
    if bound:
        yield Caveat(
            "launch-bound",
            f"the GPU waited for kernel launches in: {', '.join(bound)}",
            "use a larger batch or context, or --compile (reduce-overhead uses CUDA graphs)",
        )


def _recompiled(m: Measurement) -> Iterator[Caveat]:
    count = sum(s.compiles or 0 for s in m.timed)
    if count:
        yield Caveat(
            "recompiled",
            f"{count} compilations ran during timed steps",
            "raise --warmup, and keep shapes and flags the same in all steps",
        )


def _allocated(m: Measurement) -> Iterator[Caveat]:
    count = sum(s.device_mallocs or 0 for s in m.timed)
    if count:
        yield Caveat(
            "cudaMalloc",
            f"{count} cudaMalloc calls ran during timed steps",
            "raise --warmup until the allocator has cached enough memory",
        )


def _machine(m: Measurement, before: Environment, after: Environment) -> Iterator[Caveat]:
    reasons = sorted({*(before.throttle_reasons or ()), *(after.throttle_reasons or ())})
    during = [s.sm_clock_hz for s in m.timed if s.sm_clock_hz]  # an idle GPU's clock changes after the run
    clock, highest = median(during) if during else after.sm_clock_hz, after.sm_clock_max_hz
    if reasons and clock and highest and clock < CLOCK_LIMIT * highest:
        yield Caveat(
            "throttled",
            f"the SM clock was {clock / 1e6:.0f} of {highest / 1e6:.0f} MHz ({', '.join(reasons)})",
            "split the steps with --rounds, compare cells with --interleave, or cool the GPU",
        )
    others = max(before.other_processes or 0, after.other_processes or 0)
    if others:
        yield Caveat(
            "shared-gpu", f"{others} other process(es) used the GPU", "stop them or choose another --device cuda:N"
        )
