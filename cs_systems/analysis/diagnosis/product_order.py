"""Rule for products of three matrices in the costlier order, such as linear attention that makes a score matrix."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from cs_systems.analysis.comparison.loop_findings import INNER_LINES, PRODUCT_ORDERS
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis.own_python import called_at
from cs_systems.config import Phase
from cs_systems.core.units import counted

NOTABLE = 0.1  # share of the step that the other way saves
MOST_LONGER = 2.5  # times the phases that hold the products; a longer measurement is not about this step
REMEDY = (
    "if nothing else needs that matrix, multiply the last two first: a @ (b @ c) in place of (a @ b) @ c, for "
    "attention without softmax q @ (k.transpose(-2, -1) @ v), with sums over rows as q @ k.sum(-2).unsqueeze(-1); or "
    "torch.linalg.multi_dot"
)
_PRODUCT = re.compile(r" @ |\b(matmul|bmm|mm|mv|einsum|F\.linear|functional\.linear)\(")


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the time that the other order saves, measured on matrices of the same sizes."""
    rows = [row for row in PRODUCT_ORDERS.of(evidence.tables) if row["other_s"] < row["time_s"]]
    saving = saved(evidence, [(row["time_s"], row["other_s"]) for row in rows])
    if saving is None or (step_s := evidence.step_s) is None:
        return None
    first = max(rows, key=lambda row: row["time_s"])
    others = sum(row["products"] for row in rows) - 1
    more = f", and {counted(others, 'similar product')}" if others else ""
    a, b, c, d = first["rows"], first["inner"], first["summed"], first["width"]
    each = f" for each of {first['batches']:,} batches" if first["batches"] > 1 else ""
    cause = (
        f"about {saving.lasted_s / step_s:.0%} of the step is products of three matrices in the costlier order: "
        f"({a:,} × {b:,} by {b:,} × {c:,}) by {c:,} × {d:,} makes a matrix of {a:,} × {c:,}{each}{more}; the other "
        f"order makes one of {b:,} × {d:,}, and needs {first['flops_share']:.0%} of the arithmetic"
    )
    where = place_of_products(evidence)
    return Diagnosis(cause, REMEDY, step_s, takes=saving.takes, evidence=tuple({**row} for row in rows), where=where)


class Saving(NamedTuple):
    """Seconds of a step that products take, and that another way to compute them saves; its share of their time."""

    lasted_s: float
    takes: float
    other_share: float


def saved(evidence: Evidence, times_s: Sequence[tuple[float, float]]) -> Saving | None:
    """Return what products save in a step, by their measured times now and the other way; None if it is too little."""
    measured_s, other_s = sum(now for now, _ in times_s), sum(other for _, other in times_s)
    lasted_s = min(measured_s, evidence.phases_s(Phase.FORWARD, Phase.LOSS, Phase.BACKWARD))
    if evidence.step_s is None or not times_s or measured_s > MOST_LONGER * lasted_s:
        return None
    takes = lasted_s * (1 - other_s / measured_s)
    return None if takes < NOTABLE * evidence.step_s else Saving(lasted_s, takes, other_s / measured_s)


def place_of_products(evidence: Evidence, named: re.Pattern[str] = _PRODUCT) -> str:
    """Return the line with the most time among those with a product, if they are all in one function.

    named: the pattern of such lines, for other operators.
    """
    phases = {Phase.FORWARD.value, Phase.LOSS.value}
    lines = [row for row in INNER_LINES.of(evidence.tables) if row["phase"] in phases and named.search(row["source"])]
    if len({(row["function"], row["place"].partition(":")[0]) for row in lines}) != 1:
        return ""
    line = max(lines, key=lambda row: row["time_s"])
    return called_at(line["function"], line["place"], None)


RULE = Rule(find, refines=("small-operators",))
