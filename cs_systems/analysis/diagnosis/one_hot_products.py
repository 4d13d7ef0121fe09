"""Rule for products of one-hot rows with a linear layer's weight, where an embedding would look the rows up."""

from __future__ import annotations

import re

from cs_systems.analysis.comparison.loop_findings import INNER_LINES, ONE_HOT, InnerLineRow, OneHotRow
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis._forms import of_class
from cs_systems.analysis.diagnosis.python_in_forward import FEWEST
from cs_systems.config import Phase
from cs_systems.core.tables import Row
from cs_systems.core.units import counted

FEWEST_STEPS = 2
NOTABLE = 0.1  # share of the step
SHOWN = 0.005  # least share of the step that is written
ONE = "look the rows of its weight up: nn.Embedding in place of nn.Linear, with the indices in place of the vectors"
SEVERAL = (
    'look the rows of its weight up: nn.EmbeddingBag(mode="sum") in place of nn.Linear, with the indices in place of '
    "the vectors"
)
WEIGHTED = " and their values as per_sample_weights"
BIAS = "; add its bias to the result"
SPARSE = "; sparse=True, with SGD, Adagrad or SparseAdam, limits the gradient and the update to the used rows"
_MAKES = re.compile(r"\bone_hot\(")
MAKING = ("one_hot", "float", "to", "type")  # methods on a line that makes one-hot rows


def find(evidence: Evidence) -> Diagnosis | None:
    """Find linear layers with inputs of hardly any number but 0, by the time of their products in each step.

    Where it is known, the time of the line that makes the rows, and of the optimizer for rows that are not used, is
    added.
    """
    rows = [row for row in ONE_HOT.of(evidence.tables) if row["steps"] >= max(FEWEST_STEPS, row["of_steps"])]
    step_s = evidence.step_s
    if not rows or step_s is None:
        return None
    row = max(rows, key=lambda each: each["time_s"])
    makes = _makes(row, evidence)
    products_s = sum(_products_s(each, evidence) for each in rows)
    made_s, update_s = sum(each["time_s"] for each in makes), sum(_update_s(each, evidence) for each in rows)
    takes = products_s + made_s + update_s
    if takes < NOTABLE * step_s:
        return None
    is_one = row["nonzeros"] == 1 and row["is_ones"]
    kind = "one-hot rows" if is_one else "rows of zeros with a few other numbers"
    seen = f"in the {counted(row['of_steps'], 'step')} that were looked at, at most {row['nonzeros']}"
    few = "1 is not 0" if is_one else f"{seen} {'is' if row['nonzeros'] == 1 else 'are'} not 0"
    others = f", as {len(rows) - 1} more layers do" if len(rows) > 2 else ", as one more layer does" * (len(rows) - 1)
    parts = [
        f"{of_class(row['module'], 'Linear')} multiplies rows of {row['width']:,} numbers of which {few}{others} "
        f"({products_s / step_s:.0%})"
    ]
    if made_s >= SHOWN * step_s:
        parts.append(f"they are made at {makes[0]['place']} ({made_s / step_s:.0%})")
    if is_updated := update_s >= SHOWN * step_s:
        parts.append(f"the optimizer updates the part of its weight that no row uses ({update_s / step_s:.0%})")
    listed = ", and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))
    cause = f"about {min(1.0, takes / step_s):.0%} of the step goes into {kind}: {listed}"
    remedy = ONE if is_one else SEVERAL if row["is_ones"] else SEVERAL + WEIGHTED
    evidence_rows: tuple[Row, ...] = (*rows, *makes)
    return Diagnosis(
        cause,
        remedy + BIAS + SPARSE * is_updated,
        step_s,
        takes=min(step_s, takes),
        evidence=evidence_rows,
        where=row["place"] or "",
    )


def _products_s(row: OneHotRow, evidence: Evidence) -> float:
    """Return the time of a layer's products, in backward by the measured ratio to forward's."""
    forward_s = min(row["time_s"], row["share"] * evidence.phases_s(Phase.FORWARD, Phase.LOSS))
    return forward_s + min(row["backward_ratio"] * forward_s, evidence.phases_s(Phase.BACKWARD))


def _update_s(row: OneHotRow, evidence: Evidence) -> float:
    """Return the time in which the optimizer updates columns of the weight that no row uses, by their number."""
    unused = max(0.0, 1 - row["rows"] * row["nonzeros"] / row["width"])
    return row["elements_share"] * unused * evidence.phases_s(Phase.OPTIMIZER)


def _makes(row: OneHotRow, evidence: Evidence) -> list[InnerLineRow]:
    """Return the samples of the one line that makes one-hot rows in the function that calls the layer."""
    made = [
        each
        for each in INNER_LINES.of(evidence.tables)
        if each["function"] == row["function"] and each["method"] in MAKING and _MAKES.search(each["source"])
    ]
    is_one_line = row["is_ones"] and len({each["place"] for each in made}) == 1
    return made if is_one_line and sum(each["samples"] for each in made) >= FEWEST else []


RULE = Rule(find)
