"""Rule for kept gradients: the last step's gradients are still allocated while forward keeps its activations."""

from __future__ import annotations

from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis._memory_use import EARLIER_GRADIENTS, GRADIENTS
from cs_systems.config import Phase

REMEDY = "call optimizer.zero_grad(set_to_none=True) before forward, unless gradients accumulate over steps"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find gradients at the peak that are older than its forward pass.

    Without a snapshot: gradients at a peak in forward or loss, before this step's backward has made any.
    """
    memory = evidence.memory
    if memory is None:
        return None
    before_backward = memory.phase in (Phase.FORWARD, Phase.LOSS) and memory.without is None
    category = GRADIENTS if before_backward else EARLIER_GRADIENTS
    if not (size := memory.of(category)):
        return None
    cause = f"gradients of the last step take {size / memory.peak_bytes:.0%} of the memory at the peak"
    where = f", in {memory.phase}"
    at_best = memory.at_best(category, (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD))
    return Diagnosis(f"{cause}{where}", REMEDY, memory.peak_bytes, at_best, "bytes", memory.rows)


RULE = Rule(find, precedes=("optimizer-state", "kept-activations"))
