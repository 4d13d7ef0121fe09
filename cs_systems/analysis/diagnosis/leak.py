"""Rule for a leak: each step leaves memory allocated that no later step frees."""

from __future__ import annotations

from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.core.units import human

STEPS = 1000  # number of steps after which the size of a leak is stated
TENSORS = "free them in each step, or keep a copy on the host (.item(), .cpu())"
GRAPH = (
    "something keeps the loss or an output of each step with its graph: keep loss.item() or a .detach() copy, and call "
    "backward without retain_graph"
)


def find(evidence: Evidence) -> Diagnosis | None:
    """Find memory that grows with each step; the peak without the leaked allocations is known."""
    memory = evidence.memory
    if memory is None or (leak := memory.leak) is None:
        return None
    what = "of each step's graph stay alive" if leak.is_graph else "stay alive per step"
    size, later = (human(count * leak.step_bytes, "bytes") for count in (1, STEPS))
    cause = f"{size} {what}, {later} in {STEPS:,} steps"
    lines = f" and {leak.sites - 1} more lines" if leak.sites > 2 else " and another line" if leak.sites == 2 else ""
    where = f"forward called at {leak.site}" if leak.is_graph else f"allocated at {leak.site}{lines}"
    return Diagnosis(
        cause,
        GRAPH if leak.is_graph else TENSORS,
        memory.peak_bytes,
        leak.peak_without_bytes,
        "bytes",
        memory.rows,
        where=where,
        subject=f"{leak.steps} steps recorded",
        takes=min(memory.peak_bytes, STEPS * leak.step_bytes),
    )


RULE = Rule(find)
