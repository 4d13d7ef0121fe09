"""Caveats of a timing, from its samples and from the environment before and after it.

The limits are constants in this module, with their reasons.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from statistics import mean, median

from cs_systems.config import RunConfig
from cs_systems.core import statistics
from cs_systems.core.caveats import SHARED, Caveat, GraphBreakRow, broken_graph, caveat, no_number
from cs_systems.core.step_kinds import step_kinds
from cs_systems.core.units import counted
from cs_systems.record import Environment, Measurement

# The device waited for the host if it finishes a phase this soon after the host submitted it, as a share of the phase.
LAUNCH_BOUND_LAG = 0.10
# Below this share of its highest clock while throttled, a GPU is measurably slower.
CLOCK_LIMIT = 0.97
# Load average, in processes, that this one may have caused itself before it measured.
ALONE = 1.5
# The first timed steps still warm up if they take this many times the later ones' median, of so many steps.
WARMING, FEWEST_WARMING = 1.25, 6


def timing_caveats(
    measurement: Measurement,
    before: Environment,
    after: Environment,
    *,
    profiler: str = RunConfig.profiler,
    loss: float | None = None,
    phase: str | None = None,
    graph_breaks: Sequence[GraphBreakRow] = (),
    of_loop: bool = False,
) -> tuple[Caveat, ...]:
    """Return all caveats about a measurement.

    Args:
        measurement: the samples to judge.
        before: the environment before the measurement.
        after: the environment after the measurement.
        profiler: the profiler that was active, or "none".
        loss: the loss of the last step; None where there is none.
        graph_breaks: places where torch.compile left the graph.
        of_loop: the steps are a user's own loop's, in which some may do more than others.
        phase: the only phase to judge, where the others merely prepare it; None judges the step and all its phases.
    """
    return (
        *_profiled(profiler),
        *of_spread(measurement, phase or "step", load_in_words(before, after), of_loop=of_loop),
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


def of_spread(m: Measurement, phase: str, load: str = "", *, of_loop: bool = False) -> Iterator[Caveat]:
    """Yield a caveat if the samples of a phase are too few, or differ too much. load: what else the machine did."""
    durations = m.durations_s(phase)
    if len(durations) < 3:
        steps = "1 timed step is" if len(durations) == 1 else f"{len(durations)} timed steps are"
        yield caveat("few-samples", f"{steps} too few to show a spread")
        return
    warming = _warming(m, durations)
    reasons = statistics.unstable(durations[warming:], of_loop=of_loop)
    if reasons:
        yield caveat("unstable", f"noisy: {'; '.join([*_short_warmup(durations, warming), *reasons])}{load}")
    elif warming:
        yield caveat("unstable", "; ".join(_short_warmup(durations, warming)))


def _warming(m: Measurement, durations: Sequence[float]) -> int:
    """Return how many of the first timed steps are slower than all later ones; those that compile do not count."""
    if len(durations) < FEWEST_WARMING or m.timed[0].round != m.timed[-1].round:
        return 0
    if any(kind.every and kind.positions[0] == 0 for kind in step_kinds(durations)):
        return 0  # the first step does more work, as others after it
    later = _later(durations)
    limit = max(WARMING * median(later), max(later))
    slow = takewhile(lambda pair: pair[0] > limit and not pair[1].compile_s, zip(durations, m.timed, strict=True))
    count = sum(1 for _ in slow)
    return count if count < len(durations) // 2 else 0


def _later(durations: Sequence[float]) -> Sequence[float]:
    """Return the second half, in which warm-up is over."""
    return durations[len(durations) // 2 :]


def _short_warmup(durations: Sequence[float], slow: int) -> list[str]:
    if not slow:
        return []
    times = mean(durations[:slow]) / median(_later(durations))
    steps = "first timed step is" if slow == 1 else f"first {slow} timed steps are"
    return [f"the {steps} {times:.1f} times as slow as the later ones: warm-up too short"]


def load_in_words(before: Environment, after: Environment) -> str:
    """Return what else the machine did, such as ` (load average 3.1 on 2 cores, other programs)`; "" if unknown."""
    load, cores = before.load_average, before.cpu_cores
    if load is None or not cores:
        return ""
    most = max(load, after.load_average or 0.0)
    others = ", other programs" if load > max(ALONE, cores - before.cpu_threads + ALONE) else ""
    return f" (load average {most:.1f} on {counted(cores, 'core')}{others})"


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
        yield caveat(SHARED, f"{counted(others, 'other process', 'other processes')} used the GPU")
