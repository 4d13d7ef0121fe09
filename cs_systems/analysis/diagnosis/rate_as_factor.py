"""Rule for a LambdaLR with a function that returns the learning rate itself instead of a factor."""

from __future__ import annotations

from cs_systems.analysis.comparison.loop_findings import RATE_FACTORS
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis._forms import of_training

LARGEST = 0.05  # factor; a group that learns slowly on purpose has often a tenth
LEAST_RATIO, MOST_RATIO = 0.2, 2.0  # of the factor to the optimizer's rate, which the function seems to return
REMEDY = "return a factor from the function, 1 for the full rate"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find a factor that is about as large as the learning rate that it multiplies."""
    rows = [row for row in RATE_FACTORS.of(evidence.tables) if row["largest_factor"] < LARGEST]
    rows = [row for row in rows if row["factor"] >= LEAST_RATIO * row["initial"]]
    rows = [row for row in rows if row["largest_factor"] <= MOST_RATIO * row["initial"]]
    if not rows:
        return None
    row = rows[0]
    cause = (
        f"the learning rate of {row['optimizer']} is {row['rate']:.3g} instead of {row['initial']:.3g}: LambdaLR "
        f"multiplies it by what its function returns, now {row['factor']:.3g}, which seems to be the rate itself"
    )
    return of_training(cause, REMEDY, rows)


RULE = Rule(find, judges_loop=True, precedes=("start-up",))
