"""Rule for a recurrent layer that walks over the samples of a batch, because it lacks batch_first."""

from __future__ import annotations

from dataclasses import replace

from cs_systems.analysis.comparison.loop_findings import SAMPLES_AS_TIME
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import MOSTLY, Evidence
from cs_systems.analysis.diagnosis._forms import of_class, of_training

FEWEST = 2  # steps


def find(evidence: Evidence) -> Diagnosis | None:
    """Find recurrent layers that take the samples of most observed batches as steps of time."""
    rows = [row for row in SAMPLES_AS_TIME.of(evidence.tables) if row["steps"] >= FEWEST]
    rows = [row for row in rows if row["steps"] > MOSTLY * row["of_steps"]]
    if not rows:
        return None
    row = rows[0]
    shape = f"{row['samples']} × {row['length']} × {row['width']}"
    walks = f"walks over the {row['samples']} samples of a batch as if they were steps of time, and mixes them"
    layer = of_class(row["module"], row["kind"])
    cause = f"{layer} {walks}: batch_first is False, and its input is {shape}"
    remedy = f"nn.{row['kind']}(..., batch_first=True), or transpose its input and its result"
    found = of_training(cause, remedy, [{**each} for each in rows])
    return replace(found, where=row["place"]) if row["place"] else found


RULE = Rule(find, judges_loop=True, refines=("small-operators",))
