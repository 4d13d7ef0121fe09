"""Rule for gradients that are not clipped, because the iterator of parameters is used up."""

from __future__ import annotations

from cs_systems.analysis.comparison.loop_findings import EMPTY_CLIPPING
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis._forms import of_training
from cs_systems.core.units import counted

FEWEST = 2  # steps
NOTABLE = 0.5  # share of the observed steps that clip
REMEDY = "pass a list of the parameters, or model.parameters() anew in each call"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find a call that clips nothing, in steps that clip no other gradient either."""
    row = EMPTY_CLIPPING.first(evidence.tables)
    if row is None or row["steps"] < FEWEST or row["steps"] <= NOTABLE * row["of_steps"]:
        return None
    at = f" at {row['place']}" if row.get("place") else ""
    cause = (
        f"{row['function']}{at} clips nothing, while {counted(row['parameters'], 'parameter')} of the optimizer have "
        f"gradients: it gets a {row['kind']} that is used up already"
    )
    return of_training(cause, REMEDY, [row])


RULE = Rule(find, judges_loop=True, precedes=("no-training", "divergence", "start-up"))
