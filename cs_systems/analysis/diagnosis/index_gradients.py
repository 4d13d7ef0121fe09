"""Rule for gradients of an index: rows of equal index are sorted and added one after another."""

from __future__ import annotations

import re

from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis._forms import of_kernels

KERNEL = re.compile(r"indexing_backward|embedding_(dense_)?backward|compute_grad_weight|sum_and_scatter", re.IGNORECASE)
NOTABLE = 0.2  # share of the step
REMEDY = (
    "make the table smaller, use index_select or a one-hot product, or sparse=True gradients for a table of many rows"
)


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the time of these kernels; the gain of another method is unknown."""
    return of_kernels(evidence, KERNEL, "the gradient of an index or embedding lookup", REMEDY, NOTABLE)


RULE = Rule(find, shortens_kernels=True)
