"""Rule for gradients that are never cleared: each update uses the sum of all gradients so far."""

from __future__ import annotations

from cs_systems.analysis.comparison.loop_findings import UPDATES
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis._forms import of_training

FEWEST = 3  # optimizer steps: one alone may follow an update that is meant to be repeated
NOTABLE = 0.5  # share of the optimizer steps: above, clearing is the exception
REMEDY = "call optimizer.zero_grad() once per update, before the first backward pass or after optimizer.step()"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find an optimizer that steps again with gradients of its earlier steps.

    Accumulation within a step does not count.
    """
    rows = [row for row in UPDATES.of(evidence.tables) if row["stale"] >= FEWEST]
    rows = [row for row in rows if row["stale"] > NOTABLE * row["again"]]
    if not rows:
        return None
    row = max(rows, key=lambda each: each["stale"])
    count = "all" if row["stale"] == row["again"] else f"{row['stale']} of"
    cause = (
        f"the gradients are not cleared: in {count} {row['again']} steps of {row['optimizer']} that were looked at, "
        "those of earlier steps are still in them"
    )
    return of_training(cause, REMEDY, rows)


RULE = Rule(find, judges_loop=True, refines=("divergence", "no-training"), precedes=("start-up",))
