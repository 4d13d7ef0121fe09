"""Rule for layers that were replaced after the optimizer was made, which holds the parameters of the old ones."""

from __future__ import annotations

from cs_systems.analysis.comparison.loop_findings import REPLACED_PARAMETERS
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis._forms import of_training
from cs_systems.core.units import counted

REMEDY = "make the optimizer after the last change to the model, or give it the new ones by add_param_group()"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find parameters that never change, because the optimizer holds the ones that they have replaced."""
    row = REPLACED_PARAMETERS.first(evidence.tables)
    if row is None:
        return None
    gets = "gets gradients and never changes" if row["parameters"] == 1 else "get gradients and never change"
    cause = (
        f"{counted(row['parameters'], 'parameter')} of the model, such as {row['first']}, {gets}: {row['optimizer']} "
        f"still holds {row['replaced']} of a layer that is in no module any more"
    )
    return of_training(cause, REMEDY, (row,))


RULE = Rule(find, judges_loop=True, refines=("unused-gradients",), precedes=("start-up",))
