"""Rule for foreach temporaries: the optimizer updates all parameters at once, with temporary tensors for all."""

from __future__ import annotations

from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis._forms import of_category
from cs_systems.analysis.diagnosis._memory_use import FOREACH
from cs_systems.core.optimizers import USUAL

REMEDY = f"update in one kernel (fused=True; --optimizer {USUAL}), or one parameter at a time (foreach=False)"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find temporary tensors of the optimizer at the peak; a fused update makes none."""
    what = "temporary tensors of the optimizer's foreach update take"
    return of_category(evidence, FOREACH, what, REMEDY, optimizer=USUAL)


RULE = Rule(find)
