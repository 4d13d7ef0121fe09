"""Rule for gradients of an index: rows of equal index are sorted and added one after another."""

from __future__ import annotations

import re

from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence

KERNEL = re.compile(r"indexing_backward|embedding_(dense_)?backward|compute_grad_weight|sum_and_scatter", re.IGNORECASE)
NOTABLE = 0.2  # share of the step
REMEDY = (
    "make the table smaller, use index_select or a one-hot product, or sparse=True gradients for a table of many rows"
)


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the time of these kernels; the gain of another method is unknown."""
    step_s = evidence.step_s
    if step_s is None:
        return None
    rows, time_s = evidence.kernels_named(KERNEL)
    if time_s < NOTABLE * step_s:
        return None
    cause = f"{time_s / step_s:.0%} of the step is the gradient of an index or embedding lookup"
    return Diagnosis(cause, REMEDY, step_s, None, evidence=rows, takes=time_s)


RULE = Rule(find, shortens_kernels=True)
