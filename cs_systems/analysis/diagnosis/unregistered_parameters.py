"""Rule for parameters that a module keeps in a Python list, where neither it nor an optimizer finds them."""

from __future__ import annotations

from cs_systems.analysis.comparison.loop_findings import UNREGISTERED
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis._forms import of_training
from cs_systems.core.units import counted

FEWEST = 3  # passes
REMEDY = (
    "keep layers in nn.ModuleList or nn.ModuleDict, and single parameters in nn.ParameterList, and make the optimizer "
    "after that"
)


def find(evidence: Evidence) -> Diagnosis | None:
    """Find parameters in a list of a module, outside of all optimizers, of which the values do not change."""
    row = UNREGISTERED.first(evidence.tables)
    if row is None or row["passes"] < FEWEST:
        return None
    does = "gets gradients and does" if row["parameters"] == 1 else "get gradients and do"
    cause = (
        f"{counted(row['parameters'], 'parameter')} in {row['holder']}, the largest {row['largest']}, {does} not "
        "change in the steps that were looked at: a module does not find the parameters in a Python list, tuple or dict"
    )
    return of_training(cause, REMEDY, (row,))


RULE = Rule(find, judges_loop=True, precedes=("start-up",))
