"""Rule for weights and gradients: both together fill most of a peak that has no optimizer state."""

from __future__ import annotations

from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis._memory_use import GRADIENTS, OPTIMIZER_STATE, PARAMETERS

DOMINANT = 0.7  # share of the peak
NOTABLE = 0.3  # share of the peak that the gradients take
REMEDY = "shard both over ranks (FSDP), or, if they are in fp32, hold the weights in bf16 (model.to(torch.bfloat16))"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find a snapshot's peak of weights and gradients; their precision is unknown, so there is no bound."""
    memory = evidence.memory
    if memory is None or memory.without is None or memory.of(OPTIMIZER_STATE):
        return None
    gradients, both = memory.of(GRADIENTS), memory.of(PARAMETERS, GRADIENTS)
    if gradients < NOTABLE * memory.peak_bytes or both < DOMINANT * memory.peak_bytes:
        return None
    cause = f"weights and gradients take {both / memory.peak_bytes:.0%} of the memory at the peak"
    cause += f" (gradients {gradients / memory.peak_bytes:.0%})"
    return Diagnosis(cause, REMEDY, memory.peak_bytes, None, "bytes", memory.rows, takes=both)


RULE = Rule(find)
