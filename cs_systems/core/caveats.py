"""What makes a timing doubtful, and what to do about it. Pure functions over samples.

The limits are constants here, with their reasons; a caveat never changes a number.
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
    """A doubt about a result, as data: a `code` to group by, what was seen, and what to do about it."""

    code: str
    message: str
    remedy: str


# A device that finishes a phase within this share of the phase after the host submitted it was waiting for the host.
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
    """All doubts about a measurement that was taken between two looks at its environment.

    loss: of the last step, None where there is none.
    phase: the one that counts, where the others only prepare it; None: the step does, and all of its phases.
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
    """A timing that was taken under a profiler is no timing."""
    if profiler != "none":
        remedy = "quote the times of cs-systems time; those of a profile are for shares and causes"
        yield Caveat("profiled", f"timed under {profiler}, whose own cost is in the times", remedy)


def _no_number(loss: float | None) -> Iterator[Caveat]:
    if loss is not None and not math.isfinite(loss):
        code, what = ("nan-loss", "NaN") if math.isnan(loss) else ("inf-loss", "infinite")
        yield Caveat(code, f"the loss is {what}", "lower the learning rate or use another precision")


def _unstable(m: Measurement, phase: str) -> Iterator[Caveat]:
    durations = m.durations_s(phase)
    if len(durations) < 3:
        yield Caveat("few-samples", f"{len(durations)} timed steps show no spread", "raise --steps to 10 or more")
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
            f"the device waited for the host in: {', '.join(bound)}",
            "the time is Python's and the launches': raise the batch or the context, or use --compile",
        )


def _recompiled(m: Measurement) -> Iterator[Caveat]:
    count = sum(s.compiles or 0 for s in m.timed)
    if count:
        yield Caveat(
            "recompiled",
            f"{count} compilations fell into timed steps",
            "raise --warmup; a shape or a flag that changes between steps compiles again each time",
        )


def _allocated(m: Measurement) -> Iterator[Caveat]:
    count = sum(s.device_mallocs or 0 for s in m.timed)
    if count:
        yield Caveat(
            "cudaMalloc", f"{count} cudaMalloc calls fell into timed steps", "raise --warmup until the cache holds all"
        )


def _machine(m: Measurement, before: Environment, after: Environment) -> Iterator[Caveat]:
    reasons = sorted({*(before.throttle_reasons or ()), *(after.throttle_reasons or ())})
    during = [s.sm_clock_hz for s in m.timed if s.sm_clock_hz]  # after the run an idle card's clock falls, or recovers
    clock, highest = median(during) if during else after.sm_clock_hz, after.sm_clock_max_hz
    if reasons and clock and highest and clock < CLOCK_LIMIT * highest:
        yield Caveat(
            "throttled",
            f"the SM clock was {clock / 1e6:.0f} of {highest / 1e6:.0f} MHz ({', '.join(reasons)})",
            "measure in short rounds with --rounds, interleave what is compared, or cool the card",
        )
    others = max(before.other_processes or 0, after.other_processes or 0)
    if others:
        yield Caveat(
            "shared-gpu", f"{others} other process(es) used the GPU", "stop them or choose another --device cuda:N"
        )
