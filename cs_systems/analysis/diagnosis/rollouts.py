"""Rule for forward passes without gradients in every step: rollouts, generation, or evaluation.

Those of a teacher or a target network, which the loss needs, are no cause. Neither are those of a loop that does not
train: they are its work.
"""

from __future__ import annotations

from cs_systems.analysis.comparison.loop_findings import OWN_PYTHON, WITHOUT_GRADIENTS
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis.own_python import FEWEST, LEAST, MOST, NOTABLE, called_at
from cs_systems.config import Phase

TRAINING = {Phase.BACKWARD, Phase.OPTIMIZER}
REMEDY = "do it less often, or in fewer and larger batches"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the time of forward passes that train nothing, with the lines that call them."""
    step_s, phases = evidence.step_s, {*evidence.measurement.phase_names()} if evidence.measurement else set()
    if Phase.FORWARD in phases and not phases & TRAINING:
        return None
    rows = [row for row in OWN_PYTHON.of(evidence.tables) if row["phase"] == WITHOUT_GRADIENTS]
    rows = [row for row in rows if row["samples"] >= FEWEST and row["place"] and not row.get("feeds_model")]
    lasted_s = sum(row["time_s"] for row in rows)
    if step_s is None or lasted_s < NOTABLE * step_s:
        return None
    lasted_s = min(lasted_s, step_s)
    shown = [row for row in rows if row["time_s"] >= LEAST * step_s][:MOST]
    lines = ", ".join(
        f"{called_at(row['function'], row['place'], None)} ({row['time_s'] / step_s:.0%})" for row in shown
    )
    cause = f"{lasted_s / step_s:.0%} of the step is forward passes without gradients: {lines}"
    return Diagnosis(cause, REMEDY, step_s, takes=lasted_s, evidence=tuple(rows))


RULE = Rule(find)
