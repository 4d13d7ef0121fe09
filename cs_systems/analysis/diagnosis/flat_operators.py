"""Rule for parameters that get no gradient but zeros, because an operator with a derivative of 0 follows them."""

from __future__ import annotations

from cs_systems.analysis.comparison.loop_findings import FLAT_OPERATORS
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis._forms import of_training
from cs_systems.analysis.diagnosis.own_python import called_at
from cs_systems.core.units import counted

FEWEST = 3  # steps
REMEDY = "pass the gradient straight through it: x + (x.{name}() - x).detach() in place of x.{name}()"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find parameters that the loss reaches only through round(), floor(), ceil(), trunc() or sign()."""
    row = FLAT_OPERATORS.first(evidence.tables)
    if row is None or row["steps"] < FEWEST:
        return None
    names = row["operators"].split(", ")
    called = " or ".join(f"{name}()" for name in names)
    where = f" in {called_at(row['function'], row['place'], None)}" if row["place"] else ""
    gets, them = ("gets", "it") if row["parameters"] == 1 else ("get", "them")
    cause = (
        f"{counted(row['parameters'], 'parameter')} in {row['module']} {gets} gradients of zeros alone: the loss "
        f"reaches {them} only through {called}{where}, with a derivative of 0 everywhere"
    )
    return of_training(cause, REMEDY.format(name=names[0]), (row,))


RULE = Rule(find, judges_loop=True, refines=("no-update",), precedes=("start-up",))
