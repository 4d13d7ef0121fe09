"""Rule for random numbers that are the same in each step, because a generator is seeded anew."""

from __future__ import annotations

from cs_systems.analysis.comparison.loop_findings import RANDOM_DRAWS, RandomDrawRow
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis._forms import of_training
from cs_systems.core.units import counted

FEWEST = 3  # observed steps
MOST = 2  # most draws that are named
REMEDY = "make and seed the generator once, before the loop; draw once what is to stay the same"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find draws of random numbers that gave the same numbers in all observed steps."""
    rows = [row for row in RANDOM_DRAWS.of(evidence.tables) if row["steps"] >= FEWEST]
    if not rows:
        return None
    named = [f"{row['drawn']} ({row['shape']}) {_where(row)}" for row in rows[:MOST]]
    more = f" and {counted(len(rows) - MOST, 'more draw')}" if len(rows) > MOST else ""
    steps = min(row["steps"] for row in rows)
    cause = (
        f"each step draws the same random numbers, as from a generator that is seeded anew: {', '.join(named)}{more}, "
        f"equal in all {steps} steps that were looked at"
    )
    return of_training(cause, REMEDY, rows)


def _where(row: RandomDrawRow) -> str:
    return f"in {row['function']}() at {row['place']}" if row["function"] else f"at {row['place']}"


RULE = Rule(find, judges_loop=True, precedes=("start-up",))
