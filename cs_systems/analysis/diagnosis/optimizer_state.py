"""Rule for optimizer state: the moments of every parameter, unused until the update, fill much of the peak."""

from __future__ import annotations

from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis._forecast import expected
from cs_systems.analysis.diagnosis._memory_use import OPTIMIZER_STATE

DOMINANT = 0.3  # share of the peak; AdamW's moments are half of parameters, gradients and moments together
BF16 = "adamw_bf16_state"
KEEP = f"keep it in bf16 (--optimizer {BF16})"
REMEDY = f"shard it over ranks (ZeroRedundancyOptimizer, FSDP; --strategy zero1, fsdp), or {KEEP}"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find optimizer state that fills much of the peak; at best, sharded over many ranks, almost none is left."""
    memory = evidence.memory
    if memory is None or (size := memory.of(OPTIMIZER_STATE)) < DOMINANT * memory.peak_bytes:
        return None
    cause = f"optimizer state takes {size / memory.peak_bytes:.0%} of the memory at the peak"
    at_best, then = memory.at_best(OPTIMIZER_STATE), expected(memory, optimizer=BF16)
    remedy = REMEDY if then is None else KEEP  # the forecast is for bf16
    return Diagnosis(cause, remedy, memory.peak_bytes, at_best, "bytes", memory.rows, expected=then)


RULE = Rule(find)
