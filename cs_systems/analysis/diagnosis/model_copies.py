"""Rule for further copies of a model's weights: a frozen reference, a target network, or an average."""

from __future__ import annotations

from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis._memory_use import MODEL_COPIES
from cs_systems.core.units import counted

NOTABLE = 0.15  # share of the peak
MOST_NAMED = 2
REMEDY = "hold them in bf16 or on the host, or compute a frozen model's outputs once in advance"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the copies at the peak, which have the number and sizes of the trained weights; at best none is left."""
    memory = evidence.memory
    if memory is None or memory.models is None or (size := memory.of(MODEL_COPIES)) < NOTABLE * memory.peak_bytes:
        return None
    copies = counted(memory.models.count, "further copy", "further copies")
    cause = f"{copies} of the weights take{'s' * (memory.models.count == 1)} {size / memory.peak_bytes:.0%} of the peak"
    where = ", ".join(memory.models.lines[:MOST_NAMED])
    at_best = memory.at_best(MODEL_COPIES)
    return Diagnosis(cause, REMEDY, memory.peak_bytes, at_best, "bytes", memory.rows, where=where, takes=size)


RULE = Rule(find)
