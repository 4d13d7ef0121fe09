"""Rule for hooks that are registered in each step and never removed, so that each step calls more of them."""

from __future__ import annotations

from cs_systems.analysis.comparison.loop_findings import HOOKS
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.config import Phase

FEWEST = 10  # more hooks than at first; a few may belong to a change in the training
REMEDY = "register them once before the loop, or keep the handle and call handle.remove() in each step"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find a number of hooks that grows from step to step; hooks lengthen the model's phases."""
    row, step_s = HOOKS.first(evidence.tables), evidence.step_s
    if row is None or step_s is None or row["last"] - row["first"] < FEWEST:
        return None
    where = f", registered at {row['place']}" if row.get("place") else ""
    cause = (
        f"the number of hooks grows by {row['per_step']:.3g} a step, from {row['first']} to {row['last']} in "
        f"{row['steps']} steps (the newest on {row['module']}{where})"
    )
    model_s = evidence.phases_s(Phase.FORWARD, Phase.BACKWARD)
    takes = min(step_s, model_s * (1 - row["first"] / row["last"]))
    return Diagnosis(cause, REMEDY, step_s, takes=takes, evidence=(row,))


RULE = Rule(find, refines=("growth",))
