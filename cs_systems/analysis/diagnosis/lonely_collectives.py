"""Rule for collectives of a program that runs as one process, so that nobody takes part in them."""

from __future__ import annotations

from cs_systems.analysis.comparison.loop_findings import OWN_PYTHON
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis.own_python import FEWEST, NOTABLE, is_lonely, longest

REMEDY = "leave them out where torch.distributed.get_world_size() is 1"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the time in which a loop of one rank calls collectives between its phases."""
    step_s = evidence.step_s
    if not evidence.is_loop or step_s is None:
        return None
    own = OWN_PYTHON.of(evidence.tables)
    rows = [row for row in own if row["samples"] >= FEWEST and is_lonely(row, evidence)]
    lasted_s = min(step_s, sum(row["time_s"] for row in rows))
    if lasted_s < NOTABLE * step_s:
        return None
    rows.sort(key=lambda row: -row["time_s"])
    _, lines = longest(rows, step_s)
    cause = f"{lasted_s / step_s:.0%} of the step is collectives, although there is one process: {lines}"
    return Diagnosis(cause, REMEDY, step_s, step_s - lasted_s, evidence=tuple(rows))


RULE = Rule(find)
