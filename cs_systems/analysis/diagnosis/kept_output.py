"""Rule for a kept output: the result of a pass is freed only when the next pass has made its own."""

from __future__ import annotations

from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.core.units import human

REMEDY = "delete it before the next pass (del), or keep a smaller copy"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the largest output of the last pass at the peak; the peak without such outputs is known."""
    memory = evidence.memory
    if memory is None or (output := memory.output) is None:
        return None
    share = f"{output.bytes / memory.peak_bytes:.0%} of the peak"
    cause = f"an output of the last pass is alive in the next one: {human(output.bytes, 'bytes')}, {share}"
    where = f"allocated at {output.site}"
    return Diagnosis(cause, REMEDY, memory.peak_bytes, output.peak_without_bytes, "bytes", memory.rows, where=where)


RULE = Rule(find)
