"""Reasons why a trace without kernels is not judged, and what it still shows."""

from __future__ import annotations

import math
import re
from collections import defaultdict

from cs_systems.analysis.attribution.operator_table import operators
from cs_systems.analysis.attribution.overlap import union
from cs_systems.analysis.attribution.profile import Profile
from cs_systems.analysis.attribution.usual_steps import FIRST_CALL_S, LONGEST, long_calls
from cs_systems.core.printable import within
from cs_systems.core.range_names import general, is_operator
from cs_systems.core.tracers import tracer
from cs_systems.core.units import counted, human
from cs_systems.readers._lost_kernels import launches_kernel
from cs_systems.readers.forms.trace import Trace

OF_GPU, OF_CPU = re.compile("cudnn|cuda|miopen"), re.compile("mkl|_cpu")  # parts of an operator's name
ACTIVITIES = "record with ProfilerActivity.CUDA too"
RECORD = "record on a machine with a GPU"
MAIN = 0.5  # share of the time
MOST_NAMED = 2


def why_not_judged(profile: Profile) -> str:
    """Return why nothing is judged: kernels were lost, there are only copies, or the program ran on the CPU."""
    trace = profile.trace
    first_s, last_s = profile.steps[0].start_s, profile.steps[-1].end_s
    span_s = max(last_s, trace.calls.end_s.max(initial=last_s)) - min(first_s, trace.calls.start_s.min(initial=first_s))
    if count := len(trace.calls.where(launches_kernel)):
        launched = counted(count, "launch", "launches")
        lost = f"the profiler recorded {launched} and no kernel; stop other profilers (ncu, DCGM), and record again"
        return f"{_start_up(trace, span_s)}{lost}"
    if len(trace.copies):
        return f"the trace has no kernels, only copies: {_copies(trace, span_s)}"
    return f"{_pause(trace)}{_missing(profile)}"


def _missing(profile: Profile) -> str:
    """Return where the operators ran, and how to record kernels."""
    trace, times = profile.trace, _operators(profile)
    if of_gpu := next((name for name in times if OF_GPU.search(name)), None):
        return f"the trace has no kernels, though {of_gpu} ran on a GPU; {ACTIVITIES}"
    if trace.devices and (for_kernels := tracer(trace.profiler).for_kernels):
        return f"the export has no kernels of {next(iter(trace.devices.values()))}; {for_kernels}"
    if trace.devices or not any(map(OF_CPU.search, times)):  # other devices record no kernels either
        return f"the trace has no kernels; {RECORD}"
    name = max(times, key=lambda operator: times[operator])
    where = f"it ran on the CPU, {times[name] / sum(times.values()):.0%} of its operators' time in {name}"
    return f"the trace has no kernels: {where}; {RECORD}"


def _pause(trace: Trace) -> str:
    """Return a clause on the longest pause between operators, if it took most of the time."""
    operators = trace.operators
    if not operators:
        return ""
    busy = union(operators.start_s, operators.end_s)
    paused_s = busy.start_s[1:] - busy.end_s[:-1]
    if not len(paused_s):
        return ""
    at = int(paused_s.argmax())
    ranges = trace.ranges
    span_s = float(ranges.end_s.max(initial=busy.end_s[-1]) - ranges.start_s.min(initial=busy.start_s[0]))
    if paused_s[at] < MAIN * span_s:
        return ""
    later = [one for one in ranges if one.start_s > busy.end_s[at] and not is_operator(one.name)]
    first = min(later, key=lambda one: one.start_s, default=None)
    where = f", before {within(general(first.name), LONGEST)!r}" if first else ""
    lasted = f"{human(float(paused_s[at]), 's')}{where}"
    return f"{paused_s[at] / span_s:.0%} of the recording passes without an operator ({lasted}), and "


def _start_up(trace: Trace, span_s: float) -> str:
    """Return a clause on the calls that initialize CUDA, if they took most of the time."""
    calls = long_calls(trace, -math.inf, math.inf, FIRST_CALL_S)
    if not span_s or sum(calls.values()) < MAIN * span_s:
        return ""
    named = ", ".join(f"{human(time_s, 's')} in {name}" for name, time_s in [*calls.items()][:MOST_NAMED])
    return f"{sum(calls.values()) / span_s:.0%} of the recording is start-up ({named}), and "


def _copies(trace: Trace, span_s: float) -> str:
    """Return the bytes and rates of the copies by direction, and their share of the time, as text."""
    copies = trace.copies
    lasted = copies.end_s - copies.start_s
    said = list[str]()
    for code, name in enumerate(copies.name.values):
        of = (copies.name.codes == code) & (copies.bytes > 0)
        if (time_s := float(lasted[of].sum())) > 0:
            moved = float(copies.bytes[of].sum())
            said.append(f"{human(moved, 'bytes')} {name}".rstrip() + f" at {moved / time_s / 1e9:.2g} GB/s")
    busy_s = min(span_s, float(lasted.sum()))
    return (
        f"{' and '.join(said) or counted(len(copies), 'copy', 'copies')}; they take {busy_s / span_s:.0%} of the time"
    )


def _operators(profile: Profile) -> dict[str, float]:
    """Return the host's time in each operator, without nested operators."""
    times: dict[str, float] = defaultdict(float)
    for row in operators(profile):
        times[row["operator"]] += row["host_self_s"]
    return times
