"""Rule for score matrices: unfused attention keeps the matrix of scores of every block for backward."""

from __future__ import annotations

from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis._forecast import expected
from cs_systems.analysis.diagnosis._memory_use import SCORES

REMEDY = "use an attention that keeps none (scaled_dot_product_attention; --attention sdpa_flash or flash_triton)"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the bytes of score matrices at the peak; a tiled attention keeps none."""
    memory = evidence.memory
    if memory is None or not (kept := memory.of(SCORES)):
        return None
    cause = f"attention's score matrices take {kept / memory.peak_bytes:.0%} of the memory at the peak"
    at_best, then = memory.at_best(SCORES), expected(memory, attention="flash_triton")
    return Diagnosis(cause, REMEDY, memory.peak_bytes, at_best, "bytes", memory.rows, expected=then)


RULE = Rule(find, refines=("kept-activations",))
