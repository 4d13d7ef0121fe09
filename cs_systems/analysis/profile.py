"""A recording made ready for tables: its steps, where each kernel belongs, and what was summed over them. Floor 0."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

from cs_systems.analysis.attribution import Place, attribute, main_threads
from cs_systems.analysis.names import STEPS, UNATTRIBUTED, meaning
from cs_systems.analysis.trace import Function, Range, Recording
from cs_systems.config import ConfigError, Phase


class Step(NamedTuple):
    """One step by the host's clock: what its range enclosed."""

    name: str
    start_s: float
    end_s: float


class Sum(NamedTuple):
    calls: int
    time_s: float


class StepKernels(NamedTuple):
    """The kernels of one step on one device: those that were launched within it."""

    calls: int
    time_s: float
    first_start_s: float
    last_end_s: float


@dataclass(frozen=True, slots=True)
class Profile:
    """What the tables are made from. Kernels that no step launched are in none of the sums.

    `groups`: (kernel, place) → over all steps. `by_step`: (number of the step, device) → its kernels.
    """

    recording: Recording
    steps: tuple[Step, ...]
    places: list[Place]
    groups: dict[tuple[Function, Place], Sum]
    by_step: dict[tuple[int, int], StepKernels]
    notes: tuple[str, ...]

    @property
    def devices(self) -> list[int]:
        return sorted({device for _, device in self.by_step})

    @property
    def time_s(self) -> float:
        """Of all kernels in all steps."""
        return sum(total.time_s for total in self.groups.values())

    @property
    def phase_coverage(self) -> float:
        """The share of kernel time that belongs to a phase."""
        return self._share(place.phase for _, place in self.groups)

    @property
    def layer_coverage(self) -> float:
        """The share of kernel time that belongs to a layer or a named module."""
        return self._share(place.layer for _, place in self.groups)

    def _share(self, belongs: Iterable[str]) -> float:
        known = (
            total.time_s for where, total in zip(belongs, self.groups.values(), strict=True) if where != UNATTRIBUTED
        )
        return sum(known) / self.time_s if self.time_s else 0.0

    @property
    def coverage(self) -> str:
        """One sentence for under a table."""
        return (
            f"of the kernel time {self.phase_coverage:.1%} belongs to a phase and {self.layer_coverage:.1%} to a layer "
            "or named module"
        )


def profile(recording: Recording, steps: str | None = None) -> Profile:
    """Choose the steps by the glob of their range's name (None: `step`, `ProfilerStep#*`, or from one forward to the
    next) and attribute every kernel. Raises ConfigError where no step, or no kernel in one, is found."""
    chosen, note = find_steps(recording, steps)
    places = attribute(recording)
    groups, by_step, outside = _sums(recording, places, chosen)
    before, between = outside
    if not groups:
        raise ConfigError(
            f"{recording.source}: none of its {len(recording.kernels)} kernels was launched inside {_listed(chosen)} "
            f"({before.calls} before the first): choose other ranges with --range: {_names(recording.ranges)}"
        )
    notes = [*recording.limitations, *([note] if note else [])]
    if before.calls:
        notes.append(f"{before.calls} kernels ({before.time_s * 1e3:.3g} ms) before the first step are left out")
    if between.calls:
        notes.append(f"{between.calls} kernels ({between.time_s * 1e3:.3g} ms) between or after the steps are left out")
    if lost := sum(kernel.launch_start_s is None for kernel in recording.kernels):
        notes.append(f"{lost} kernels have no recorded launch and are unattributed")
    if graph := sum(kernel.in_graph for kernel in recording.kernels):
        notes.append(
            f"{graph} kernels ran in CUDA graphs: they have the phase of the graph's launch and no layer of their own"
        )
    return Profile(recording, tuple(chosen), places, groups, by_step, tuple(notes))


def find_steps(recording: Recording, pattern: str | None) -> tuple[list[Step], str | None]:
    """(the outermost ranges that match, in order; how they were found where that is not by their name)."""
    globs = (pattern,) if pattern else STEPS
    matching = [r for r in recording.ranges if any(fnmatchcase(r.name, glob) for glob in globs)]
    steps: list[Step] = []
    for r in sorted(matching, key=lambda r: (r.start_s, -r.end_s)):
        if not steps or r.start_s >= steps[-1].end_s:
            steps.append(Step(r.name, r.start_s, r.end_s))
    if steps:
        return steps, None
    if pattern is None and (steps := _steps_by_phases(recording.ranges)):
        return (
            steps,
            "no range is named step: a step is taken to last from one forward to the last phase before the next",
        )
    wanted = repr(pattern) if pattern else " or ".join(map(repr, STEPS))
    limits = "".join(f"; {limitation}" for limitation in recording.limitations)
    raise ConfigError(
        f"{recording.source}: no range is named {wanted}: choose with --range among {_names(recording.ranges)}{limits}"
    )


def _steps_by_phases(ranges: Sequence[Range]) -> list[Step]:
    mains = set(main_threads(ranges).values())
    phases = sorted((r for r in ranges if r.thread in mains and meaning(r.name).phase), key=lambda r: r.start_s)
    steps: list[Step] = []
    for r in phases:
        if meaning(r.name).phase == Phase.FORWARD and (not steps or r.start_s >= steps[-1].end_s):
            steps.append(Step("step", r.start_s, r.end_s))
        elif steps:
            steps[-1] = steps[-1]._replace(end_s=max(r.end_s, steps[-1].end_s))
    return steps


def _sums(
    recording: Recording, places: Sequence[Place], steps: Sequence[Step]
) -> tuple[dict[tuple[Function, Place], Sum], dict[tuple[int, int], StepKernels], tuple[Sum, Sum]]:
    """One pass: (by kernel and place, by step and device, (before the first step, elsewhere outside of steps))."""
    starts, ends = [step.start_s for step in steps], [step.end_s for step in steps]
    groups: dict[tuple[Function, Place], list[float]] = {}
    by_step: dict[tuple[int, int], list[float]] = {}
    outside = [0, 0.0], [0, 0.0]
    for kernel, place in zip(recording.kernels, places, strict=True):
        start, end = kernel.start_s, kernel.end_s
        time = start if kernel.launch_start_s is None else kernel.launch_start_s
        number = bisect_right(starts, time) - 1
        if number < 0 or time > ends[number]:
            rest = outside[number >= 0]
            rest[0] += 1
            rest[1] += end - start
            continue
        key = kernel.function, place
        if (sums := groups.get(key)) is None:
            sums = groups[key] = [0, 0.0]
        sums[0] += 1
        sums[1] += end - start
        where = number, kernel.device
        if (own := by_step.get(where)) is None:
            own = by_step[where] = [0, 0.0, start, end]
        own[0] += 1
        own[1] += end - start
        if start < own[2]:
            own[2] = start
        if end > own[3]:
            own[3] = end
    return (
        {key: Sum(int(calls), time) for key, (calls, time) in groups.items()},
        {key: StepKernels(int(calls), *rest) for key, (calls, *rest) in sorted(by_step.items())},
        (Sum(*outside[0]), Sum(*outside[1])),  # type: ignore[arg-type]
    )


def _names(ranges: Iterable[Range]) -> str:
    found = Counter(r.name for r in ranges)
    listed = ", ".join(f"{name!r} ({count}×)" for name, count in found.most_common(12))
    return listed + (" …" if len(found) > 12 else "")


def _listed(steps: Sequence[Step]) -> str:
    names = dict.fromkeys(step.name for step in steps)
    return f"the {len(steps)} range(s) {', '.join(map(repr, list(names)[:3]))}{' …' if len(names) > 3 else ''}"
