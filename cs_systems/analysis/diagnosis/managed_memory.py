"""Rule for managed memory: pages move while kernels wait for them, or while the host reads results afterwards."""

from __future__ import annotations

import math

from cs_systems.analysis.attribution.gaps import silences
from cs_systems.analysis.attribution.usual_steps import Usual
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis.start_up import usual_s
from cs_systems.core.tables import Row
from cs_systems.core.units import counted, human
from cs_systems.readers.forms.trace import UNIFIED, steps_of

FEWEST = 100  # page moves; with fewer, what the host does in between is unknown
MOST = 0.9  # share of the bytes that move; the other steps move nearly none
REMEDY = (
    "prefetch the memory to the host before it is read (cudaMemPrefetchAsync to cudaCpuDeviceId), or copy it as a whole"
)
FIT = (
    "allocate less than the GPU's memory, recycle freed memory, or prefetch the pages before they are used "
    "(cudaMemPrefetchAsync)"
)


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the larger of the two: steps in which pages of managed memory move, and their way back after all kernels."""
    usual = evidence.usual
    if usual is None or not usual.total_s or not len(usual.profile.trace.kernels):
        return None
    found = filter(None, (_during_steps(usual), _afterwards(usual)))
    return max(found, key=lambda one: one.share, default=None)


def _during_steps(usual: Usual) -> Diagnosis | None:
    """Return the extra time of slow steps, if nearly all pages that move do so in them."""
    copies = usual.profile.trace.copies
    windows = sorted((window for one in usual.apart for window in one.windows), key=lambda window: window.start_s)
    if not windows:
        return None
    launched_s = min(windows[0].start_s, usual.profile.steps[0].start_s)
    moved = copies.name.codes_where(lambda name: name.endswith(UNIFIED)) & (copies.start_s >= launched_s)
    inside = moved & steps_of(copies.start_s, windows)[1]
    size = float(copies.bytes[inside].sum())
    if inside.sum() < FEWEST or size < MOST * float(copies.bytes[moved].sum()):
        return None
    lost_s, steps = math.fsum(one.beyond_s for one in usual.apart), len(windows)
    each_s = math.fsum(one.each_s * len(one.steps) for one in usual.apart) / steps
    cause = (
        f"{lost_s / usual.total_s:.0%} of the recording is extra time of {counted(steps, 'step')} in which pages of "
        f"managed memory move ({human(size, 'bytes')}): {human(each_s, 's')} each, where the usual ones take "
        f"{human(usual.step_s, 's')}"
    )
    return _of_recording(usual, cause, FIT, int(inside.sum()), lost_s)


def _afterwards(usual: Usual) -> Diagnosis | None:
    """Return the time without a CUDA call in which pages of managed memory move to the host, after all kernels."""
    trace = usual.profile.trace
    copies = trace.copies
    back = copies.name.codes_where(lambda name: name.endswith(UNIFIED) and name.startswith("D"))
    back &= copies.start_s >= trace.kernels.end_s.max()
    if back.sum() < FEWEST:
        return None
    within = float(copies.start_s[back].min()), float(copies.end_s[back].max())
    lasted_s = math.fsum(end - start for start, end in silences(trace, *within))
    pages, moved = int(back.sum()), human(float(copies.bytes[back].sum()), "bytes")
    cause = (
        f"{lasted_s / usual.total_s:.0%} of the recording the host reads managed memory back page by page, after the "
        f"last kernel ({pages:,} moves, {moved} in {human(lasted_s, 's')})"
    )
    return _of_recording(usual, cause, REMEDY, pages, lasted_s)


def _of_recording(usual: Usual, cause: str, remedy: str, moves: int, time_s: float) -> Diagnosis:
    """Return the diagnosis of this time of a recording, in which so many pages moved."""
    row: Row = {"moves": moves, "time_s": time_s, "recording_s": usual.total_s}
    return Diagnosis(
        cause,
        remedy,
        usual.total_s,
        takes=time_s,
        evidence=(row,),
        is_of_recording=True,
        is_outside=True,
        comes_last=time_s < usual_s(usual),
    )


RULE = Rule(find)
