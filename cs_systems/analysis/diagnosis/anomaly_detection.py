"""Rule for autograd's anomaly detection: it keeps a stack for each operator and checks each gradient for NaN."""

from __future__ import annotations

from cs_systems.analysis.comparison.loop_findings import ANOMALY
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.config import Phase

NOTABLE = 0.5  # share of the backward passes; a single step may search for a NaN on purpose
REMEDY = "leave it off except to find a NaN: torch.autograd.set_detect_anomaly(False)"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find anomaly detection in most timed steps; it slows forward and backward."""
    row, step_s = ANOMALY.first(evidence.tables), evidence.step_s
    if row is None or step_s is None or row["with_detection"] <= NOTABLE * row["passes"]:
        return None
    count = "all" if row["with_detection"] == row["passes"] else f"{row['with_detection']} of"
    cause = f"autograd's anomaly detection is on in {count} {row['passes']} timed backward passes"
    slowed_s = evidence.phases_s(Phase.FORWARD, Phase.LOSS, Phase.BACKWARD)
    return Diagnosis(cause, REMEDY, step_s, takes=min(step_s, slowed_s), evidence=(row,))


RULE = Rule(find)
