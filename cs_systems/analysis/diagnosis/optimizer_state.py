"""Rule for optimizer state: the moments of every parameter, unused until the update, fill much of the peak."""

from __future__ import annotations

from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import OPTIMIZER_STATE, Evidence

DOMINANT = 0.3  # share of the peak; AdamW's moments are half of what parameters, gradients and they take together
REMEDY = (
    "shard it over ranks (ZeroRedundancyOptimizer, FSDP; --strategy zero1, fsdp), or keep it in bf16 "
    "(--optimizer adamw_bf16_state)"
)


def find(evidence: Evidence) -> Diagnosis | None:
    """Find optimizer state that fills much of the peak; at best, divided among many ranks, almost none is left."""
    memory = evidence.memory
    if memory is None or (size := memory.of(OPTIMIZER_STATE)) < DOMINANT * memory.peak_bytes:
        return None
    cause = f"optimizer state takes {size / memory.peak_bytes:.0%} of the memory at the peak"
    return Diagnosis(cause, REMEDY, memory.peak_bytes, memory.peak_bytes - size, "bytes", memory.rows)


RULE = Rule(find)
