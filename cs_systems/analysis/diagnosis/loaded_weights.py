"""Rule for weights that are kept without a copy, so that they go on changing, and loading them does nothing."""

from __future__ import annotations

from cs_systems.analysis.comparison.loop_findings import LOADED_WEIGHTS
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis._forms import of_training
from cs_systems.analysis.diagnosis.own_python import called_at

REMEDY = "keep a copy: copy.deepcopy(model.state_dict())"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find a model that loads tensors which `state_dict()` returned some steps before, and which are its own."""
    rows = LOADED_WEIGHTS.of(evidence.tables)
    if not rows:
        return None
    row = rows[0]
    where = called_at(row["function"], row["place"], None)
    cause = (
        f"{row['model']} loads its own tensors ({where}): state_dict() returned them without a copy, and "
        f"{row['steps']:,} steps have changed them since, so that loading does nothing"
    )
    return of_training(cause, REMEDY, rows)


RULE = Rule(find, judges_loop=True, precedes=("start-up",))
