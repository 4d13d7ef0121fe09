"""Caveats of a timing, from its samples and from the environment before and after it.

The limits are constants in this module, with their reasons.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from statistics import median

from cs_systems.config import RunConfig
from cs_systems.core import statistics
from cs_systems.core.caveats import Caveat, GraphBreakRow, broken_graph, caveat, no_number
from cs_systems.core.units import counted
from cs_systems.record import Environment, Measurement

# The device waited for the host if it finishes a phase this soon after the host submitted it, as a share of the phase.
LAUNCH_BOUND_LAG = 0.10
# Below this share of its highest clock while throttled, a GPU is measurably slower.
CLOCK_LIMIT = 0.97


def timing_caveats(
    measurement: Measurement,
    before: Environment,
    after: Environment,
    *,
    profiler: str = RunConfig.profiler,
    loss: float | None = None,
    phase: str | None = None,
    graph_breaks: Sequence[GraphBreakRow] = (),
) -> tuple[Caveat, ...]:
    """Return all caveats about a measurement.

    Args:
        measurement: the samples to judge.
        before: the environment before the measurement.
        after: the environment after the measurement.
        profiler: the profiler that was active, or "none".
        loss: the loss of the last step; None where there is none.
        graph_breaks: places where torch.compile left the graph.
        phase: the only phase to judge, where the others merely prepare it; None judges the step and all its phases.
    """
    return (
        *_profiled(profiler),
        *of_spread(measurement, phase or "step"),
        *_launch_bound(measurement, [phase] if phase else measurement.phase_names()),
        *_broken_graph(graph_breaks),
        *(found for check in (_recompiled, _allocated) for found in check(measurement)),
        *_machine(measurement, before, after),
        *no_number(loss),
    )


def _profiled(profiler: str) -> Iterator[Caveat]:
    """Yield a caveat if a profiler was active: its overhead is in the times."""
    if profiler != RunConfig.profiler:
        yield caveat("profiled", f"measured under {profiler}; the times include the profiler's overhead")


def of_spread(m: Measurement, phase: str) -> Iterator[Caveat]:
    """Yield a caveat if the samples of a phase are too few, or differ too much."""
    durations = m.durations_s(phase)
    if len(durations) < 3:
        steps = "1 timed step is" if len(durations) == 1 else f"{len(durations)} timed steps are"
        yield caveat("few-samples", f"{steps} too few to show a spread")
        return
    if reasons := statistics.unstable(durations):
        yield caveat("unstable", "; ".join(reasons))


def launch_bound_phases(m: Measurement, phases: Iterable[str] | None = None) -> list[str]:
    """Return the phases, of these or of all, that the device finished as soon as the host had submitted them."""
    bound = []
    for phase in m.phase_names() if phases is None else phases:
        shares = [s.lag_s[phase] / s.phases_s[phase] for s in m.timed if s.lag_s and s.phases_s[phase] > 0]
        if shares and median(shares) < LAUNCH_BOUND_LAG:
            bound.append(phase)
    return bound


def _launch_bound(m: Measurement, phases: Iterable[str]) -> Iterator[Caveat]:
    if bound := launch_bound_phases(m, phases):
        yield caveat("launch-bound", f"the GPU waited for kernel launches in: {', '.join(bound)}")


def _broken_graph(rows: Sequence[GraphBreakRow]) -> Iterator[Caveat]:
    if rows:
        yield caveat("graph-breaks", f"torch.compile {broken_graph(rows)}")


def _recompiled(m: Measurement) -> Iterator[Caveat]:
    count = sum(s.compiles or 0 for s in m.timed)
    if count:
        yield caveat("recompiled", f"{counted(count, 'compilation')} during timed steps")


def _allocated(m: Measurement) -> Iterator[Caveat]:
    count = sum(s.device_mallocs or 0 for s in m.timed)
    if count:
        yield caveat("cudaMalloc", f"{counted(count, 'cudaMalloc call')} during timed steps")


def _machine(m: Measurement, before: Environment, after: Environment) -> Iterator[Caveat]:
    reasons = sorted({*(before.throttle_reasons or ()), *(after.throttle_reasons or ())})
    during = [s.sm_clock_hz for s in m.timed if s.sm_clock_hz]  # an idle GPU's clock changes after the run
    clock, highest = median(during) if during else after.sm_clock_hz, after.sm_clock_max_hz
    if reasons and clock and highest and clock < CLOCK_LIMIT * highest:
        yield caveat(
            "throttled", f"the SM clock was {clock / 1e6:.0f} of {highest / 1e6:.0f} MHz ({', '.join(reasons)})"
        )
    others = max(before.other_processes or 0, after.other_processes or 0)
    if others:
        yield caveat("shared-gpu", f"{counted(others, 'other process', 'other processes')} used the GPU")
