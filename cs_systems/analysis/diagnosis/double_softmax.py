"""Rule for a loss that applies softmax or a sigmoid to numbers that went through it already."""

from __future__ import annotations

from cs_systems.analysis.comparison.loop_findings import DOUBLE_SOFTMAX
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis._forms import of_training

FEWEST = 2  # passes
NOTABLE = 0.5  # share of the passes that were looked at


def find(evidence: Evidence) -> Diagnosis | None:
    """Find a loss over probabilities that takes logits, so that its gradients are small and its floor is high."""
    rows = DOUBLE_SOFTMAX.of(evidence.tables)
    rows = [row for row in rows if row["passes"] >= FEWEST and row["passes"] > NOTABLE * row["of_passes"]]
    if not rows:
        return None
    row = max(rows, key=lambda each: each["passes"])
    function, loss = row["function"], row["loss"]
    cause = (
        f"the loss applies {function} twice: {loss} takes logits, and its input went through {function} already, which "
        "makes the gradients small"
    )
    return of_training(cause, f"give {loss} the logits: leave {function} out of what the model returns", rows)


RULE = Rule(find, judges_loop=True, precedes=("start-up",))
