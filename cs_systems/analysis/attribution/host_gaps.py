"""Work of the host while no kernel runs and no CUDA call is made; and the places where it waits for the device.

Both name the innermost that the recording tells: a Python function, a range of the user, or an operator.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Annotated, TypedDict

import numpy as np

from cs_systems.analysis.attribution.gaps import Gaps, silences
from cs_systems.core.range_names import general, is_operator
from cs_systems.core.tables import Column
from cs_systems.readers._stalls import SYNCHRONISATION, stalls
from cs_systems.readers.forms.columns import UNKNOWN, Floats
from cs_systems.readers.forms.trace import Step, Trace, steps_of

NO_CALL = "no CUDA call, and nothing recorded"
PROBES = 9  # times within a stretch at which is asked what the host did


class HostGapRow(TypedDict):
    """Work of the host in a step while no kernel ran and no CUDA call was made, in `host_gaps`."""

    host: Annotated[str, Column("the host was in", beside=55)]
    stretches_per_step: Annotated[float, Column("stretches", drop=2)]
    time_s: float
    share: Annotated[float, Column("of wall time", drop=9)]
    longest_s: Annotated[float, Column("longest", drop=1)]


class WaitRow(TypedDict):
    """Calls of one kind and place in a step that waited for the device, in `waits`."""

    call: str
    within: Annotated[str, Column("called by", beside=40)]
    calls_per_step: Annotated[float, Column("calls", drop=8)]
    time_s: Annotated[float, Column("waited")]


def host_gap_rows(trace: Trace, gaps: Gaps | None, steps: list[Step] | tuple[Step, ...]) -> list[HostGapRow]:
    """Return a row for each kind of work of the host, the longest first; gaps: those of one device."""
    if gaps is None or not len(gaps.step):
        return []
    late = ~gaps.pending & ~gaps.lost
    starts, ends = gaps.start_s[late], gaps.end_s[late]
    silent = silences(trace, float(gaps.start_s.min()), float(gaps.end_s.max()))
    lasted, stretches, longest = (
        defaultdict[str, float](float),
        defaultdict[str, int](int),
        defaultdict[str, float](float),
    )
    for begin, end in silent:
        idle_s = float(np.clip(np.minimum(ends, end) - np.maximum(starts, begin), 0.0, None).sum())
        if idle_s <= 0:
            continue
        shares = _work(trace, begin, end)
        for name, share in shares.items():
            lasted[name] += idle_s * share
            stretches[name] += 1
            longest[name] = max(longest[name], idle_s * share)
    count, wall_s = len(steps), sum(step.end_s - step.start_s for step in steps)
    return [
        {
            "host": name,
            "stretches_per_step": stretches[name] / count,
            "time_s": time_s / count,
            "share": time_s / wall_s,
            "longest_s": longest[name],
        }
        for name, time_s in sorted(lasted.items(), key=lambda item: -item[1])
    ]


def _work(trace: Trace, begin_s: float, end_s: float) -> dict[str, float]:
    """Return the share of a stretch that the launching thread spent in each named work."""
    times = begin_s + (end_s - begin_s) * (np.arange(PROBES) + 0.5) / PROBES
    names = [work_at(trace, time) for time in times.tolist()]
    return {name: names.count(name) / PROBES for name in dict.fromkeys(names)}


def work_at(trace: Trace, time_s: float) -> str:
    """Return the innermost named work of the launching thread at a time."""
    thread = launching_thread(trace)
    line = trace.ranges.timelines.get(thread)
    opened = [name for name in line.at(time_s) if not is_operator(name)] if line is not None else []
    own = [name for name in opened if not _is_module(trace, name) and not general(name).startswith("ProfilerStep")]
    if own:
        return general(own[-1])
    if trace.operators is not None:
        number = int(trace.operators.at(np.array([thread]), np.array([time_s]))[0])
        outermost = number
        while number != UNKNOWN:
            outermost, number = number, int(trace.operators.parent[number])
        if outermost != UNKNOWN:
            return trace.operators.signature[outermost].name
    return NO_CALL


def _is_module(trace: Trace, name: str) -> bool:
    return trace.modules is not None and trace.modules.is_module(name)


def launching_thread(trace: Trace) -> int:
    """Return the thread that launched the first kernel: Python's, not autograd's; UNKNOWN without a launch."""
    known = np.flatnonzero(trace.kernels.thread != UNKNOWN)
    return int(trace.kernels.thread[known[0]]) if len(known) else UNKNOWN


def wait_rows(trace: Trace, steps: list[Step] | tuple[Step, ...]) -> list[WaitRow]:
    """Return a row for each call that waits for the device and the place that calls it, the longest wait first."""
    calls = [call for call in trace.calls if stalls(call.name) == SYNCHRONISATION]
    starts: Floats = np.array([call.start_s for call in calls])
    inside = steps_of(starts, steps)[1] if calls else np.empty(0, bool)
    lasted, count = defaultdict[tuple[str, str], float](float), Counter[tuple[str, str]]()
    for call, counts in zip(calls, inside.tolist(), strict=True):
        if counts:
            key = call.name, _caller(trace, call.thread, call.start_s)
            lasted[key] += call.end_s - call.start_s
            count[key] += 1
    return [
        {
            "call": name,
            "within": within,
            "calls_per_step": count[name, within] / len(steps),
            "time_s": time_s / len(steps),
        }
        for (name, within), time_s in sorted(lasted.items(), key=lambda item: -item[1])
    ]


def _caller(trace: Trace, thread: int, time_s: float) -> str:
    """Return the outermost operator around a call, and the user's range around that: `aten::item in clip_grads`."""
    found = []
    if trace.operators is not None:
        number = int(trace.operators.at(np.array([thread]), np.array([time_s]))[0])
        outermost = UNKNOWN
        while number != UNKNOWN:
            outermost, number = number, int(trace.operators.parent[number])
        if outermost != UNKNOWN:
            found.append(trace.operators.signature[outermost].name)
    line = trace.ranges.timelines.get(thread)
    opened = line.at(time_s) if line is not None else ()
    own = [general(name) for name in opened if not is_operator(name) and not _is_module(trace, name)]
    own = [name for name in own if not name.startswith("ProfilerStep")]
    return " in ".join([*found, *own[-1:]])
