"""Rule for attention that returns weights which the caller drops, so that it cannot run fused."""

from __future__ import annotations

from cs_systems.analysis.comparison.loop_findings import ATTENTION_WEIGHTS
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis.product_order import MOST_LONGER, saved
from cs_systems.config import Phase
from cs_systems.core.units import counted

NOTABLE = 0.05  # share of the step that is saved without the weights
REMEDY = (
    "pass need_weights=False, with which attention runs fused (scaled_dot_product_attention, which has no second "
    "derivatives)"
)


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the time that attention takes longer with the weights, measured on inputs of the same shapes."""
    rows = [row for row in ATTENTION_WEIGHTS.of(evidence.tables) if row["other_s"] < row["time_s"]]
    phases_s = evidence.phases_s(Phase.FORWARD, Phase.LOSS, Phase.BACKWARD)
    most_s, measured_s = sum(row["share"] for row in rows) * phases_s, sum(row["time_s"] for row in rows)
    if measured_s > MOST_LONGER * most_s:
        return None
    part = min(1.0, most_s / measured_s) if measured_s else 0.0  # other programs make the measurement longer
    saving = saved(evidence, [(part * row["time_s"], part * row["other_s"]) for row in rows], NOTABLE)
    if saving is None or (step_s := evidence.step_s) is None:
        return None
    first = max(rows, key=lambda row: row["time_s"] - row["other_s"])
    cause = (
        f"about {saving.lasted_s / step_s:.0%} of the step is nn.MultiheadAttention that returns weights which the "
        f"program drops: {counted(sum(row['calls'] for row in rows), 'call')}, such as {first['module']} with scores "
        f"of {first['scores']} in {first['heads']} heads; without them it takes {saving.other_share:.0%} of the time"
    )
    place = first["place"]
    where = f"{first['function']}() at {place}" if first["function"] else place
    return Diagnosis(cause, REMEDY, step_s, takes=saving.takes, evidence=tuple({**row} for row in rows), where=where)


RULE = Rule(find, refines=("small-operators",))
