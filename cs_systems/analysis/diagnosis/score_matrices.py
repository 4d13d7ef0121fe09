"""Rule for score matrices: unfused attention keeps the matrix of scores of every block for backward."""

from __future__ import annotations

from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis._forms import of_category
from cs_systems.analysis.diagnosis._memory_use import SCORES

REMEDY = "use an attention that keeps none (scaled_dot_product_attention; --attention sdpa_flash or flash_triton)"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the bytes of score matrices at the peak; a tiled attention keeps none."""
    return of_category(evidence, SCORES, "attention's score matrices take", REMEDY, attention="flash_triton")


RULE = Rule(find, refines=("kept-activations",))
