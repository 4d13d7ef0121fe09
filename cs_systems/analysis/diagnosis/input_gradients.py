"""Rule for gradients of a model's input that nothing reads, such as those left from a saliency map."""

from __future__ import annotations

from cs_systems.analysis.comparison.loop_findings import INPUT_GRADIENTS
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.config import Phase

NOTABLE = 0.10  # share of the step; below, the estimate may be all error
REMEDY = (
    "leave requires_grad off the input (.requires_grad_(), requires_grad=True), and compute a saliency map in a pass "
    "of its own where it is needed"
)


def find(evidence: Evidence) -> Diagnosis | None:
    """Find gradients of an input that no line of the program reads; their time follows from the sizes of tensors."""
    row, step_s = INPUT_GRADIENTS.first(evidence.tables), evidence.step_s
    if row is None or step_s is None or row["steps"] < row["of_steps"]:
        return None
    takes = min(step_s, row["share"] * (evidence.phase_s(Phase.BACKWARD.value) or 0.0))
    if takes < NOTABLE * step_s:
        return None
    cause = (
        f"backward also computes the gradient of the model's input ({row['shape']}), which nothing reads in the "
        f"steps that were looked at: about {takes / step_s:.0%} of the step"
    )
    return Diagnosis(cause, REMEDY, step_s, takes=takes, evidence=({**row},), where=row["place"] or "")


RULE = Rule(find)
