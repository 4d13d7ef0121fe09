"""Rule for steps of an optimizer that something undoes, such as a soft update in the wrong direction."""

from __future__ import annotations

from cs_systems.analysis.comparison.loop_findings import UNDONE_UPDATES
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis._forms import of_training
from cs_systems.core.units import counted

REMEDY = (
    "find what writes to the trained parameters after step(), such as a soft update that copies the target network "
    "into the trained one, and not the other way round, or a clamp that is narrower than a step"
)


def find(evidence: Evidence) -> Diagnosis | None:
    """Find an optimizer with steps that leave the parameters nearly as they were when a model is called again."""
    rows = UNDONE_UPDATES.of(evidence.tables)
    if not rows:
        return None
    row = max(rows, key=lambda each: each["parameters"])
    place = f" (step() at {row['place']})" if row["place"] else ""
    cause = (
        f"what {row['optimizer']} changes is undone before a model is called again{place}: in each of {row['steps']} "
        f"steps that were looked at, at most {row['left']:.1%} is left of the change of any of "
        f"{counted(row['compared'], 'compared parameter')}"
    )
    return of_training(cause, REMEDY, rows)


RULE = Rule(find, judges_loop=True, refines=("no-update",), precedes=("start-up",))
