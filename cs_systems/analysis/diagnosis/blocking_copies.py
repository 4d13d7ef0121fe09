"""Rule for blocking copies: memory is copied while no kernel runs."""

from __future__ import annotations

import re

import numpy as np

from cs_systems.analysis.attribution.gaps import COPY, idle_during
from cs_systems.analysis.attribution.overlap import union
from cs_systems.analysis.attribution.usual_steps import TO_DEVICE
from cs_systems.analysis.diagnosis import WORTH, Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import FEWEST_KERNELS, MOSTLY, Evidence
from cs_systems.analysis.replay import CopiesOverlapped
from cs_systems.core.statistics import ROUNDING_S
from cs_systems.core.tables import Row
from cs_systems.core.tracers import tracer
from cs_systems.core.units import human
from cs_systems.readers.forms.trace import Copies, Kernels, steps_of

PLAIN = "copy from pinned memory, in a stream of its own, while kernels run"
AHEAD = "copy less, such as a smaller data type, or copy ahead in a stream of its own, while kernels run"
BACK = "copy to pinned memory, and piece by piece in a stream of its own, while kernels run"
PIECES = "copy from and to pinned memory, and piece by piece in a stream of its own, while kernels run"
TO_HOST, BOTH_WAYS = (re.compile(f"^{way}(?! unified)") for way in ("DtoH", "(DtoH|HtoD)"))
PINNED, PAGEABLE = re.compile("pinned"), re.compile("pageable")  # in the name of a copy
REMEDY = "pin the host's memory (pin_memory=True), copy with non_blocking=True, and copy the next batch ahead"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the gaps between kernels in which a copy ran, or the copies of a process around its only pass."""
    found = [each for each in (_between(evidence), _around(evidence)) if each]
    return max(found, key=lambda each: each.share, default=None)


def _around(evidence: Evidence) -> Diagnosis | None:
    """Find copies to the host after the last kernel, in a recording of a whole process that repeats nothing.

    Before and between a few kernels, copies count too. Copies at the same time count once, those during kernels not.
    """
    usual = evidence.usual
    if usual is None or not usual.is_once or not usual.total_s:
        return None
    trace = usual.profile.trace
    if not tracer(trace.profiler).starts_program:
        return None
    copies, kernels = trace.copies, trace.kernels
    before, after = copies.end_s <= kernels.start_s.min(), copies.start_s >= kernels.end_s.max()
    between = ~before & (copies.end_s <= kernels.start_s.max())
    is_few = len(kernels) < FEWEST_KERNELS
    seen = idle_during(kernels, copies.start_s, copies.end_s) > ROUNDING_S
    parts = {
        "to the device before the first kernel": seen & before & copies.name.codes_where(TO_DEVICE.search) & is_few,
        "between kernels": seen & between & copies.name.codes_where(BOTH_WAYS.search) & is_few,
        "to the host after the last kernel": seen & after & copies.name.codes_where(TO_HOST.search),
    }
    times = {where: _idle_s(kernels, copies.take(which)) for where, which in parts.items()}
    told = copies.take(np.logical_or.reduce([*parts.values()]))
    lasted_s = _idle_s(kernels, told)
    if not lasted_s:
        return None
    *named, last = [where for where, time_s in times.items() if time_s >= WORTH * lasted_s]
    moved = human(float(told.bytes.sum()), "bytes")
    where = f"{', '.join(named)} and {last}" if named else last
    share = lasted_s / usual.total_s
    cause = f"{share:.0%} of the recording is copies {where} ({moved} in {human(lasted_s, 's')})"
    row: Row = {
        "copies": len(told),
        "time_s": lasted_s,
        "recording_s": usual.total_s,
    }
    return Diagnosis(
        cause,
        BACK if where.startswith("to the host") else PIECES,
        usual.total_s,
        takes=lasted_s,
        evidence=(row,),
        is_of_recording=True,
        is_outside=share > MOSTLY,
    )


def _idle_s(kernels: Kernels, copies: Copies) -> float:
    """Return the time in which any of these copies and no kernel ran."""
    return float(idle_during(kernels, *union(copies.start_s, copies.end_s)).sum())


def _between(evidence: Evidence) -> Diagnosis | None:
    """Find the gaps between kernels in which a copy ran."""
    step_s, idle_s = evidence.step_s, evidence.idle_s.get(COPY)
    if step_s is None or not idle_s:
        return None
    cause = f"{idle_s / step_s:.0%} of the step the GPU copies memory and computes nothing"
    remedy = AHEAD if _are_pinned(evidence) else REMEDY if evidence.uses_torch else PLAIN
    return Diagnosis(cause, remedy, step_s, step_s - idle_s, evidence=evidence.gaps_by(COPY), change=CopiesOverlapped())


def _are_pinned(evidence: Evidence) -> bool:
    """Return whether most time of the copies between host and device is from or to pinned memory already."""
    if evidence.usual is None:
        return False
    copies = evidence.usual.profile.trace.copies
    copies = copies.take(steps_of(copies.start_s, evidence.usual.profile.steps)[1])
    pinned, pageable = (
        float((copies.end_s - copies.start_s)[copies.name.codes_where(memory.search)].sum())
        for memory in (PINNED, PAGEABLE)
    )
    return pinned > pageable


RULE = Rule(find)
