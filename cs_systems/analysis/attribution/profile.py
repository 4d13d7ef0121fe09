"""Trace prepared for the tables: its steps, the place of each kernel, and sums over the steps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import NamedTuple

import numpy as np

from cs_systems.analysis.attribution.gaps import Gaps, gaps_in
from cs_systems.analysis.attribution.inferred_layers import with_blocks
from cs_systems.analysis.attribution.inferred_phases import are_marked, how_inferred
from cs_systems.analysis.attribution.places import Place, attribute, main_thread
from cs_systems.analysis.attribution.sequence_numbers import route_of
from cs_systems.config import ConfigError, Phase
from cs_systems.core.collector import without_collector
from cs_systems.core.range_names import COMMUNICATION, PHASES, STEPS, UNATTRIBUTED, general, is_operator, meaning
from cs_systems.core.statistics import ROUNDING_S
from cs_systems.core.units import counted, percent
from cs_systems.readers._lost_kernels import zero_kernels
from cs_systems.readers.forms.columns import Bools, Categorical, Ints, Ranges, distinct
from cs_systems.readers.forms.trace import Function, Kernels, Step, Trace, steps_of

BY_PHASES = "no range is named step: each step is assumed to begin with its forward"
LEAST_LONGER = 0.01  # share of a step: kernels that end later belong to its time
MOST_NAMED = 5  # number of steps that a sentence lists
RECORDING = "recording"  # name of the only step if nothing marks steps
WHOLE = "no range marks steps or phases: the whole recording counts as one step"


class Sum(NamedTuple):
    calls: int
    time_s: float


class StepKernels(NamedTuple):
    """Totals of the kernels launched within one step, on one device."""

    calls: int
    time_s: float
    first_start_s: float
    last_end_s: float


@dataclass(frozen=True)
class Profile:
    """Input of the tables; kernels launched outside of the steps are in none of the sums.

    - `places`: the place of each kernel
    - `groups`: (kernel, place) → sum over all steps
    - `by_step`: (step number, device) → its kernels
    - `gaps`: device → the time without a kernel
    """

    trace: Trace
    steps: tuple[Step, ...]
    places: Categorical[Place]
    groups: dict[tuple[Function, Place], Sum]
    by_step: dict[tuple[int, int], StepKernels]
    gaps: dict[int, Gaps]
    notes: tuple[str, ...]
    incomplete: str | None = None  # describes missing kernels and their steps after a fault; also the first of `notes`
    why_no_blocks: str | None = None  # why there are no blocks, if the trace names no layer and repetition shows none
    how_layered: tuple[str, ...] = ()  # how layers or modules were inferred, if they were

    @property
    def devices(self) -> list[int]:
        return sorted({device for _, device in self.by_step})

    @cached_property
    def time_s(self) -> float:
        """Time of all kernels in all steps."""
        return sum(total.time_s for total in self.groups.values())

    @cached_property
    def step_phases(self) -> list[dict[str, float]]:
        """Kernel time of each phase, for each step."""
        return self.phase_times(np.ones(len(self.trace.kernels), bool))

    def phase_times(self, which: Bools) -> list[dict[str, float]]:
        """Return the time of each phase in the chosen kernels, for each step."""
        kernels, phases = self.trace.kernels, sorted({place.phase for place in self.places.values})
        number, inside = steps_of(kernels.launched_s, self.steps)
        phase = np.array([phases.index(place.phase) for place in self.places.values], np.int64)[self.places.codes]
        inside &= which
        both = (number * len(phases) + phase)[inside]
        times = np.bincount(both, (kernels.end_s - kernels.start_s)[inside], len(self.steps) * len(phases))
        table = times.reshape(len(self.steps), len(phases)).tolist()
        return [{name: time_s for name, time_s in zip(phases, row, strict=True) if time_s} for row in table]

    @property
    def kinds(self) -> dict[tuple[str, ...], int]:
        """Number of steps for each set of phases, the most frequent first; steps without a phase are not counted."""
        ordered = (tuple(phase for phase in PHASES if phase in times) for times in self.step_phases)
        return dict(Counter(kind for kind in ordered if kind).most_common())

    @property
    def phase_coverage(self) -> float:
        """Share of kernel time that belongs to a phase."""
        return self._share(place.phase != UNATTRIBUTED for _, place in self.groups)

    @property
    def layer_coverage(self) -> float:
        """Share of kernel time that belongs to a layer or named module.

        Communication, which has no layer, is excluded.
        """
        communication = self._share(place.layer == COMMUNICATION for _, place in self.groups)
        found = self._share(place.layer not in (UNATTRIBUTED, COMMUNICATION) for _, place in self.groups)
        return min(1.0, found / (1 - communication)) if found else 0.0

    @property
    def fused_share(self) -> float:
        """Share of kernel time in kernels that a compiler fused over several layers."""
        return self._share(place.fused for _, place in self.groups)

    def _share(self, which: Iterable[bool]) -> float:
        chosen = (total.time_s for total, counts in zip(self.groups.values(), which, strict=True) if counts)
        return sum(chosen) / self.time_s if self.time_s else 0.0

    @property
    def coverage(self) -> str:
        """Sentence about coverage, for the notes of a table."""
        communicates = any(place.layer == COMMUNICATION for _, place in self.groups)
        return (
            f"{percent(self.phase_coverage)} of the kernel time belongs to a phase, and {percent(self.layer_coverage)} "
            f"{'of the computation ' if communicates else ''}to a layer or named module"
        )


@without_collector()
def profile(
    trace: Trace,
    steps: str | None = None,
    between: tuple[float, float] | None = None,
    also: Sequence[str] = (),
) -> Profile:
    """Return the profile of a trace: choose the steps and attribute every kernel.

    Args:
        trace: The trace.
        steps: The name of the steps' ranges, or a glob; None means `step`, `ProfilerStep#*`, from one forward to the
            next, or the whole recording.
        between: Start and end of the only step, in s since the start of the recording.
        also: Notes of `known_ranges` about the meaning of ranges.

    Raises:
        ConfigError: No step is found, or no kernel in one.
    """
    chosen, how = find_steps(trace, steps, between)
    chosen, longer = (chosen, 0) if between else _until_idle(trace.kernels, chosen)
    if longer:
        how = [*how, f"{longer} of {len(chosen)} steps last until their kernels end, after their ranges"]
    every = chosen = [step._replace(number=number) for number, step in enumerate(chosen)]
    has_kernel, incomplete, left_out = _launched_in(trace, chosen), None, list[Step]()
    faulty = _with_faults(trace, chosen)
    if len(chosen) == 1 and faulty.any() and (recorded := _up_to_the_last_kernel(trace, chosen[0])):
        chosen, faulty, incomplete = [recorded], ~faulty, _cut_short(trace)
    if faulty.any():
        whole = has_kernel & ~faulty
        incomplete = _how_incomplete(trace, chosen, faulty, are_left_out=bool(whole.any()))
        if whole.any():
            left_out = [step for step in chosen if faulty[step.number]]
            chosen = [step for step in chosen if not faulty[step.number]]
            has_kernel = has_kernel[~faulty]
        else:
            trace = replace(trace, lacks_kernels=True)
    if empty := int((~has_kernel).sum()) if has_kernel.any() else 0:
        how = [*how, f"{empty} of {len(chosen)} steps launched no kernel and are left out"]
        chosen = [step for step, counts in zip(chosen, has_kernel.tolist(), strict=True) if counts]
    route, kernels = route_of(trace), trace.kernels
    layers = with_blocks(trace, attribute(trace, route), route)
    places = layers.places
    number, inside = steps_of(kernels.launched_s, chosen)
    known = steps_of(kernels.launched_s, left_out)[1] if left_out else np.zeros(len(kernels), bool)
    outside = {"before the first step": number < 0, "between or after the steps": (number >= 0) & ~inside}
    if len(kernels) and not inside.any():
        if between:
            begin = chosen[0].start_s - max(between[0], 0.0)
            known_s = kernels.launched_s[np.isfinite(kernels.launched_s)] - begin
            raise ConfigError(
                f"none of the {len(kernels)} kernels of {trace.source} was launched between {between[0]:g} and "
                f"{between[1]:g} s; choose other times: the launches are from {known_s.min():.6g} to "
                f"{known_s.max():.6g} s"
            )
        raise ConfigError(
            f"{trace.source}: none of its {len(kernels)} kernels was launched inside {_listed(chosen)}; choose other "
            f"ranges as steps: {_names(trace)}"
        )
    if len(kernels) and not (kernels.end_s > kernels.start_s)[inside].any():
        raise ConfigError(f"{trace.source} is damaged: its kernels take no time; record again")
    notes = [*filter(None, [incomplete]), *trace.limitations, *how, *also]
    if any(place.phase == Phase.BACKWARD for place in places.values) and not are_marked(trace):
        notes.append(how_inferred(trace))
    if not kernels:
        notes.append("no kernels: the times are those of the ranges on the host, not of the device")
    for where, apart in outside.items():
        if count := int((apart & ~known).sum()):
            time_s = float((kernels.end_s - kernels.start_s)[apart & ~known].sum())
            notes.append(f"{count} kernels ({time_s * 1e3:.3g} ms) {where} are left out")
    if missing := int((~steps_of(trace.lost_launches, every)[1]).sum()):
        notes.append(f"{counted(missing, 'launched kernel')} outside of the steps are missing")
    if lost := int(np.isnan(kernels.launch_start_s[inside]).sum()):
        notes.append(f"{lost} kernels have no recorded launch and are unattributed")
    if graph := int(kernels.in_graph.sum()):
        notes.append(f"{graph} kernels ran in CUDA graphs: they have the phase of the graph's launch, and no layer")
    modules = trace.modules.how if kernels and trace.modules else None
    which = np.flatnonzero(inside)
    return Profile(
        trace,
        tuple(chosen),
        places,
        _groups(trace, places, which),
        _by_step(trace, number, which),
        gaps_in(kernels, chosen),
        tuple(notes),
        incomplete,
        layers.tried,
        tuple(filter(None, (layers.found, modules))),
    )


def restricted(
    profile: Profile, steps: Sequence[Step], windows: Sequence[Step] = (), device: int | None = None
) -> Profile:
    """Return the profile of a subset of steps of the same recording; places and notes are kept.

    windows: the times in which the device's idle time counts; by default those of the steps. device: the only one whose
    kernels count.
    """
    kernels = profile.trace.kernels
    number, inside = steps_of(kernels.launched_s, steps)
    if device is not None:
        inside &= kernels.device == device
    which = np.flatnonzero(inside)
    of_all = gaps_in(kernels, windows or steps)
    return replace(
        profile,
        steps=tuple(steps),
        groups=_groups(profile.trace, profile.places, which),
        by_step=_by_step(profile.trace, number, which),
        gaps={number: gaps for number, gaps in of_all.items() if device in (None, number)},
    )


def find_steps(
    trace: Trace, pattern: str | None, between: tuple[float, float] | None = None
) -> tuple[list[Step], list[str]]:
    """Return (steps, notes): the outermost matching ranges, in order; notes explain any other choice.

    Without a match by name, a step lasts from one forward to the last phase before the next; without phases, the whole
    recording is one step.

    Raises:
        ConfigError: No range matches the pattern, or no recorded time is between the two.
    """
    if between:
        return [_window(trace, *between)], []
    if pattern and (steps := _outermost(trace.ranges, pattern)):
        return steps, []
    if pattern:
        limits = f" ({'; '.join(trace.limitations)})" if trace.limitations else ""
        if not len(trace.ranges):
            raise ConfigError(
                f"{trace.source} has no range, so none is named {pattern!r}{limits}; leave out the range, and the "
                "whole recording is one step"
            )
        raise ConfigError(f"{trace.source}: no range is named {pattern!r}{limits}; choose among {_names(trace)}")
    named = _outermost(trace.ranges, *STEPS)
    for steps, note in ((named, []), (_steps_by_phases(trace.ranges), [BY_PHASES])):
        if steps and (not trace.kernels or _launched_in(trace, steps).any()):
            return steps, note
    if len(trace.ranges):
        return [_window(trace)], [f"{WHOLE}; choose ranges with --range, or a time with --between: {_names(trace)}"]
    return [_window(trace)], [f"{WHOLE}; choose a time with --between"]


def _outermost(ranges: Ranges, *globs: str) -> list[Step]:
    """Return the outermost ranges with one of the names; if there are none, those that match one of the globs."""
    names = {*ranges.name.values}
    exact = names & {*globs}
    steps: list[Step] = []
    for r in ranges.named(lambda name: name in exact or (not exact and any(fnmatchcase(name, glob) for glob in globs))):
        if r.end_s > r.start_s and (not steps or r.start_s > steps[-1].end_s - ROUNDING_S):
            steps.append(Step(r.name, r.start_s, r.end_s))
    return steps


def _until_idle(kernels: Kernels, steps: Sequence[Step]) -> tuple[list[Step], int]:
    """Return (steps, number of steps made longer): each lasts until its kernels end, if the device runs it alone.

    An inference engine launches its kernels, and its range ends before they run. A step keeps its end where kernels of
    earlier steps still run at its start, because steady steps overlap in this way, and where more work is launched.
    """
    launched = kernels.launched_s
    order = np.argsort(launched)
    # when all kernels before a launch have ended
    until = np.concatenate([[-math.inf], np.maximum.accumulate(kernels.end_s[order])])
    launched = launched[order]
    begins, ends = (np.array([step[edge] for step in steps]) for edge in (1, 2))
    first, beyond = np.searchsorted(launched, begins, "left"), np.searchsorted(launched, ends, "right")
    alone, done = until[first] <= begins, until[beyond]
    # work launched here stays outside of the step
    following = np.nextafter(np.append(launched, math.inf)[beyond], -math.inf)
    following = np.minimum(following, np.append(begins[1:], math.inf))
    lasting = np.where(alone & (beyond > first), np.minimum(done, following), -math.inf)
    longer = lasting > ends + LEAST_LONGER * (ends - begins)
    return [
        step._replace(end_s=end_s) if counts else step
        for step, end_s, counts in zip(steps, lasting.tolist(), longer.tolist(), strict=True)
    ], int(longer.sum())


def _with_faults(trace: Trace, steps: Sequence[Step]) -> Bools:
    """Return for each step whether kernels that were launched in it are missing, or last 0 s."""
    kernels = trace.kernels
    faults = np.concatenate([trace.lost_launches, kernels.launched_s[zero_kernels(kernels)]])
    number, inside = steps_of(faults, steps)
    return np.bincount(number[inside], minlength=len(steps)) > 0


def _up_to_the_last_kernel(trace: Trace, step: Step) -> Step | None:
    """Return the only step cut after its last recorded kernel, if most kernels were recorded; else None."""
    kernels, lost_s = trace.kernels, trace.lost_launches
    inside = steps_of(kernels.launched_s, [step])[1]
    if inside.sum() <= len(lost_s) or zero_kernels(kernels).any() or lost_s.min() <= kernels.launched_s[inside].max():
        return None
    return step._replace(end_s=float(kernels.end_s[inside].max()))


def _cut_short(trace: Trace) -> str:
    """Return a sentence on how many of the last launched kernels are missing, and the consequence."""
    lost, launches = len(trace.lost_launches), len(trace.lost_launches) + len(trace.kernels)
    return (
        f"incomplete trace: the last {lost:,} of {counted(launches, 'launched kernel')} ({lost / launches:.1%}) are "
        "missing; the time up to the last recorded kernel is judged"
    )


def _how_incomplete(trace: Trace, steps: Sequence[Step], faulty: Bools, *, are_left_out: bool) -> str:
    """Return a sentence on the kernels that are missing or last 0 s: how many, where, and the consequence."""
    kernels, inside = trace.kernels, [step for step in steps if faulty[step.number]]
    zero = kernels.launched_s[zero_kernels(kernels)]
    lost, zero = (time_s[steps_of(time_s, inside)[1]] for time_s in (trace.lost_launches, zero))
    launches = len(trace.lost_launches) + len(kernels)
    what, follows = [], "kernel times and counts are too low, and idle time is unknown"
    if len(lost):
        what.append(f"{len(lost):,} of {counted(launches, 'launched kernel')} ({len(lost) / launches:.1%}) are missing")
    if len(zero):
        what.append(f"{len(zero):,} of {counted(len(kernels), 'kernel')} ({len(zero) / len(kernels):.1%}) last 0 s")
    times = np.concatenate([lost, zero])
    times = times[np.isfinite(times)] - _window(trace).start_s
    between = f" (launched from {times.min():.6g} to {times.max():.6g} s)" if len(times) else ""
    where = "" if len(steps) == 1 else f" in all {len(steps)} steps"
    if are_left_out:
        are_named = len({step.name for step in steps}) == len(steps)
        names = [step.name if are_named else f"step {step.number}" for step in inside[:MOST_NAMED]]
        where = f" in {len(inside)} of {len(steps)} steps, {', '.join(names)}{' …' if len(inside) > MOST_NAMED else ''}"
        follows = "left out of all tables"
    return f"incomplete trace: {' and '.join(what)}{where}{between}; {follows}"


def _launched_in(trace: Trace, steps: Sequence[Step]) -> Bools:
    """Return for each step whether a kernel was launched in it."""
    number, inside = steps_of(trace.kernels.launched_s, steps)
    return np.bincount(number[inside], minlength=len(steps)) > 0


def _window(trace: Trace, from_s: float = 0.0, to_s: float = math.inf) -> Step:
    """Return the step between two times since the start of the recording; by default, the whole recording."""
    kernels, ranges, operators = trace.kernels, trace.ranges, trace.operators
    begins = [ranges.start_s, kernels.start_s, kernels.launch_start_s]
    ends = [ranges.end_s, kernels.end_s, kernels.launch_end_s, trace.lost_launches]
    if operators is not None:
        begins, ends = [*begins, operators.start_s], [*ends, operators.end_s]
    start, end = float(np.nanmin(np.concatenate(begins))), float(np.nanmax(np.concatenate(ends)))
    if end <= start:
        raise ConfigError(f"{trace.source} is damaged: its recording lasts 0 s; record again")
    if not from_s < min(to_s, end - start):
        raise ConfigError(
            f"no part of {trace.source} was recorded between {from_s:g} and {to_s:g} s; choose times from 0 to "
            f"{end - start:.6g} s, when its recording ends"
        )
    return Step(RECORDING, start + max(from_s, 0.0), min(start + to_s, end), takes_earlier=from_s <= 0)


def _steps_by_phases(ranges: Ranges) -> list[Step]:
    main = main_thread(ranges)
    phases = [r for r in ranges.named(lambda name: meaning(name).phase) if r.thread == main]
    forwards = np.array([r.start_s for r in phases if meaning(r.name).phase == Phase.FORWARD])
    steps: list[Step] = []
    for r in phases:
        begins = meaning(r.name).phase == Phase.FORWARD
        if meaning(r.name).phase == Phase.OPTIMIZER:  # `optimizer.step(closure)` runs a forward
            first, last = np.searchsorted(forwards, [r.start_s, r.end_s])
            begins = bool(first < last)
        if begins and (not steps or r.start_s >= steps[-1].end_s):
            steps.append(Step("step", r.start_s, r.end_s))
        elif steps:
            steps[-1] = steps[-1]._replace(end_s=max(r.end_s, steps[-1].end_s))
    return steps


def _groups(trace: Trace, places: Categorical[Place], which: Ints) -> dict[tuple[Function, Place], Sum]:
    """Return calls and time of the kernels `which`, by kernel and place."""
    kernels = trace.kernels
    functions, where = kernels.function.codes[which], places.codes[which]
    first, codes = distinct(functions, where)
    time_s = np.bincount(codes, (kernels.end_s - kernels.start_s)[which])
    sums = map(Sum, np.bincount(codes).tolist(), time_s.tolist())
    of = zip(functions[first].tolist(), where[first].tolist(), strict=True)
    return {
        (kernels.function.values[function], places.values[place]): one
        for (function, place), one in zip(of, sums, strict=True)
    }


def _by_step(trace: Trace, number: Ints, which: Ints) -> dict[tuple[int, int], StepKernels]:
    kernels = trace.kernels
    number, device = number[which], kernels.device[which]
    start, end = kernels.start_s[which], kernels.end_s[which]
    first, codes = distinct(number, device)
    earliest, latest = start[first], end[first]
    np.minimum.at(earliest, codes, start)
    np.maximum.at(latest, codes, end)
    columns = (np.bincount(codes), np.bincount(codes, end - start), earliest, latest)
    keys = zip(number[first].tolist(), device[first].tolist(), strict=True)
    rows = map(StepKernels, *(column.tolist() for column in columns))
    return dict(sorted(zip(keys, rows, strict=True)))


def _names(trace: Trace) -> str:
    """Return the names of ranges for a hint; operators and modules only if there are no others."""
    found = Counter(map(general, trace.ranges.name))
    own = {name: count for name, count in found.items() if not _is_operator_or_module(trace, name)}
    found = Counter(own) or found
    listed = ", ".join(f"{name!r} ({count}×)" for name, count in found.most_common(12))
    return listed + (" …" if len(found) > 12 else "")


def _is_operator_or_module(trace: Trace, name: str) -> bool:
    return is_operator(name) or (trace.modules is not None and trace.modules.is_module(name))


def _listed(steps: Sequence[Step]) -> str:
    names = dict.fromkeys(step.name for step in steps)
    return f"the {counted(len(steps), 'range')} {', '.join(map(repr, list(names)[:3]))}{' …' if len(names) > 3 else ''}"
