"""Rule for products with copies of one tensor, such as weights that are stacked for each sample of a batch."""

from __future__ import annotations

import re

from cs_systems.analysis.comparison.loop_findings import COPIED_FACTORS, INNER_LINES
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis.product_order import place_of_products, saved
from cs_systems.config import Phase
from cs_systems.core.units import counted, human

REMEDY = (
    "multiply the tensor itself, w of k matrices, with n × k others, x: torch.einsum({product}).contiguous(); expand() "
    "and the broadcasting of matmul make the same copies"
)
MADE = {
    "stack": "by torch.stack",
    "cat": "by torch.cat",
    "repeat": "by repeat()",
    "expand": "by expand() or the broadcasting of matmul",
}
_FIRST, _SECOND = '"kij,nkjm->nkim", w, x', '"nkmi,kij->nkmj", x, w'
_LINES = {
    "stack": re.compile(r"\bv?stack\("),
    "cat": re.compile(r"\b(cat|concat|concatenate|vstack)\("),
    "repeat": re.compile(r"\b(repeat|tile)\("),
}


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the time that products of the same sizes save with the tensor itself, as measured."""
    rows = [row for row in COPIED_FACTORS.of(evidence.tables) if row["shared_s"] < row["time_s"]]
    saving = saved(evidence, [(row["time_s"], row["shared_s"]) for row in rows])
    if saving is None or (step_s := evidence.step_s) is None:
        return None
    first = max(rows, key=lambda row: row["time_s"])
    name, size = first["tensor"] or "one tensor", human(first["copied_bytes"], "bytes")
    others = sum(row["products"] for row in rows) - 1
    more = f", and {counted(others, 'similar product')}" if others else ""
    cause = (
        f"about {saving.lasted_s / step_s:.0%} of the step is a product with {first['copies']:,} copies of {name}, "
        f"{size} in all, {MADE[first['how']]}{more}; with the tensor itself it takes {saving.other_share:.0%} of the "
        "time"
    )
    where = _place(evidence, _LINES.get(first["how"]))
    remedy = REMEDY.format(product=_FIRST if first["is_first"] else _SECOND)
    return Diagnosis(cause, remedy, step_s, takes=saving.takes, evidence=tuple({**row} for row in rows), where=where)


def _place(evidence: Evidence, named: re.Pattern[str] | None) -> str:
    """Return the line that copies, or, without a pattern of such lines, the one that multiplies; "" if several may."""
    if named is None:
        return place_of_products(evidence)
    phases = {Phase.FORWARD.value, Phase.LOSS.value}
    places = {
        row["place"]
        for row in INNER_LINES.of(evidence.tables)
        if row["phase"] in phases and named.search(row["source"])
    }
    return place_of_products(evidence, named) if len(places) == 1 else ""


RULE = Rule(find, refines=("small-operators",))
