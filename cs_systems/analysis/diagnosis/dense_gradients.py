"""Rule for updates of a whole table, such as that of an embedding, of which a step uses few rows."""

from __future__ import annotations

from cs_systems.analysis.comparison.loop_findings import DENSE_GRADIENTS
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import MOSTLY, Evidence
from cs_systems.config import Phase

NOTABLE = 0.10  # share of the step
REMEDY = "nn.Embedding(sparse=True) with SparseAdam or SGD for this table, which update the used rows alone"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find an optimizer with most of its elements in a table whose gradient is zero in nine of ten rows."""
    row = max(DENSE_GRADIENTS.of(evidence.tables), key=lambda each: each["share"], default=None)
    step_s, update_s = evidence.step_s, evidence.phases_s(Phase.OPTIMIZER)
    if row is None or step_s is None or row["share"] < MOSTLY or row["share"] * update_s < NOTABLE * step_s:
        return None
    cause = (
        f"{update_s / step_s:.0%} of the step is the optimizer, with {row['share']:.0%} of its elements in "
        f"{row['parameter']}, of which a step uses {row['used']:,} of {row['rows']:,} rows"
    )
    return Diagnosis(cause, REMEDY, step_s, takes=min(step_s, row["share"] * update_s), evidence=({**row},))


RULE = Rule(find, refines=("unfused-optimizer",))
