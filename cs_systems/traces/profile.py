"""Trace prepared for tables: its steps, the place of each kernel, and the sums over the steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import NamedTuple

import numpy as np

from cs_systems.config import ConfigError, Phase
from cs_systems.traces.attribution import Place, attribute, main_thread
from cs_systems.traces.gaps import Gaps, gaps_in
from cs_systems.traces.range_names import STEPS, UNATTRIBUTED, meaning
from cs_systems.traces.trace import (
    Categorical,
    Function,
    Ints,
    Ranges,
    Step,
    Trace,
    distinct,
    steps_of,
    without_collector,
)


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
    """Input of the tables; kernels launched outside of every step are in none of the sums.

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

    @property
    def devices(self) -> list[int]:
        return sorted({device for _, device in self.by_step})

    @cached_property
    def time_s(self) -> float:
        """Time of all kernels in all steps."""
        return sum(total.time_s for total in self.groups.values())

    @property
    def phase_coverage(self) -> float:
        """Share of kernel time that belongs to a phase."""
        return self._share(place.phase != UNATTRIBUTED for _, place in self.groups)

    @property
    def layer_coverage(self) -> float:
        """Share of kernel time that belongs to a layer or a named module."""
        return self._share(place.layer != UNATTRIBUTED for _, place in self.groups)

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
        return (
            f"{self.phase_coverage:.1%} of the kernel time belongs to a phase, and {self.layer_coverage:.1%} to a "
            "layer or named module"
        )


@without_collector()
def profile(trace: Trace, steps: str | None = None) -> Profile:
    """Return the profile of a trace: choose the steps and attribute every kernel.

    Args:
        trace: The trace.
        steps: A glob for the names of the steps' ranges; None means `step`, `ProfilerStep#*`, or from one forward to
            the next.

    Raises:
        ConfigError: No step is found, or no kernel in one.
    """
    chosen, note = find_steps(trace, steps)
    places, kernels = attribute(trace), trace.kernels
    number, inside = steps_of(kernels.launched_s, chosen)
    outside = {"before the first step": number < 0, "between or after the steps": (number >= 0) & ~inside}
    if len(kernels) and not inside.any():
        raise ConfigError(
            f"{trace.source}: none of its {len(kernels)} kernels was launched inside {_listed(chosen)} "
            f"({(number < 0).sum()} before the first); choose other ranges with --range: {_names(trace.ranges)}"
        )
    if len(kernels) and not (kernels.end_s > kernels.start_s)[inside].any():
        raise ConfigError(f"{trace.source} is damaged: its kernels take no time; record again")
    notes = [*trace.limitations, *([note] if note else [])]
    if not kernels:
        notes.append("no kernels: the times are those of the ranges on the host, not of the device")
    for where, left_out in outside.items():
        if count := int(left_out.sum()):
            time_s = float((kernels.end_s - kernels.start_s)[left_out].sum())
            notes.append(f"{count} kernels ({time_s * 1e3:.3g} ms) {where} are left out")
    if lost := int(np.isnan(kernels.launch_start_s).sum()):
        notes.append(f"{lost} kernels have no recorded launch and are unattributed")
    if graph := int(kernels.in_graph.sum()):
        notes.append(f"{graph} kernels ran in CUDA graphs: they have the phase of the graph's launch, and no layer")
    which = np.flatnonzero(inside)
    return Profile(
        trace,
        tuple(chosen),
        places,
        _groups(trace, places, which),
        _by_step(trace, number, which),
        gaps_in(kernels, chosen),
        tuple(notes),
    )


def find_steps(trace: Trace, pattern: str | None) -> tuple[list[Step], str | None]:
    """Return (steps, note): the outermost matching ranges, in order; the note is None if they match by name.

    Without a match by name, a step lasts from one forward to the last phase before the next, and the note explains
    this.

    Raises:
        ConfigError: No step is found.
    """
    globs = (pattern,) if pattern else STEPS
    steps: list[Step] = []
    for r in trace.ranges.named(lambda name: any(fnmatchcase(name, glob) for glob in globs)):
        if r.end_s > r.start_s and (not steps or r.start_s >= steps[-1].end_s):
            steps.append(Step(r.name, r.start_s, r.end_s))
    if steps:
        return steps, None
    if pattern is None and (steps := _steps_by_phases(trace.ranges)):
        return (
            steps,
            "no range is named step: a step is assumed to last from one forward to the last phase before the next",
        )
    wanted = repr(pattern) if pattern else " or ".join(map(repr, STEPS))
    limits = "".join(f"; {limitation}" for limitation in trace.limitations)
    raise ConfigError(
        f"{trace.source}: no range is named {wanted}; choose one with --range: {_names(trace.ranges)}{limits}"
    )


def _steps_by_phases(ranges: Ranges) -> list[Step]:
    main = main_thread(ranges)
    steps: list[Step] = []
    for r in ranges.named(lambda name: meaning(name).phase):
        if r.thread != main:
            continue
        if meaning(r.name).phase == Phase.FORWARD and (not steps or r.start_s >= steps[-1].end_s):
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


def _names(ranges: Ranges) -> str:
    found = Counter(ranges.name)
    listed = ", ".join(f"{name!r} ({count}×)" for name, count in found.most_common(12))
    return listed + (" …" if len(found) > 12 else "")


def _listed(steps: Sequence[Step]) -> str:
    names = dict.fromkeys(step.name for step in steps)
    return f"the {len(steps)} range(s) {', '.join(map(repr, list(names)[:3]))}{' …' if len(names) > 3 else ''}"
