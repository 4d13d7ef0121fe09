"""Rule for an unused graph: forward keeps its activations for a backward that never comes."""

from __future__ import annotations

from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.core.units import human

REMEDY = "run these passes under torch.no_grad() or torch.inference_mode()"
RELEASE = ", or delete their outputs before the next pass"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find graphs at the peak that are released without a backward pass; the peak without them is known."""
    memory = evidence.memory
    if memory is None or (graphs := memory.graphs) is None:
        return None
    size, share = human(graphs.peak_bytes, "bytes"), f"{graphs.peak_bytes / memory.peak_bytes:.0%} of the peak"
    cause = f"forward keeps {size} for a backward that does not come, {share}"
    if graphs.at_peak > 1:
        cause += f", because the graphs of {graphs.at_peak} passes are alive at once"
    remedy = f"{REMEDY}{RELEASE if graphs.at_peak > 1 else ''}"
    where = f"released at {graphs.site}" if graphs.site else ""
    return Diagnosis(cause, remedy, memory.peak_bytes, graphs.peak_without_bytes, "bytes", memory.rows, where=where)


RULE = Rule(find)
