"""Rule for a loss spike: logits and the loss, which scale with the vocabulary, cause the peak."""

from __future__ import annotations

from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis._forms import of_category
from cs_systems.analysis.diagnosis._memory_use import LOGITS

NOTABLE = 0.15  # share of the peak
REMEDY = "compute lm_head and loss in chunks of the sequence (--parts fused_cross_entropy)"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the bytes of logits and loss at the peak; computed in chunks they take almost none."""
    return of_category(evidence, LOGITS, "logits and loss take", REMEDY, NOTABLE)


RULE = Rule(find)
