"""Rule for modules that are called although nothing reads their results, such as the heads of other tasks."""

from __future__ import annotations

from cs_systems.analysis.comparison.loop_findings import UNUSED_OUTPUTS
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis.own_python import called_at
from cs_systems.config import Phase
from cs_systems.core.units import counted

NOTABLE = 0.05  # share of the step
REMEDY = "call only the modules with a result that the step needs"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the time of calls in forward with results that cease to exist unread in each step that was looked at."""
    row, step_s = UNUSED_OUTPUTS.first(evidence.tables), evidence.step_s
    if row is None or step_s is None:
        return None
    takes = min(row["time_s"], row["share"] * evidence.phases_s(Phase.FORWARD, Phase.LOSS))
    if takes < NOTABLE * step_s:
        return None
    cause = (
        f"{takes / step_s:.0%} of the step is {counted(row['calls'], 'call')} of modules with results that nothing "
        f"reads, such as {row['module']}"
    )
    where = called_at(row["function"], row["place"], None) if row["place"] else ""
    return Diagnosis(cause, REMEDY, step_s, takes=takes, evidence=(row,), where=where)


RULE = Rule(find, refines=("small-operators", "python-in-forward"))
