"""Rule for gradients that no optimizer uses: backward computes them for parameters that are not trained."""

from __future__ import annotations

from cs_systems.analysis.comparison.loop_findings import UNUSED_GRADIENTS
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.config import Phase
from cs_systems.core.units import counted

REMEDY = (
    "call requires_grad_(False) on them, and run what is in front of the trained parameters under torch.no_grad(); or "
    "give them to the optimizer"
)


def find(evidence: Evidence) -> Diagnosis | None:
    """Find parameters with gradients that no optimizer holds; their share of backward follows from their size."""
    row, step_s = UNUSED_GRADIENTS.first(evidence.tables), evidence.step_s
    if row is None or step_s is None:
        return None
    takes = min(step_s, row["share"] * (evidence.phase_s(Phase.BACKWARD.value) or 0.0))
    cause = (
        f"backward computes gradients of {counted(row['parameters'], 'parameter')} that no optimizer holds, such as "
        f"{row['first']}: {row['share']:.1%} of all elements with gradients"
    )
    return Diagnosis(cause, REMEDY, step_s, takes=takes, evidence=(row,))


RULE = Rule(find)
