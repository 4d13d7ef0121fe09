"""Rule for updates of whole tables, such as embeddings, of which a step uses few rows."""

from __future__ import annotations

from cs_systems.analysis.comparison.loop_findings import DENSE_GRADIENTS
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import MOSTLY, Evidence
from cs_systems.config import Phase
from cs_systems.core.units import counted

NOTABLE = 0.10  # share of the step
REMEDY = "nn.Embedding(sparse=True) with SparseAdam or SGD for {}, which update the used rows alone"
OF_PENALTY = "penalise the used rows alone, which makes forward and backward shorter too, then "


def find(evidence: Evidence) -> Diagnosis | None:
    """Find an optimizer with most of its elements in tables of which a step uses at most one of ten rows.

    The gradient of the others is zero, or comes from a penalty on all rows, such as the sum of their squares.
    """
    rows = sorted(DENSE_GRADIENTS.of(evidence.tables), key=lambda each: -each["share"])
    step_s, update_s = evidence.step_s, evidence.phases_s(Phase.OPTIMIZER)
    share = min(1.0, sum(row["share"] for row in rows))
    if step_s is None or share < MOSTLY or share * update_s < NOTABLE * step_s:
        return None
    first, others = rows[0], len(rows) - 1
    is_penalised = any(row.get("is_penalised") for row in rows)
    about, apart = ("about ", ", apart from a penalty on all rows") if is_penalised else ("", "")
    used = f"of which a step uses {about}{first['used']:,} of {first['rows']:,} rows{apart}"
    more = f", and in {counted(others, 'similar table')}" if others else ""
    cause = (
        f"{update_s / step_s:.0%} of the step is the optimizer, with {share:.0%} of its elements in "
        f"{first['parameter']}, {used}{more}"
    )
    remedy = f"{OF_PENALTY if is_penalised else ''}{REMEDY.format('these tables' if others else 'this table')}"
    evidence_rows = tuple({**row} for row in rows)
    return Diagnosis(cause, remedy, step_s, takes=min(step_s, share * update_s), evidence=evidence_rows)


RULE = Rule(find, refines=("unfused-optimizer",))
