"""Rule for copies of tensors inside forward: clone() and contiguous(), which compute nothing."""

from __future__ import annotations

from cs_systems.analysis.comparison.loop_findings import INNER_LINES
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis.python_in_forward import of_lines

COPIES = ("clone", "contiguous", "copy")
REMEDY = (
    "remove clone() where nothing writes in place, and contiguous() where the next operator takes any strides; "
    "reshape() copies only where it must"
)


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the time of own lines of forward that copy a tensor; backward copies its gradient once more."""
    rows = [row for row in INNER_LINES.of(evidence.tables) if row["method"] in COPIES and not row["is_plain"]]
    return of_lines(rows, evidence, "is copies of tensors in forward (clone, contiguous)", REMEDY)


RULE = Rule(find)
