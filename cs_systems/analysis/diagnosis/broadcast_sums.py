"""Rule for sums over a broadcast tensor: all differences or products in memory, where a matrix product would do."""

from __future__ import annotations

import re

from cs_systems.analysis.comparison.loop_findings import BROADCASTS, INNER_LINES
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis.python_in_forward import of_lines

# Lines that broadcast, apply an elementwise function, or sum up.
_WORK = re.compile(r"\[[^\]]*\bNone\b|\b(unsqueeze|expand\w*|repeat|pow|square|abs|exp|sum|mean|norm)\(")
REMEDY = "write it as a matrix product: torch.cdist or |a|² + |b|² - 2 a·b for distances, einsum for sums of products"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find lines of forward that broadcast or sum, if the graph has a large tensor that is made and summed up so."""
    broadcast = BROADCASTS.first(evidence.tables)
    if broadcast is None:
        return None
    chosen = [row for row in INNER_LINES.of(evidence.tables) if not row["is_plain"] and _WORK.search(row["source"])]
    ratio = broadcast["elements"] / max(1, broadcast["from_elements"])
    what = (
        f"goes into a tensor of {broadcast['shape']} in forward, with {ratio:,.0f} times the elements that it is made "
        "from, and into sums over it"
    )
    return of_lines(chosen, evidence, what, REMEDY)


RULE = Rule(find)
