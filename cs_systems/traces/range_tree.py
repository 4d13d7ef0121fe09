"""Kernel time by the program's own ranges, whatever their names, nested as they were open when a kernel was launched.

Ranges of the launching thread are inside those that were open on the main thread at that time: backward runs in
autograd's thread while the main thread waits in the range around it. Occurrences of one name in one place share a row.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from cs_systems.core.rows import RangeTreeRow
from cs_systems.traces.attribution import NOTHING_OPEN, main_timeline
from cs_systems.traces.profile import Profile
from cs_systems.traces.range_names import general
from cs_systems.traces.tables import NO_COSTS, Costs
from cs_systems.traces.trace import steps_of

Path = tuple[str, ...]
INDENT = "· "


def range_tree(profile: Profile, costs: Costs = NO_COSTS) -> list[RangeTreeRow]:
    """Return one row for each path of ranges, a range before those inside it, the longest first; per step."""
    calls: dict[Path, int] = defaultdict(int)
    total: dict[Path, float] = defaultdict(float)
    own: dict[Path, float] = defaultdict(float)
    for path, count, time_s in _launched_in(profile):
        own[path] += time_s
        for depth in range(1, len(path) + 1):
            calls[path[:depth]] += count
            total[path[:depth]] += time_s
    steps = len(profile.steps)

    def order(path: Path) -> list[tuple[float, str]]:
        return [(-total[path[: depth + 1]], path[depth]) for depth in range(len(path))]

    return [
        {
            "range": INDENT * (len(path) - 1) + path[-1],
            "path": " / ".join(path),
            "calls_per_step": calls[path] / steps,
            "time_s": total[path] / steps,
            "self_s": own[path] / steps,
            "share": total[path] / profile.time_s,
        }
        for path in sorted(total, key=order)
    ]


def _launched_in(profile: Profile) -> list[tuple[Path, int, float]]:
    """Return (path of open ranges, kernels, their time) of the kernels in the steps."""
    kernels, ranges = profile.trace.kernels, profile.trace.ranges
    _, inside = steps_of(kernels.launched_s, profile.steps)
    inside &= ~np.isnan(kernels.launch_start_s)
    main, found = main_timeline(ranges), []
    for thread in np.unique(kernels.thread[inside]).tolist():
        mine = np.flatnonzero(inside & (kernels.thread == thread))
        line = ranges.timelines.get(thread, NOTHING_OPEN)
        outer = NOTHING_OPEN if line is main else main
        launched_s = kernels.launch_start_s[mine]
        both = line.index(launched_s) * len(outer.stacks) + outer.index(launched_s)
        pairs, codes = np.unique(both, return_inverse=True)
        times = np.bincount(codes, kernels.end_s[mine] - kernels.start_s[mine]).tolist()
        for pair, count, time_s in zip(pairs.tolist(), np.bincount(codes).tolist(), times, strict=True):
            here, there = divmod(pair, len(outer.stacks))
            found.append((tuple(map(general, (*outer.stacks[there], *line.stacks[here]))), count, time_s))
    return found


TABLES = {"range_tree": range_tree}
