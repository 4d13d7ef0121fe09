"""Rule for a learning rate that vanishes within some steps, as if each batch were an epoch."""

from __future__ import annotations

from cs_systems.analysis.comparison.loop_findings import LEARNING_RATES
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis._forms import of_training

FEWEST = 3  # observed steps after the timed ones
SMALL = 1e-3  # share of the largest rate; at the end of a short schedule a rate is larger, but for the last steps
REMEDY = "call scheduler.step() once per epoch, or give the scheduler the number of batches"
OWN = "find what lowers it in each step, such as a scheduler that was meant for epochs"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find an optimizer of which the learning rate is a small share of the first ones in all steps after the timing."""
    rows = [row for row in LEARNING_RATES.of(evidence.tables) if row["observed_after"] >= FEWEST]
    rows = [row for row in rows if 0 < row["largest_after"] < SMALL * row["largest"]]
    if not rows:
        return None
    row = rows[0]
    name, times = row.get("scheduler"), row.get("scheduled")
    by = f": {name} has stepped {times} times" if name and times else ""
    cause = (
        f"the learning rate of {row['optimizer']} vanishes: from {row['largest']:.3g} to {row['last']:.3g} in "
        f"{row['steps']} steps{by}"
    )
    return of_training(cause, REMEDY if name else OWN, rows)


RULE = Rule(find, judges_loop=True, precedes=("start-up",))
