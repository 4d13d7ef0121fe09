"""Rule for calls of nn.MultiheadAttention for weights that the program does not read, so that no call runs fused."""

from __future__ import annotations

from cs_systems.analysis.comparison.loop_findings import ATTENTION_WEIGHTS
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis.own_python import called_at
from cs_systems.analysis.diagnosis.product_order import saved
from cs_systems.core.units import counted

REMEDY = "pass need_weights=False to the call, which gives the same first result but for rounding"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the time that the same calls save without weights, as measured."""
    rows = [row for row in ATTENTION_WEIGHTS.of(evidence.tables) if row["fused_s"] < row["time_s"]]
    saving = saved(evidence, [(row["time_s"], row["fused_s"]) for row in rows])
    if saving is None or (step_s := evidence.step_s) is None:
        return None
    first = max(rows, key=lambda row: row["time_s"])
    calls = sum(row["calls"] for row in rows)
    cause = (
        f"about {saving.lasted_s / step_s:.0%} of the step is {counted(calls, 'call')} of nn.MultiheadAttention, such "
        f"as {first['module']}, with attention weights that nothing reads; without them the same calls take "
        f"{saving.other_share:.0%} of the time"
    )
    places = {(row["function"], row["place"]) for row in rows}
    where = called_at(first["function"], first["place"], None) if len(places) == 1 else ""
    return Diagnosis(cause, REMEDY, step_s, takes=saving.takes, evidence=tuple({**row} for row in rows), where=where)


RULE = Rule(find, refines=("small-operators",))
