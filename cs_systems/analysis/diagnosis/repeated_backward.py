"""Rule for backward passes that go through the same operators again, because each loss has a pass of its own."""

from __future__ import annotations

from cs_systems.analysis.comparison.loop_findings import REPEATED_BACKWARD
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.config import Phase

NOTABLE = 0.5  # share of the observed steps
REMEDY = (
    "add the losses and call backward once, without retain_graph: the gradients are the same, unless the program reads "
    "them between the passes"
)


def find(evidence: Evidence) -> Diagnosis | None:
    """Find operators that several passes before one update compute again; their gradients add up."""
    row, step_s = REPEATED_BACKWARD.first(evidence.tables), evidence.step_s
    if row is None or step_s is None or row["steps"] < NOTABLE * row["of_steps"]:
        return None
    takes = min(step_s, row["share"] * evidence.phases_s(Phase.BACKWARD))
    cause = (
        f"{row['passes']:.0f} backward passes of a step go through the same part of the graph: about "
        f"{row['share']:.0%} of their work is repeated, {takes / step_s:.0%} of the step"
    )
    return Diagnosis(cause, REMEDY, step_s, takes=takes, evidence=(row,), where=row.get("place") or "")


RULE = Rule(find, precedes=("small-operators",))
