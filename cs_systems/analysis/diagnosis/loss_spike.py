"""Rule for a loss spike: logits and the loss, which scale with the vocabulary, cause the peak."""

from __future__ import annotations

from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis._memory_use import LOGITS

NOTABLE = 0.15  # share of the peak
REMEDY = "compute lm_head and loss in chunks of the sequence (--parts fused_cross_entropy)"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the bytes of logits and loss at the peak; computed in chunks they take almost none."""
    memory = evidence.memory
    if memory is None or (size := memory.of(LOGITS)) < NOTABLE * memory.peak_bytes:
        return None
    cause = f"logits and loss take {size / memory.peak_bytes:.0%} of the memory at the peak"
    return Diagnosis(cause, REMEDY, memory.peak_bytes, memory.at_best(LOGITS), "bytes", memory.rows)


RULE = Rule(find)
