"""Rule for managed memory: the host reads results back page by page after the last kernel."""

from __future__ import annotations

import math

from cs_systems.analysis.attribution.gaps import silences
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.core.tables import Row
from cs_systems.core.units import human
from cs_systems.readers.forms.trace import UNIFIED

FEWEST = 100  # page moves; with fewer, what the host does in between is unknown
REMEDY = (
    "prefetch the memory to the host before it is read (cudaMemPrefetchAsync to cudaCpuDeviceId), or copy it as a whole"
)


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the time without a CUDA call in which pages of managed memory move to the host, after all kernels."""
    usual = evidence.usual
    if usual is None or not usual.total_s:
        return None
    trace = usual.profile.trace
    copies = trace.copies
    if not len(copies) or not len(trace.kernels):
        return None
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
    row: Row = {"moves": pages, "time_s": lasted_s, "recording_s": usual.total_s}
    return Diagnosis(
        cause,
        REMEDY,
        usual.total_s,
        takes=lasted_s,
        evidence=(row,),
        is_of_recording=True,
        is_outside=True,
        comes_last=lasted_s < usual.step_s * len(usual.profile.steps),
    )


RULE = Rule(find)
