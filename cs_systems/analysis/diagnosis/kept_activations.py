"""Rule for kept activations: the tensors that forward keeps for backward dominate the peak."""

from __future__ import annotations

from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import ACTIVATIONS, EACH_BLOCK, SCORES, Evidence

DOMINANT = 0.4  # share of the peak; below it another category is as large
REMEDY = f"checkpoint each block (torch.utils.checkpoint; --checkpoint {EACH_BLOCK}), which backward computes again"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find activations that fill much of the peak.

    At best, the peak is the formula's for the same step with each block checkpointed. Without a valid formula, all
    blocks except the largest, which backward recomputes, keep nothing.
    """
    memory = evidence.memory
    if memory is None or evidence.setting("checkpoint") not in (None, "none"):
        return None
    kept = memory.of(ACTIVATIONS, SCORES)
    if kept < DOMINANT * memory.peak_bytes:
        return None
    at_best = memory.checkpointed_bytes or memory.peak_bytes - kept + max(memory.blocks.values(), default=0)
    cause = f"activations take {kept / memory.peak_bytes:.0%} of the memory at the peak"
    return Diagnosis(cause, REMEDY, memory.peak_bytes, min(at_best, memory.peak_bytes), "bytes", memory.rows)


RULE = Rule(find)
