"""Rule for copies of weights: autocast casts each weight to bf16, and keeps the copies until its context ends."""

from __future__ import annotations

from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis._forms import expected
from cs_systems.analysis.diagnosis._memory_use import WEIGHT_COPIES

NOTABLE = 0.15  # share of the peak
REMEDY = "hold the weights themselves in bf16 (model.to(torch.bfloat16); --precision bf16-pure)"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the copies of weights at the peak; a model in bf16 makes none, and its own weights are half as large."""
    memory = evidence.memory
    if memory is None or (size := memory.of(WEIGHT_COPIES)) < NOTABLE * memory.peak_bytes:
        return None
    cause = f"autocast's copies of weights take {size / memory.peak_bytes:.0%} of the memory at the peak"
    then = expected(memory, precision="bf16-pure")
    at_best = None if then is None else memory.at_best(WEIGHT_COPIES)  # the weights themselves become smaller too
    return Diagnosis(cause, REMEDY, memory.peak_bytes, at_best, "bytes", memory.rows, expected=then, takes=size)


RULE = Rule(find)
