"""Rule for padding: the model computes positions that hold no token."""

from __future__ import annotations

from cs_systems.analysis.comparison.loop_findings import PADDING
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence

LEAST = 0.15  # share of the positions; sorting by length leaves about as much
REMEDY = (
    "put sequences of similar length into a batch and pad to the longest of each batch, or pack several into one row"
)
MODEL_PHASES = ("forward", "loss", "backward")


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the padding of the batches; the model's time on it cannot become less than nothing."""
    row = PADDING.first(evidence.tables)
    if row is None or evidence.step_s is None or row["share"] < LEAST:
        return None
    model_s = min(evidence.step_s, evidence.phases_s(*MODEL_PHASES)) or evidence.step_s
    by = "by the tokens given to step()" if row["basis"] == "tokens" else "by the filler at the ends of rows"
    cause = f"{row['share']:.0%} of each batch ({row['shape']}) is padding, {by}"
    return Diagnosis(cause, REMEDY, evidence.step_s, takes=row["share"] * model_s, evidence=(row,))


RULE = Rule(find)
