"""Rule for parameters that backward reaches, and that no module and no optimizer knows: they are never trained."""

from __future__ import annotations

from cs_systems.analysis.comparison.loop_findings import UNREGISTERED
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis._forms import of_training
from cs_systems.core.units import counted

FEWEST = 3  # passes
REMEDY = (
    "keep layers in nn.ModuleList or nn.ModuleDict in place of a Python list or dict, and make the optimizer after them"
)


def find(evidence: Evidence) -> Diagnosis | None:
    """Find parameters outside of all models and optimizers of which the values do not change."""
    row = UNREGISTERED.first(evidence.tables)
    if row is None or row["passes"] < FEWEST:
        return None
    does = "gets gradients and is" if row["parameters"] == 1 else "get gradients and are"
    cause = (
        f"{counted(row['parameters'], 'parameter')}, the largest {row['largest']}, {does} never trained: no module's "
        "parameters() and no optimizer holds them"
    )
    return of_training(cause, REMEDY, (row,))


RULE = Rule(find, judges_loop=True, precedes=("start-up",))
