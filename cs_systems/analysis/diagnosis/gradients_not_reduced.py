"""Rule for a model in DistributedDataParallel that each rank trains alone, because only its module is called."""

from __future__ import annotations

from cs_systems.analysis.comparison.loop_ranks import UNREDUCED
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis._forms import of_training
from cs_systems.core.units import counted

REMEDY = (
    "call the wrapped model in place of its module (model.module) for each pass that is differentiated; give its "
    "forward an argument for what its other methods compute"
)


def find(evidence: Evidence) -> Diagnosis | None:
    """Find a model with gradients that no rank averages, and with weights that differ between the ranks."""
    rows = UNREDUCED.of(evidence.tables)
    if not rows:
        return None
    row = rows[0]
    where = f"{row['function']}() at {row['place']}" if row["function"] else row["place"]
    calls = f": {where} calls {row['model']} itself" if where else ""
    cause = (
        f"each of the {row['ranks']} ranks trains {row['model']} alone, as no gradient is averaged: its "
        f"DistributedDataParallel is not called with gradients{calls}, and the weights of the ranks differ in all "
        f"{counted(row['steps'], 'step')} that were looked at"
    )
    return of_training(cause, REMEDY, rows)


RULE = Rule(find, judges_loop=True, precedes=("start-up",))
