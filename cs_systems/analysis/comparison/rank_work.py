"""Work of one rank in a step, by kind: shows what work took the last rank longer than the others.

No kind includes waiting for other ranks. The host's time outside of every operator, CUDA call and collective is Python;
it is named by the user's innermost range, if there is one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from cs_systems.analysis.attribution.host_gaps import launching_thread
from cs_systems.analysis.attribution.kernel_families import family, is_collective
from cs_systems.analysis.attribution.overlap import GLOO, Intervals, host_work, intersection, union
from cs_systems.analysis.attribution.profile import Profile
from cs_systems.analysis.comparison.late_ranks import (
    EXPLAINS,
    SAME_DATA,
    SAME_HOST,
    SAME_LOAD,
    SAME_TOKENS,
    SAME_WORK,
)
from cs_systems.core.range_names import LOADER, general, is_operator, meaning
from cs_systems.core.units import human
from cs_systems.readers._stalls import SYNCHRONISATION, stalls
from cs_systems.readers.forms.columns import UNKNOWN, Floats
from cs_systems.readers.forms.trace import Trace, steps_of

INPUT, KERNELS, OPERATORS, PYTHON = "input", "kernels", "operators", "python"
SAME = 0.02  # relative difference below which two counts are considered equal
# Prefixes of ranges that PyTorch opens, which do not name the user's work.
_OF_TORCH = ("ProfilerStep", "Optimizer.", "DistributedDataParallel", "FSDP::", "nccl:", GLOO, LOADER)


class Work(NamedTuple):
    """Time, calls and size of one kind of work per step; the size is the number of thread blocks."""

    time_s: float
    calls: float = 0.0
    size: float = 0.0


Works = Mapping[tuple[str, str], Work]  # kind and name


class Longer(NamedTuple):
    """Work that one rank does longer than the others: its kind, the cause as text, and the remedy."""

    kind: str
    cause: str
    remedy: str


class HostTime(NamedTuple):
    """Time per step of the host's own work, and how much of it is Python, by the user's innermost range."""

    own_s: float
    python_s: Mapping[str, float]


def works(profile: Profile) -> tuple[Works, float]:
    """Return the work of the rank per step, and its host's time without waits."""
    found: dict[tuple[str, str], Work] = {}
    trace, count = profile.trace, len(profile.steps)
    if len(trace.kernels):
        found |= {(KERNELS, name): work for name, work in _kernels(profile)}
    else:
        computed = _in_steps(profile, *host_work(trace)[1:])
        found[OPERATORS, ""] = Work(union(*computed).length_s / count, len(computed[0]) / count)
    loader = _in_steps(profile, *_loading(trace))
    if len(loader[0]):
        found[INPUT, ""] = Work(union(*loader).length_s / count, len(loader[0]) / count)
    host = _host(profile)
    found |= {(PYTHON, name): Work(time_s) for name, time_s in host.python_s.items()}
    return found, host.own_s


def _kernels(profile: Profile) -> Iterator[tuple[str, Work]]:
    """Yield (family, work) of the kernels that compute."""
    trace, count = profile.trace, len(profile.steps)
    kernels = trace.kernels
    which = ~is_collective(kernels) & steps_of(kernels.launched_s, profile.steps)[1]
    times = np.bincount(kernels.function.codes[which], (kernels.end_s - kernels.start_s)[which])
    calls = np.bincount(kernels.function.codes[which])
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for code in np.flatnonzero(calls).tolist():
        function = kernels.function.values[code]
        blocks = int(np.prod(function.grid)) if function.grid else 0
        for column, value in enumerate((times[code], calls[code], calls[code] * blocks)):
            sums[family(function.name)][column] += float(value) / count
    yield from ((name, Work(*total)) for name, total in sums.items())


def _in_steps(profile: Profile, start_s: Floats, end_s: Floats) -> tuple[Floats, Floats]:
    inside = steps_of(start_s, profile.steps)[1]
    return start_s[inside], end_s[inside]


def _loading(trace: Trace) -> tuple[Floats, Floats]:
    """Return the intervals (start, end) in s in which the host waits for a batch."""
    ranges = trace.ranges
    waits = ranges.name.codes_where(lambda name: name.startswith(LOADER) or meaning(name).phase == "input")
    return ranges.start_s[waits], ranges.end_s[waits]


def _host(profile: Profile) -> HostTime:
    """Return the host's time in the steps without its waits, and how much of it is Python."""
    trace, steps = profile.trace, profile.steps
    inside = union(np.array([step.start_s for step in steps]), np.array([step.end_s for step in steps]))
    thread = launching_thread(trace)
    calls = trace.calls.take(trace.calls.thread == thread)
    waiting = calls.where(_waits)
    waits = union(waiting.start_s, waiting.end_s)
    if not len(trace.kernels):
        of_gloo = trace.ranges.take(trace.ranges.name.codes_where(lambda name: name.startswith(GLOO)))
        waits = _without(union(of_gloo.start_s, of_gloo.end_s), union(*host_work(trace)[1:]))
    own_s = inside.length_s - intersection(inside, waits).length_s
    busy = [waits, union(*_loading(trace)), union(calls.start_s, calls.end_s)]
    if trace.operators is not None:
        mine = (trace.operators.thread == thread) | (thread == UNKNOWN)
        busy.append(union(trace.operators.start_s[mine], trace.operators.end_s[mine]))
    idle = _without(inside, union(*(np.concatenate(column) for column in zip(*busy, strict=True))))
    python, count = defaultdict[str, float](float), len(steps)
    for name, time_s in _named(trace, thread, idle):
        python[name] += time_s / count
    return HostTime(own_s / count, python)


def _waits(call: str) -> bool:
    """Return whether a call may wait for the device: a copy from pageable memory waits for all earlier work."""
    return stalls(call) == SYNCHRONISATION or "Memcpy" in call


def _without(intervals: Intervals, holes: Intervals) -> Intervals:
    """Return the parts of the intervals outside of the holes."""
    starts = np.concatenate([[-np.inf], holes.end_s])
    ends = np.concatenate([holes.start_s, [np.inf]])
    return intersection(intervals, Intervals(starts, ends))


def _named(trace: Trace, thread: int, idle: Intervals) -> Iterator[tuple[str, float]]:
    """Yield (the user's innermost range, time) of stretches of Python; "" outside of every such range."""
    lines = trace.ranges.timelines
    line = lines.get(thread) or (max(lines.values(), key=lambda each: len(each.times)) if lines else None)
    middle = (idle.start_s + idle.end_s) / 2
    for time_s, lasted in zip(middle.tolist(), (idle.end_s - idle.start_s).tolist(), strict=True):
        own = [name for name in (line.at(time_s) if line else ()) if not _is_torch(name)]
        yield (general(own[-1]) if own else ""), lasted


def _is_torch(name: str) -> bool:
    return is_operator(name) or name.startswith(_OF_TORCH)


def longer(late: Works, others: Sequence[Works], lost_s: float) -> Longer | None:
    """Return the work in which the last rank takes longer than the median of the others.

    None unless it explains at least half of the time that the step loses.
    """
    usual = {key: _median([own.get(key, Work(0.0)) for own in others]) for key in late}
    extra = {key: work.time_s - usual[key].time_s for key, work in late.items()}
    of_kernels = [key for key in late if key[0] == KERNELS]
    in_kernels_s = sum(extra[key] for key in of_kernels)
    if of_kernels and in_kernels_s >= EXPLAINS * lost_s:
        key = max(of_kernels, key=lambda key: extra[key])
        return Longer(KERNELS, *_slower_kernels(key[1], late[key], usual[key], in_kernels_s))
    rest = [key for key in late if key[0] != KERNELS]
    if not rest or extra[key := max(rest, key=lambda key: extra[key])] < EXPLAINS * lost_s:
        return None
    kind, name = key
    size = human(extra[key], "s")
    if kind == INPUT:
        return Longer(
            INPUT,
            f"it waits {size} longer for its batch",
            SAME_DATA,
        )
    if kind == OPERATORS:
        if late[key].calls > (1 + SAME) * usual[key].calls:
            return Longer(kind, f"it runs more operators, {size} longer", SAME_WORK)
        return Longer(kind, f"its operators take {size} longer", SAME_LOAD)
    where = f"in {name!r}" if name else "in Python between operators"
    return Longer(kind, f"its host is {size} longer {where}", SAME_HOST)


def _median(found: Sequence[Work]) -> Work:
    return Work(*(median(column) for column in zip(*found, strict=True)))


def _slower_kernels(name: str, late: Work, usual: Work, extra_s: float) -> tuple[str, str]:
    size, most = human(extra_s, "s"), f"most in {name}"
    if late.calls > (1 + SAME) * usual.calls:
        return (
            f"it runs {late.calls / usual.calls:.2g} times as many kernels ({most}), {size} longer"
            if usual.calls
            else (f"it runs kernels of {name} that the others do not, {size} longer"),
            SAME_WORK,
        )
    if late.size > (1 + SAME) * usual.size > 0:
        times = late.size / usual.size
        return (
            f"its kernels have {times:.2g} times as many blocks ({most}) and take {size} longer",
            SAME_TOKENS,
        )
    return (
        f"the same kernels take {size} longer ({most})",
        "compare its GPU's clock, temperature and other processes with those of the other ranks",
    )
