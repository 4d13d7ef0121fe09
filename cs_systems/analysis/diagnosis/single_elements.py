"""Rule for loops over the elements of a tensor inside the model: each element is an operator of its own."""

from __future__ import annotations

import builtins
import math
from collections.abc import Iterator, Mapping, Sequence

from cs_systems.analysis.comparison.loop_findings import (
    ELEMENT_SUMS,
    INNER_LINES,
    SINGLE_ELEMENTS,
    InnerLineRow,
    SingleElementsRow,
)
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis.python_in_forward import of_lines
from cs_systems.config import Phase

NOTABLE = 0.05  # share of the step
REMEDY = (
    "compute whole tensors by one operator, such as a comparison or torch.arange; what never changes, once: keep it in "
    "a buffer (register_buffer)"
)


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the time of own lines in forward and loss that read or write single elements of tensors."""
    known = {row["place"]: row for row in SINGLE_ELEMENTS.of(evidence.tables)}
    if not known or ELEMENT_SUMS.of(evidence.tables):  # sums count with their backward
        return None
    lines = [
        row
        for row in INNER_LINES.of(evidence.tables)
        if row["place"] in known and row["phase"] in (Phase.FORWARD, Phase.LOSS) and _is_of_elements(row)
    ]
    functions = dict.fromkeys(known[row["place"]]["function"] for row in lines)
    elements = sum(row["reads"] + row["writes"] for row in known.values() if row["function"] in functions)
    lines = [each for name in functions for each in _at_most(known, name, lines)]
    what = f"goes into {elements:,} single elements of tensors, which Python reads or writes one by one"
    return of_lines(lines, evidence, what, REMEDY, NOTABLE, is_known=False)


def _at_most(
    known: Mapping[str, SingleElementsRow], function: str, lines: Sequence[InnerLineRow]
) -> Iterator[InnerLineRow]:
    """Yield the lines of a function, together with no more than the time of its elements.

    Samples of several lines that call the same function can have one place.
    """
    elements_s = sum(row.get("time_s", math.inf) for row in known.values() if row["function"] == function)
    own = [row for row in lines if known[row["place"]]["function"] == function]
    share = min(1.0, elements_s / (sum(row["time_s"] for row in own) or math.inf))
    for row in own:
        yield {**row, "time_s": share * row["time_s"]}


def _is_of_elements(row: InnerLineRow) -> bool:
    """Return whether the time belongs to elements and numbers, and not to a module or function that the line calls."""
    method = row["method"]
    return method is None or method == "item" or hasattr(math, method) or hasattr(builtins, method)


RULE = Rule(find, refines=("small-operators", "python-in-forward"))
