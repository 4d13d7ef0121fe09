"""Rule for updates that the program undoes: it sets the trained weights back after each step of the optimizer."""

from __future__ import annotations

from cs_systems.analysis.comparison.loop_findings import UNDONE_UPDATES
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis._forms import of_training

FEWEST = 3  # observed updates
REMEDY = (
    "do not write into the weights that are trained: a soft update or an average writes into the target or the copy, "
    "and weights that are swapped for an evaluation are restored after it"
)


def find(evidence: Evidence) -> Diagnosis | None:
    """Find an optimizer with updates that are all undone before the next step uses the weights."""
    rows = [row for row in UNDONE_UPDATES.of(evidence.tables) if row["undone"] == row["steps"] >= FEWEST]
    if not rows:
        return None
    row = max(rows, key=lambda each: each["steps"])
    who = "the program"
    if row["place"]:
        who = f"{row['function']}() at {row['place']}" if row["function"] else row["place"]
    cause = (
        f"the updates are undone: after each of {row['steps']} steps of {row['optimizer']} that were looked at, {who} "
        f"sets the weights back by at least {row['share']:.0%} of what the step changed"
    )
    return of_training(cause, REMEDY, rows)


RULE = Rule(find, judges_loop=True, precedes=("start-up",))
