"""Rule for pinned allocation: the step waits while the host pins memory (cudaHostAlloc), or releases it."""

from __future__ import annotations

from cs_systems.analysis.attribution.gaps import MALLOC
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import MOSTLY, Evidence
from cs_systems.core.tables import Row
from cs_systems.core.units import human

PLAIN = "pin the buffers once, and reuse them in every step"
ONCE = "pin the buffers before the part that is measured, and leave this time out of every mean"
REMEDY = "let the data loader pin batches (pin_memory=True), or copy each batch into a buffer that was pinned once"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the gaps during allocating calls, if most of the calls' time pins memory of the host."""
    step_s, idle_s = evidence.step_s, evidence.idle_s.get(MALLOC)
    if step_s is None or not idle_s or (share := evidence.pinned_share) < MOSTLY:
        return None
    cause = f"{idle_s / step_s:.0%} of the step the GPU is idle while the host pins memory (cudaHostAlloc)"
    row: Row = {"time_s": idle_s, "pinned_share": share}
    remedy = REMEDY if evidence.uses_torch else PLAIN
    longest_s = max(gap.get("longest_s", 0.0) for gap in evidence.gaps_by(MALLOC))
    if evidence.usual is not None and evidence.usual.is_once and longest_s > MOSTLY * idle_s:  # nothing repeats it
        cause, remedy = f"{cause}, {human(longest_s, 's')} of it at once", ONCE
    return Diagnosis(cause, remedy, step_s, step_s - idle_s, evidence=(row,))


RULE = Rule(find, refines=("host-synchronisation",))
