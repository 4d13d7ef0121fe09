"""Rule for products with a constant matrix of which hardly any number differs from 0, such as a dense adjacency."""

from __future__ import annotations

from cs_systems.analysis.comparison.loop_findings import SPARSE_FACTORS
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis.product_order import place_of_products, saved
from cs_systems.core.units import counted

REMEDY = (
    "make it a sparse tensor once (matrix.to_sparse().coalesce(), torch.sparse.mm), or gather and add along its "
    "entries (index_add)"
)


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the time that sparse matrices save, measured on the same matrices."""
    rows = [row for row in SPARSE_FACTORS.of(evidence.tables) if row["sparse_s"] < row["time_s"]]
    saving = saved(evidence, [(row["time_s"], row["sparse_s"]) for row in rows])
    if saving is None or (step_s := evidence.step_s) is None:
        return None
    first = max(rows, key=lambda row: row["time_s"])
    share = first["nonzeros"] / (first["rows"] * first["columns"])
    products = counted(sum(row["products"] for row in rows), "product")
    others = f"; {counted(len(rows) - 1, 'more such matrix', 'more such matrices')}" if len(rows) > 1 else ""
    cause = (
        f"about {saving.lasted_s / step_s:.0%} of the step is {products} with a constant matrix of {first['rows']:,} × "
        f"{first['columns']:,}, of which {share:.1%} of the numbers are not 0{others}; sparse products take "
        f"{saving.other_share:.0%} of the time"
    )
    where = place_of_products(evidence)
    return Diagnosis(cause, REMEDY, step_s, takes=saving.takes, evidence=tuple({**row} for row in rows), where=where)


RULE = Rule(find, refines=("small-operators",))
