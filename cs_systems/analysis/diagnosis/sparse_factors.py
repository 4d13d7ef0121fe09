"""Rule for products with a constant matrix of which hardly any number differs from 0, such as a dense adjacency."""

from __future__ import annotations

from cs_systems.analysis.comparison.loop_findings import SPARSE_FACTORS
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis.product_order import MOST_LONGER, place_of_products
from cs_systems.config import Phase
from cs_systems.core.units import counted

NOTABLE = 0.1  # share of the step that sparse matrices save
REMEDY = (
    "make it a sparse tensor once (matrix.to_sparse().coalesce(), torch.sparse.mm), or gather and add along its "
    "entries (index_add)"
)


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the time that sparse matrices save, measured on the same matrices."""
    rows, step_s = SPARSE_FACTORS.of(evidence.tables), evidence.step_s
    if step_s is None or not rows:
        return None
    rows = [row for row in rows if row["sparse_s"] < row["time_s"]]
    measured_s, sparse_s = sum(row["time_s"] for row in rows), sum(row["sparse_s"] for row in rows)
    lasted_s = min(measured_s, evidence.phases_s(Phase.FORWARD, Phase.LOSS, Phase.BACKWARD))
    if not rows or measured_s > MOST_LONGER * lasted_s:
        return None
    takes = lasted_s * (1 - sparse_s / measured_s)
    if takes < NOTABLE * step_s:
        return None
    first = max(rows, key=lambda row: row["time_s"])
    share = first["nonzeros"] / (first["rows"] * first["columns"])
    products = counted(sum(row["products"] for row in rows), "product")
    others = f"; {counted(len(rows) - 1, 'more such matrix', 'more such matrices')}" if len(rows) > 1 else ""
    cause = (
        f"about {lasted_s / step_s:.0%} of the step is {products} with a constant matrix of {first['rows']:,} × "
        f"{first['columns']:,}, of which {share:.1%} of the numbers are not 0{others}; sparse products take "
        f"{sparse_s / measured_s:.0%} of the time"
    )
    where = place_of_products(evidence)
    return Diagnosis(cause, REMEDY, step_s, takes=takes, evidence=tuple({**row} for row in rows), where=where)


RULE = Rule(find, refines=("small-operators",))
