"""Rule for time after the last kernel: the process goes on without a CUDA call, such as to check its results."""

from __future__ import annotations

import math

import numpy as np

from cs_systems.analysis.attribution.gaps import silences
from cs_systems.analysis.attribution.usual_steps import LONGEST
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import MOSTLY, Evidence
from cs_systems.analysis.diagnosis.start_up import comes_last
from cs_systems.core.printable import within
from cs_systems.core.range_names import general, is_operator
from cs_systems.core.tables import Row
from cs_systems.core.tracers import tracer
from cs_systems.core.units import human
from cs_systems.readers._lost_kernels import launches_kernel
from cs_systems.readers.forms.trace import UNIFIED

LEAST = 0.25  # share of the recording; every process takes some time to end
REMEDY = (
    "find what the program does there, such as checking or writing its results: do it on the GPU or in several "
    "threads, and leave this time out of every mean"
)


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the time of a process after its last kernel in which it makes no CUDA call."""
    usual = evidence.usual
    if usual is None or not tracer(usual.profile.trace.profiler).starts_program:
        return None
    trace = usual.profile.trace
    last_s = float(trace.kernels.end_s.max(initial=-math.inf))
    ranges = trace.ranges.take(np.isin(trace.ranges.thread, trace.calls.thread))  # others may be of another process
    times = (trace.calls, trace.copies, ranges)
    from_s = min(float(each.start_s.min(initial=last_s)) for each in times)
    until_s = max(float(each.end_s.max(initial=last_s)) for each in times)
    moved = trace.copies.name.codes_where(lambda name: name.endswith(UNIFIED)) & (trace.copies.start_s >= last_s)
    is_last = not (trace.calls.where(launches_kernel).start_s > last_s).any()  # else kernels are missing
    if not last_s < until_s or moved.any() or not is_last:  # `managed_memory` reports pages that move
        return None
    lasted_s = math.fsum(end - start for start, end in silences(trace, last_s, until_s))
    share = lasted_s / (until_s - from_s)
    if share < LEAST:
        return None
    own = ranges.named(lambda name: not is_operator(name) and not trace.is_module(name))
    inside = [one for one in own if one.end_s - max(one.start_s, last_s) > MOSTLY * lasted_s]
    where = f", in range {within(general(inside[-1].name), LONGEST)!r}" if inside else ""
    cause = f"{share:.0%} of the recording follows the last kernel without a CUDA call ({human(lasted_s, 's')}{where})"
    row: Row = {"after_s": lasted_s, "recording_s": until_s - from_s}
    return Diagnosis(
        cause,
        REMEDY,
        until_s - from_s,
        takes=lasted_s,
        evidence=(row,),
        is_of_recording=True,
        is_outside=True,
        comes_last=comes_last(usual, share),
    )


RULE = Rule(find)
