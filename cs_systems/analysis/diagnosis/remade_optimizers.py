"""Rule for an optimizer that is made anew in each step: what it keeps from step to step is lost."""

from __future__ import annotations

from cs_systems.analysis.comparison.loop_findings import REMADE_OPTIMIZERS
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis._forms import of_training

FEWEST = 3  # steps of a new optimizer: a few may belong to a change in the training, such as unfreezing
NOTABLE = 0.5  # share of the observed steps
REMEDY = "make it once before the loop; to change its learning rate, set it in optimizer.param_groups or by a scheduler"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find an optimizer with a state, made anew for most of the observed steps."""
    rows = [row for row in REMADE_OPTIMIZERS.of(evidence.tables) if row["state"] and row["made"] >= FEWEST]
    rows = [row for row in rows if row["made"] > NOTABLE * row["steps"]]
    if not rows:
        return None
    row = max(rows, key=lambda each: each["made"])
    count = "all" if row["made"] == row["steps"] else f"{row['made']} of"
    cause = (
        f"the optimizer is made anew: in {count} {row['steps']} steps that were looked at, a new {row['optimizer']} "
        f"begins without what the one before has kept ({row['state']})"
    )
    return of_training(cause, REMEDY, rows)


RULE = Rule(find, judges_loop=True, refines=("divergence",), precedes=("start-up",))
