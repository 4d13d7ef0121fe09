"""Rule for a loss that pairs each prediction with all targets, because their shapes differ by a dimension of 1."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from cs_systems.analysis.comparison.loop_findings import INNER_LINES, PAIRED_TARGETS
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis._forms import of_training
from cs_systems.config import Phase

FEWEST = 2  # steps with such a loss
NOTABLE = 0.5  # share of the observed steps, and of the samples in the loss for the function that is named
FEWEST_SAMPLES = 10
OTHERS = ("backward", "zero_grad")  # calls between the loss and backward
REMEDY = "give the prediction and the target the same shape, such as by {}.squeeze(-1)"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find a loss in which no target belongs to one prediction."""
    row = PAIRED_TARGETS.first(evidence.tables)
    if row is None or row["steps"] < FEWEST or row["steps"] <= NOTABLE * row["of_steps"]:
        return None
    cause = (
        f"the loss pairs each of {row['predictions']} predictions with all {row['predictions']} targets, which trains "
        f"the model towards one value for all inputs: the shape of the predictions is {row['shape']}, and in the loss "
        f"it becomes {row['paired']}"
    )
    found = of_training(cause, REMEDY.format("prediction" if "×" in row["shape"] else "target"), [row])
    return replace(found, where=_where(evidence))


def _where(evidence: Evidence) -> str:
    """Return the function with most of the loss's time, in which these pairs are likely; empty if there is none."""
    rows = [
        row
        for row in INNER_LINES.of(evidence.tables)
        if row["phase"] == Phase.LOSS.value and row["method"] not in OTHERS
    ]
    times_s = Counter[str]()
    for row in rows:
        times_s[row["function"]] += row["time_s"]  # type: ignore[assignment]
    if not rows or sum(row["samples"] for row in rows) < FEWEST_SAMPLES:
        return ""
    ((function, most_s),) = times_s.most_common(1)
    if most_s < NOTABLE * sum(times_s.values()):
        return ""
    line = max((row for row in rows if row["function"] == function), key=lambda row: row["time_s"])
    at = f"{function}() at {line['place']}" if function else line["place"]
    return f"most of the loss's time is in {at}"


RULE = Rule(find, judges_loop=True, precedes=("start-up",))
