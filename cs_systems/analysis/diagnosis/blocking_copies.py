"""Rule for blocking copies: memory is copied while no kernel runs."""

from __future__ import annotations

import re

from cs_systems.analysis.attribution.gaps import COPY
from cs_systems.analysis.attribution.usual_steps import WHOLE_PROCESS
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.replay import CopiesOverlapped
from cs_systems.core.tables import Row
from cs_systems.core.units import human
from cs_systems.readers.forms.trace import steps_of

PLAIN = "copy from pinned memory, in a stream of its own, while kernels run"
AHEAD = "copy less, such as a smaller data type, or copy ahead in a stream of its own, while kernels run"
BACK = "copy to pinned memory, and piece by piece in a stream of its own, while kernels run"
TO_HOST = re.compile("^DtoH(?! unified)")
PINNED, PAGEABLE = re.compile("pinned"), re.compile("pageable")  # in the name of a copy
REMEDY = "pin the host's memory (pin_memory=True), copy with non_blocking=True, and copy the next batch ahead"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the gaps between kernels in which a copy ran, or the copies of a program's results to the host."""
    found = [each for each in (_between(evidence), _after(evidence)) if each]
    return max(found, key=lambda each: each.share, default=None)


def _after(evidence: Evidence) -> Diagnosis | None:
    """Find copies to the host after the last kernel, in a recording of a whole process that repeats nothing."""
    usual = evidence.usual
    if usual is None or not usual.is_once or not usual.total_s or usual.profile.trace.profiler not in WHOLE_PROCESS:
        return None
    trace = usual.profile.trace
    copies = trace.copies.take(trace.copies.start_s >= trace.kernels.end_s.max())
    copies = copies.take(copies.name.codes_where(TO_HOST.search))
    lasted_s = float((copies.end_s - copies.start_s).sum())
    if not lasted_s:
        return None
    moved = f"{human(float(copies.bytes.sum()), 'bytes')} in {human(lasted_s, 's')}"
    cause = f"{lasted_s / usual.total_s:.0%} of the recording is copies to the host after the last kernel ({moved})"
    row: Row = {"copies": len(copies), "time_s": lasted_s, "recording_s": usual.total_s}
    return Diagnosis(cause, BACK, usual.total_s, takes=lasted_s, evidence=(row,), is_of_recording=True)


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
