"""Rule for kept gradients: the last step's gradients are still allocated while forward keeps its activations."""

from __future__ import annotations

from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import GRADIENTS, Evidence
from cs_systems.config import Phase

REMEDY = "call optimizer.zero_grad(set_to_none=True) before forward, unless gradients accumulate over steps"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find gradients at a peak in forward or the loss, before this step's backward has made any."""
    memory = evidence.memory
    if memory is None or memory.phase not in (Phase.FORWARD, Phase.LOSS) or not (size := memory.of(GRADIENTS)):
        return None
    cause = f"gradients of the last step take {size / memory.peak_bytes:.0%} of the memory at the peak, in forward"
    return Diagnosis(cause, REMEDY, memory.peak_bytes, memory.peak_bytes - size, "bytes", memory.rows)


RULE = Rule(find)
