"""Rule for temporaries of an update: the optimizer computes each step of its formula into a new tensor."""

from __future__ import annotations

from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis._forms import of_category
from cs_systems.analysis.diagnosis._memory_use import UPDATE

REMEDY = "update in place (mul_, addcmul_, addcdiv_), or in one kernel (torch.optim.AdamW(…, fused=True))"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find temporary tensors at the peak of an optimizer that updates one parameter at a time."""
    return of_category(evidence, UPDATE, "temporary tensors of the optimizer's update take", REMEDY)


RULE = Rule(find)
