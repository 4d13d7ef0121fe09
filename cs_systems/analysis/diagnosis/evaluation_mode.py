"""Rule for a model that trains in evaluation mode, because nothing calls train() after an evaluation."""

from __future__ import annotations

from cs_systems.analysis.comparison.loop_findings import EVALUATION_MODE
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis._forms import of_training
from cs_systems.analysis.diagnosis.own_python import called_at

FEWEST = 3  # steps in evaluation mode
REMEDY = "call model.train() after each evaluation"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find a model that stays in the mode to which an evaluation has switched it."""
    rows = [row for row in EVALUATION_MODE.of(evidence.tables) if row["steps"] >= FEWEST]
    if not rows:
        return None
    row = rows[0]
    where = called_at(row["function"], row["place"], None)
    words = {"dropout": "dropout is off", "statistics": "running statistics are fixed"}
    effects = " and ".join(text for name, text in words.items() if row[name])  # type: ignore[literal-required]
    cause = (
        f"{row['model']} trains in evaluation mode from step {row['since']} on: {where} calls eval(), and nothing "
        f"calls train() after it, so that {effects}"
    )
    return of_training(cause, REMEDY, rows)


RULE = Rule(find, judges_loop=True, precedes=("start-up",))
