"""Rule for parameters behind an operator without a slope, such as torch.round: all their gradients are zero."""

from __future__ import annotations

from cs_systems.analysis.comparison.loop_findings import ZERO_GRADIENTS
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis._forms import of_training
from cs_systems.core.units import counted

FEWEST = 3  # steps
REMEDY = "pass the gradient straight through: y + (torch.{0}(y) - y).detach() in place of torch.{0}(y)"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find parameters with gradients of zeros in all observed steps, because of the operator in front of them."""
    row = ZERO_GRADIENTS.first(evidence.tables)
    if row is None or row["steps"] < FEWEST:
        return None
    called = f"torch.{row['operator']}"
    where = ""
    if row["place"]:
        where = f" in {row['function']}() at {row['place']}" if row["function"] else f" at {row['place']}"
    name = f", such as {row['first']}," if row["first"] else ""
    cause = (
        f"{called}{where} has a gradient of zeros: {row['parameters']} of {counted(row['of_parameters'], 'parameter')}"
        f"{name} learn nothing, because each way from the loss to them goes through such an operator"
    )
    return of_training(cause, REMEDY.format(row["operator"]), [row])


RULE = Rule(find, judges_loop=True, refines=("no-update",), precedes=("start-up",))
