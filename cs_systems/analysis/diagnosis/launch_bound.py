"""Rule for launch-bound steps: the GPU has no kernel to run because the host has not launched the next one yet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from cs_systems.analysis.attribution.gaps import LAUNCH
from cs_systems.analysis.attribution.tables import families, gaps, waits
from cs_systems.analysis.comparison.loop_findings import DISTRIBUTION_CHECKS, HOST_SYNC, INNER_LINES, WAITING
from cs_systems.analysis.comparison.loop_ranks import EXCHANGE, LOOP_RANKS
from cs_systems.analysis.diagnosis import WORTH, Diagnosis, Expected, Rule, Unknown
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis._measured import after
from cs_systems.analysis.diagnosis._remedies import COMPILED
from cs_systems.analysis.replay import LaunchesFree
from cs_systems.analysis.timing_caveats import launch_bound_phases
from cs_systems.core.caveats import GRAPH_BREAKS, REMOVE_BREAKS, broken_graph
from cs_systems.core.fields import Subject
from cs_systems.core.tables import Row
from cs_systems.core.units import human
from cs_systems.record import Measurement

COMPILE = "compile (torch.compile; --compile), or capture the step in a CUDA graph (torch.cuda.graph; --graph step)"
GRAPH = "capture the step in a CUDA graph (torch.cuda.graph; --graph step), or use a larger batch"
LARGER = "use a larger batch, because the step is a CUDA graph already"
PLAIN = "launch fewer and larger kernels, or capture them in a CUDA graph"  # for a program without PyTorch
# The collectives of several ranks are not captured.
RANKS, COMPILED_RANKS = (
    "compile (torch.compile; --compile), or use a larger batch for each rank",
    "use a larger batch for each rank",
)
# Share of the waits for launches. With less, a replay without launches also removes other work; with more, collectives
# that wait for another rank's launches fill gaps, and the replay keeps their time.
MOST_OF_THEM = 0.8
MANY_WAITS = 3  # per step
OF_CHECKS = "most of them are checks of torch.distributions: set_default_validate_args(False)"
COLLECTIVE = "collective"  # family of kernels
LEAST = 0.02  # share of the step of a phase that is named
OPTIONS = {"graph": ("step",), **COMPILED}


def find(evidence: Evidence) -> Diagnosis | Unknown | None:
    """Find the gaps between launches in a trace; without one, the phases that ended as soon as they were submitted.

    If only a profiled step is known, the profiler's own cost per launch is subtracted first.
    """
    step_s = evidence.step_s
    if step_s is None:
        return None
    if "gaps" in evidence.tables:
        return _traced(evidence, step_s)
    measurement = evidence.measurement
    if measurement is None:
        return None
    if evidence.is_loop:
        return _of_phases(evidence, step_s, _of_loop_s(evidence, measurement, step_s))
    floors = {name: floor for name in measurement.phase_names() if (floor := evidence.floor_s(name)) is not None}
    times_s = {name: evidence.phases_s(name) for name in launch_bound_phases(measurement, floors)}
    return _of_phases(evidence, step_s, times_s, floors)


def _of_phases(
    evidence: Evidence, step_s: float, times_s: Mapping[str, float], floors: Mapping[str, float] | None = None
) -> Diagnosis | None:
    """Return the diagnosis of phases that ended as soon as they were submitted, with their times.

    floors: the least time of each phase; None if nothing bounds their kernels.
    """
    if not times_s:
        return None
    lasted_s = min(step_s, sum(times_s.values()))
    cause = f"for {lasted_s / step_s:.0%} of the step ({', '.join(times_s)}) the GPU keeps waiting for kernel launches"
    rows: list[Row] = [{"phase": phase, "median_s": time_s} for phase, time_s in times_s.items()]
    at_best, takes = None, lasted_s if floors is None else None
    if floors is not None:
        rows = [{**row, "ceiling_s": floors[row["phase"]]} for row in rows]
        at_best = step_s - lasted_s + sum(min(floors[name], time_s) for name, time_s in times_s.items())
    return Diagnosis(
        cause,
        _remedy(evidence),
        step_s,
        at_best,
        evidence=tuple(rows),
        takes=takes,
        options=OPTIONS,
        expected=_expected(evidence),
    )


def _of_loop_s(evidence: Evidence, measurement: Measurement, step_s: float) -> dict[str, float]:
    """Return the launch-bound phases of a user's loop that are worth naming, without Python that uses no tensors.

    Other rules report that Python, and phases in which the GPU waits for something else than launches.
    """
    plain_s: Counter[str] = Counter()
    for row in INNER_LINES.of(evidence.tables):
        plain_s[row["phase"]] += row["time_s"] * row["is_plain"]  # type: ignore[assignment]
    names = [name for name in measurement.phase_names() if name not in WAITING]
    times_s = {name: evidence.phases_s(name) - plain_s[name] for name in launch_bound_phases(measurement, names)}
    return {name: time_s for name, time_s in times_s.items() if time_s >= LEAST * step_s}


def _traced(evidence: Evidence, step_s: float) -> Diagnosis | Unknown | None:
    # While the host waits for its batch it launches nothing; `data_input` reports that time.
    traced_s = waited_s = max(0.0, evidence.idle_s.get(LAUNCH, 0.0) - max(0.0, evidence.input_s - evidence.silent_s))
    if evidence.is_loop and evidence.measurement is not None:
        # other launches come from the program's own Python, which other rules report
        most_s = sum(_of_loop_s(evidence, evidence.measurement, step_s).values())
        hidden_s = min(_in_collectives_s(evidence, step_s), max(0.0, most_s - _computed_s(evidence)))
        waited_s = min(waited_s + hidden_s, most_s)
    rows: tuple[Row, ...] = tuple(gaps.of(evidence.tables))
    unprofiled = evidence.unprofiled_s
    if unprofiled and waited_s > WORTH * step_s >= waited_s - (step_s - unprofiled[1]):
        return Unknown(
            f"whether the GPU waits for kernel launches: {human(waited_s, 's')} of the recorded "
            f"{human(step_s, 's')}, which the profiler's own cost for each launch explains; time the step without it"
        )
    cause = f"{waited_s / step_s:.0%} of the step the GPU waits for kernel launches"
    at_best = step_s - waited_s
    if unprofiled:
        unprofiled = max(at_best, unprofiled[0]), max(at_best, unprofiled[1])
    return Diagnosis(
        cause,
        _remedy(evidence),
        step_s,
        at_best,
        evidence=rows,
        options=OPTIONS,
        unprofiled=unprofiled,
        expected=_expected(evidence),
        change=LaunchesFree() if MOST_OF_THEM * traced_s <= waited_s <= traced_s else None,
    )


def _in_collectives_s(evidence: Evidence, step_s: float) -> float:
    """Return the time of a rank's collectives in which they neither transfer nor wait for a late rank.

    They wait for the other ranks' launches then, and fill the gaps between kernels. 0 where that is not known.
    """
    exchange, mine = EXCHANGE.first(evidence.tables), LOOP_RANKS.first(evidence.tables)
    if exchange is None or mine is None or not mine["step_s"]:
        return 0.0
    lasted_s = sum(row["time_s"] for row in families.of(evidence.tables) if row["family"] == COLLECTIVE)
    return max(0.0, lasted_s - step_s * (exchange["transfer_share"] + mine["waiting_s"] / mine["step_s"]))


def _computed_s(evidence: Evidence) -> float:
    return sum(row["time_s"] for row in families.of(evidence.tables) if row["family"] != COLLECTIVE)


def _expected(evidence: Evidence) -> Expected | None:
    """Return the duration of the step as a CUDA graph: its device time, plus the wait for the next batch as before."""
    is_graph = evidence.setting("graph") == "step"
    return None if is_graph else after(evidence, "device-only", evidence.input_s)


def _waits(evidence: Evidence) -> int:
    """Return the number of the program's own waits for the GPU in a step."""
    return round(sum(row["calls_per_step"] for row in waits.of(evidence.tables) if HOST_SYNC in (row["within"] or "")))


def _remedy(evidence: Evidence) -> str:
    """Return a remedy that the program can use and does not use yet."""
    if evidence.setting("graph") == "step":
        return LARGER
    if breaks := GRAPH_BREAKS.of(evidence.tables):
        return f"{REMOVE_BREAKS}, because torch.compile {broken_graph(breaks)}"
    config, is_compiled = evidence.config, evidence.has_compiled_kernels
    if config is None and not evidence.uses_torch:
        return PLAIN
    if config is not None and config.is_distributed:
        return COMPILED_RANKS if is_compiled else RANKS
    remedy = GRAPH if is_compiled else COMPILE
    if evidence.is_loop and (count := _waits(evidence)) >= MANY_WAITS:
        checks = DISTRIBUTION_CHECKS.first(evidence.tables)
        which = OF_CHECKS if checks is not None and checks["step_waits"] > count / 2 else ".item(), synchronize()"
        remedy = f"remove its {count} waits for the GPU, which no graph can hold ({which}), then {remedy}"
    is_own = config is not None and config.subject is Subject.OWN  # --graph rejects it
    return remedy.replace("; --graph step", "") if is_own else remedy


RULE = Rule(find)
