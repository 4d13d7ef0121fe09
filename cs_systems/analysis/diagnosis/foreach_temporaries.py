"""Rule for foreach temporaries: the optimizer updates all parameters at once, with temporary tensors for all."""

from __future__ import annotations

from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis._forecast import expected
from cs_systems.analysis.diagnosis._memory_use import FOREACH

FUSED = "adamw_fused"
REMEDY = f"update in one kernel (fused=True; --optimizer {FUSED}), or one parameter at a time (foreach=False)"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find temporary tensors of the optimizer at the peak; a fused update makes none."""
    memory = evidence.memory
    if memory is None or not (size := memory.of(FOREACH)):
        return None
    cause = f"temporary tensors of the optimizer's foreach update take {size / memory.peak_bytes:.0%} of the peak"
    at_best, then = memory.at_best(FOREACH), expected(memory, optimizer=FUSED)
    return Diagnosis(cause, REMEDY, memory.peak_bytes, at_best, "bytes", memory.rows, expected=then)


RULE = Rule(find)
