"""Kernel time by the program's own ranges, whatever their names, nested as they were open when a kernel was launched.

Ranges of the launching thread are inside those that were open on the main thread at that time: backward runs in
autograd's thread while the main thread waits in the range around it. Occurrences of one name in one place share a row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Annotated, NamedTuple, TypedDict

import numpy as np

from cs_systems.analysis.attribution.operator_table import flops_of_outermost, operators_of
from cs_systems.analysis.attribution.places import NOTHING_OPEN, main_timeline
from cs_systems.analysis.attribution.profile import Profile
from cs_systems.analysis.attribution.tables import NO_COSTS, Costs
from cs_systems.core.printable import INDENT
from cs_systems.core.range_names import general
from cs_systems.core.tables import Column, table
from cs_systems.readers.forms.columns import Floats, Ints, Ranges, Timeline, distinct
from cs_systems.readers.forms.trace import steps_of


class RangeTreeRow(TypedDict):
    """Kernel time in a range of the program in one place, in `range_tree`; the share is of all kernel time."""

    range: Annotated[str, Column(beside=55)]  # indented by depth
    path: Annotated[str, Column(beside=50)]  # names from the outermost range on
    calls_per_step: Annotated[float, Column("kernels", drop=8)]  # number of kernels
    time_s: float
    self_s: Annotated[float, Column("self time", drop=1)]  # without nested ranges
    share: Annotated[float, Column(drop=9)]
    idle_s: float | None  # time when it was open on the host and no kernel ran; None for several devices
    flops: float | None  # FLOPs of the operators with a formula
    achieved_flops_per_s: Annotated[float | None, Column("rate", drop=6)]


# ranges in a path; a program that opens ranges and never closes them nests thousands
DEEPEST = 64


class Path(NamedTuple):
    """Ranges that are open together, outermost first; the first `outer` of them are of the main thread."""

    names: tuple[str, ...]
    outer: int


@table(
    "ranges by the time of the kernels launched in them, nested, per step",
    "range calls_per_step time_s self_s share idle_s achieved_flops_per_s",
    most=30,
)
def range_tree(profile: Profile, costs: Costs = NO_COSTS) -> list[RangeTreeRow]:
    """Return one row for each path of ranges, per step; a range comes before nested ranges, longest first."""
    calls: dict[tuple[str, ...], float] = defaultdict(float)
    total: dict[tuple[str, ...], float] = defaultdict(float)
    own: dict[tuple[str, ...], float] = defaultdict(float)
    for path, count, time_s in _launched_in(profile):
        own[path.names] += time_s
        for depth in range(1, len(path.names) + 1):
            calls[path.names[:depth]] += count
            total[path.names[:depth]] += time_s
    idle, flops, steps = _idle_in(profile), _flops_in(profile), len(profile.steps)

    def order(path: tuple[str, ...]) -> list[tuple[float, str]]:
        return [(-total[path[: depth + 1]], path[depth]) for depth in range(len(path))]

    return [
        {
            "range": INDENT * (len(path) - 1) + path[-1],
            "path": " / ".join(path),
            "calls_per_step": calls[path] / steps,
            "time_s": total[path] / steps,
            "self_s": own[path] / steps,
            "share": total[path] / profile.time_s,
            "idle_s": None if idle is None else idle.get(path, 0.0) / steps,
            "flops": flops[path] / steps if path in flops else None,
            "achieved_flops_per_s": flops[path] / total[path] if path in flops and total[path] else None,
        }
        for path in sorted(total, key=order)
    ]


def _launched_in(profile: Profile) -> Iterator[tuple[Path, int, float]]:
    """Yield (path of open ranges, kernels, their time) of the kernels in the steps."""
    kernels = profile.trace.kernels
    _, inside = steps_of(kernels.launched_s, profile.steps)
    inside &= ~np.isnan(kernels.launch_start_s)
    for thread in np.unique(kernels.thread[inside]).tolist():
        mine = np.flatnonzero(inside & (kernels.thread == thread))
        paths, codes = _open(profile.trace.ranges, thread, kernels.launch_start_s[mine])
        times = np.bincount(codes, kernels.end_s[mine] - kernels.start_s[mine]).tolist()
        yield from zip(paths, np.bincount(codes).tolist(), times, strict=True)


def _flops_in(profile: Profile) -> dict[tuple[str, ...], float]:
    """Return a map from path to the FLOPs of the operators that ran in it in the steps, if any has a formula."""
    found: dict[tuple[str, ...], float] = defaultdict(float)
    if (ops := operators_of(profile.trace)) is None:
        return found
    flops = flops_of_outermost(ops)
    counts = steps_of(ops.start_s, profile.steps)[1] & (flops > 0)
    for thread in np.unique(ops.thread[counts]).tolist():
        mine = np.flatnonzero(counts & (ops.thread == thread))
        paths, codes = _open(profile.trace.ranges, thread, ops.start_s[mine])
        for path, summed in zip(paths, np.bincount(codes, flops[mine]).tolist(), strict=True):
            for depth in range(1, len(path.names) + 1):
                found[path.names[:depth]] += summed
    return found


def _idle_in(profile: Profile) -> dict[tuple[str, ...], float] | None:
    """Return a map from path to the time in the steps when it was open and no kernel ran; None for several devices."""
    if len(profile.gaps) != 1:
        return None
    (gaps,) = profile.gaps.values()
    edges = np.stack([gaps.start_s, gaps.end_s], axis=1).ravel()
    until = np.repeat(np.concatenate([[0.0], np.cumsum(gaps.end_s - gaps.start_s)]), 2)[1:-1]
    ranges, found = profile.trace.ranges, defaultdict[tuple[str, ...], float](float)
    if not len(edges):
        return found
    main = main_timeline(ranges)
    for thread, line in ranges.timelines.items():
        times = np.unique(np.concatenate([line.times[1:-1], main.times[1:-1]]))
        paths, codes = _open(ranges, thread, times[:-1])
        idle_s = np.bincount(codes, np.diff(np.interp(times, edges, until)), len(paths))
        for path, summed in zip(paths, idle_s.tolist(), strict=True):
            # the row of the main thread includes its time already
            for depth in range(path.outer + 1, len(path.names) + 1):
                found[path.names[:depth]] += summed
    return found


def _open(ranges: Ranges, thread: int, time_s: Floats) -> tuple[list[Path], Ints]:
    """Return (paths, codes): the paths of ranges that were open on a thread, and the path's index at each time.

    Time in ranges that are nested deeper than DEEPEST belongs to those around them.
    """
    main = main_timeline(ranges)
    line: Timeline[str] = ranges.timelines.get(thread, NOTHING_OPEN)
    outer = NOTHING_OPEN if line is main else main
    here, there = line.index(time_s), outer.index(time_s)
    first, codes = distinct(here, there)
    paths = []
    for own, other in zip(here[first].tolist(), there[first].tolist(), strict=True):
        around = outer.stacks[other]
        names = (*around, *line.stacks[own])[:DEEPEST]
        paths.append(Path(tuple(map(general, names)), min(len(around), DEEPEST)))
    return paths, codes
