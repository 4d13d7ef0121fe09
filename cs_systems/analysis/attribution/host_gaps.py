"""Work of the host while no kernel runs and no CUDA call is made, and the calls that wait for the device.

Both are named by the innermost recorded name: a Python function, a range of the user, or an operator.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import PurePath
from typing import Annotated, TypedDict

import numpy as np

from cs_systems.analysis.attribution.gaps import Gaps, silences
from cs_systems.analysis.attribution.host_work import host_work, operator_work
from cs_systems.core.range_names import general, is_operator
from cs_systems.core.statistics import ROUNDING_S
from cs_systems.core.tables import Column
from cs_systems.readers._stalls import SYNCHRONISATION, stalls
from cs_systems.readers.forms.columns import UNKNOWN, Floats, Ints, distinct
from cs_systems.readers.forms.trace import Calls, Step, Trace, steps_of

NO_CALL = "no CUDA call, and nothing recorded"
# Name of a Python function as torch.profiler writes it: `train.py(88): evaluate`.
_FUNCTION = re.compile(r"(?P<file>.*\.py)\((?P<line>\d+)\): (?P<name>.*)")
_BUILT_IN = re.compile(r"<built-in (function|method) (?P<name>\S+).*>")
_INSTALLED = re.compile(
    r"(site|dist)-packages|/lib/python3|^(torch|lightning|transformers|accelerate)/|^(contextlib|threading|runpy)\.py"
)
PROBES = 9  # times within each stretch at which the host's work is looked up


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


def host_gap_rows(trace: Trace, gaps: Gaps | None, steps: Sequence[Step]) -> list[HostGapRow]:
    """Return a row for each kind of work of the host, the longest first; gaps: of one device."""
    if gaps is None or not len(gaps.step):
        return []
    late = ~gaps.pending & ~gaps.lost
    starts, ends = gaps.start_s[late], gaps.end_s[late]
    stretches = silences(trace, float(gaps.start_s.min()), float(gaps.end_s.max()))
    silent = np.array(stretches).reshape(len(stretches), 2)
    idle_s = _covered(silent[:, 1], starts, ends) - _covered(silent[:, 0], starts, ends)
    idle_s -= _of_profiler(trace, silent, starts, ends)
    silent, idle_s = silent[idle_s > ROUNDING_S], idle_s[idle_s > ROUNDING_S]
    times = silent[:, :1] + (silent[:, 1:] - silent[:, :1]) * (np.arange(PROBES) + 0.5) / PROBES
    names, codes = _work(trace, times.reshape(-1))
    # Time of each stretch in each kind of work: as many shares as probes met it there.
    stretch = np.repeat(np.arange(len(silent)), PROBES)
    first, both = distinct(stretch, codes)
    lasted = np.bincount(both, np.repeat(idle_s, PROBES) / PROBES)
    kinds = codes[first]
    count, wall_s = len(steps), sum(step.end_s - step.start_s for step in steps)
    rows: list[HostGapRow] = []
    for kind in np.unique(kinds).tolist():
        own = lasted[kinds == kind]
        rows.append(
            {
                "host": names[kind],
                "stretches_per_step": len(own) / count,
                "time_s": float(own.sum()) / count,
                "share": float(own.sum()) / wall_s,
                "longest_s": float(own.max()),
            }
        )
    return sorted(rows, key=lambda row: -row["time_s"])


def _of_profiler(trace: Trace, silent: Floats, starts: Floats, ends: Floats) -> Floats:
    """Return the idle time of each silent stretch in which the profiler itself delayed the host."""
    own = np.array(trace.overheads).reshape(len(trace.overheads), 2)
    at = np.searchsorted(silent[:, 0], own[:, 0], "right") - 1
    own, at = own[at >= 0], at[at >= 0]
    until = np.minimum(own[:, 1], silent[at, 1])
    within = until > own[:, 0]
    lost = _covered(until[within], starts, ends) - _covered(own[within, 0], starts, ends)
    return np.asarray(np.bincount(at[within], lost, len(silent)), np.float64)


def _covered(time_s: Floats, starts: Floats, ends: Floats) -> Floats:
    """Return, for each time, the total length of the stretches before it; the stretches do not overlap."""
    if not len(starts):
        return np.zeros(len(time_s))
    order = np.argsort(starts)
    edges = np.stack([starts[order], ends[order]], axis=1).reshape(-1)
    lasted = np.cumsum(np.stack([np.zeros(len(starts)), (ends - starts)[order]], axis=1).reshape(-1))
    return np.asarray(np.interp(time_s, edges, lasted))


def _work(trace: Trace, time_s: Floats) -> tuple[list[str], Ints]:
    """Return (names, codes): the innermost named work of the launching thread at each time."""
    thread = launching_thread(trace)
    numbers: dict[str, int] = {NO_CALL: 0}
    codes = np.zeros(len(time_s), np.int64)
    innermost = np.full(len(time_s), UNKNOWN)
    if trace.operators is not None:
        found = trace.operators.at(np.full(len(time_s), thread), time_s)
        innermost[found != UNKNOWN] = trace.operators.signature.codes[found[found != UNKNOWN]]
        while (inner := (found != UNKNOWN) & (trace.operators.parent[found] != UNKNOWN)).any():
            found[inner] = trace.operators.parent[found[inner]]
        for code in np.unique(found[found != UNKNOWN]).tolist():
            codes[found == code] = numbers.setdefault(trace.operators.signature[code].name, len(numbers))
    for ranges, named in ((trace.ranges, own_names), (trace.functions, written_names)):
        if line := ranges.timelines.get(thread):
            opened = line.index(time_s)
            for stack in np.unique(opened).tolist():
                if own := named(trace, line.stacks[stack]):
                    name = _with_call(own[-1], line.stacks[stack])
                    codes[opened == stack] = numbers.setdefault(name, len(numbers))
    if trace.operators is not None:
        known = list(numbers)
        for code, operator in {*zip(codes.tolist(), innermost.tolist(), strict=True)}:
            called = "" if operator == UNKNOWN else trace.operators.signature.values[operator].name
            if operator_work(called) and not host_work(known[code]):
                which = (codes == code) & (innermost == operator)
                codes[which] = numbers.setdefault(f"{known[code]}, {called}", len(numbers))
    return list(numbers), codes


def _with_call(name: str, stack: Sequence[str]) -> str:
    """Return the name with the innermost function of a known kind of work, if the user's name hides one."""
    if host_work(name):
        return name
    called = (_FUNCTION.sub(r"\g<name>", frame) for frame in reversed(stack))
    known = next((each for each in called if host_work(each)), None)
    return name if known is None else f"{name}, " + _BUILT_IN.sub(r"\g<name>", known)


def written_names(trace: Trace, names: Iterable[str]) -> list[str]:
    """Return the Python functions of the user, as `evaluate() at train.py:88`, without installed packages' own."""
    found = (_FUNCTION.fullmatch(name) for name in names)
    own = [one for one in found if one and not _INSTALLED.search(one["file"])]
    return [
        f"{one['name']}() at {PurePath(one['file']).name}:{one['line']}" for one in own if one["name"] != "<module>"
    ]


def own_names(trace: Trace, names: Iterable[str]) -> list[str]:
    """Return the names that the user gave: no operators, modules, or the profiler's own steps."""
    own = (general(name) for name in names if not is_operator(name) and not trace.is_module(name))
    return [name for name in own if not name.startswith("ProfilerStep")]


def launching_thread(trace: Trace) -> int:
    """Return the thread that launched the first kernel: Python's, not autograd's; UNKNOWN without a launch."""
    known = np.flatnonzero(trace.kernels.thread != UNKNOWN)
    return int(trace.kernels.thread[known[0]]) if len(known) else UNKNOWN


def wait_rows(trace: Trace, steps: Sequence[Step]) -> list[WaitRow]:
    """Return a row for each call that waits for the device and the place that calls it, the longest wait first."""
    calls = trace.calls.where(lambda name: stalls(name) == SYNCHRONISATION)
    calls = calls.take(steps_of(calls.start_s, steps)[1])
    if not len(calls):
        return []
    callers, codes = _callers(trace, calls)
    first, both = distinct(calls.name.codes, codes)
    lasted, count = np.bincount(both, calls.end_s - calls.start_s), np.bincount(both)
    rows: list[WaitRow] = [
        {
            "call": calls.name.values[calls.name.codes[at]],
            "within": callers[codes[at]],
            "calls_per_step": int(count[row]) / len(steps),
            "time_s": float(lasted[row]) / len(steps),
        }
        for row, at in enumerate(first.tolist())
    ]
    return sorted(rows, key=lambda row: -row["time_s"])


def _callers(trace: Trace, calls: Calls) -> tuple[list[str], Ints]:
    """Return (names, codes): the outermost operator around each call and the user's range around it.

    Example: `aten::item in clip_grads`.
    """
    numbers: dict[str, int] = {}
    operator = np.full(len(calls), UNKNOWN)
    if trace.operators is not None:
        operator = trace.operators.at(calls.thread, calls.start_s)
        while (inner := (operator != UNKNOWN) & (trace.operators.parent[operator] != UNKNOWN)).any():
            operator[inner] = trace.operators.parent[operator[inner]]
        operator = np.where(operator == UNKNOWN, UNKNOWN, trace.operators.signature.codes[operator])
    codes = np.zeros(len(calls), np.int64)
    for thread in np.unique(calls.thread).tolist():
        mine = np.flatnonzero(calls.thread == thread)
        lines = [ranges.timelines.get(thread) for ranges in (trace.ranges, trace.functions)]
        opened, called = (line.index(calls.start_s[mine]) if line else np.zeros(len(mine), np.int64) for line in lines)
        for at, stack, frames in {*zip(operator[mine].tolist(), opened.tolist(), called.tolist(), strict=True)}:
            own = own_names(trace, lines[0].stacks[stack]) if lines[0] else []
            own = (written_names(trace, lines[1].stacks[frames]) if lines[1] else []) or own
            signature = (
                trace.operators.signature.values[at].name if trace.operators is not None and at != UNKNOWN else ""
            )
            name = " in ".join(filter(None, [signature, *own[-1:]]))
            same = (operator[mine] == at) & (opened == stack) & (called == frames)
            codes[mine[same]] = numbers.setdefault(name, len(numbers))
    return list(numbers), codes
