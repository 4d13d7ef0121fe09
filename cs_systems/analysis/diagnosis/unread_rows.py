"""Rule for rows of a linear layer's result that get no gradient, such as all positions but the last."""

from __future__ import annotations

import re

from cs_systems.analysis.comparison.loop_findings import INNER_LINES, UNREAD_ROWS
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis.own_python import called_at
from cs_systems.analysis.diagnosis.product_order import saved
from cs_systems.core.units import counted

REMEDY = "pick these rows before {layer} instead of after it, unless something else uses the others"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the time that a layer saves with the rows alone that the loss reads, measured for the same sizes."""
    rows = [row for row in UNREAD_ROWS.of(evidence.tables) if row["read_s"] < row["time_s"]]
    saving = saved(evidence, [(row["time_s"], row["read_s"]) for row in rows])
    if saving is None or (step_s := evidence.step_s) is None:
        return None
    first = max(rows, key=lambda row: row["time_s"] - row["read_s"])
    others = f"; {counted(len(rows) - 1, 'more such layer')}" if len(rows) > 1 else ""
    cause = (
        f"about {saving.lasted_s / step_s:.0%} of the step is {first['layer']} for {first['rows']:,} rows, of which "
        f"the loss gives {first['read']:,} a gradient{others}; for these alone it takes {saving.other_share:.0%} of "
        "the time"
    )
    remedy = REMEDY.format(layer=first["layer"])
    where = _place(evidence, first["layer"])
    return Diagnosis(cause, remedy, step_s, takes=saving.takes, evidence=tuple({**row} for row in rows), where=where)


def _place(evidence: Evidence, layer: str) -> str:
    """Return the line that calls the layer by its name; "" without one, or with several."""
    called = re.compile(rf"\.{re.escape(layer.rpartition('.')[2])}\(")
    lines = [row for row in INNER_LINES.of(evidence.tables) if called.search(row["source"])]
    if len({row["place"] for row in lines}) != 1:
        return ""
    return called_at(lines[0]["function"], lines[0]["place"], None)


RULE = Rule(find, refines=("small-operators",))
