"""Rule for logs and prints inside the model, in lines that use tensors."""

from __future__ import annotations

import re

from cs_systems.analysis.comparison.loop_findings import INNER_LINES
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis.python_in_forward import of_lines

_WRITES = re.compile(r"\b_?log(ger|ging)?\.(debug|info|warning|error|log)\(|\bprint\(", re.IGNORECASE)
REMEDY = (
    "write less often; give the logger arguments in place of an f-string, which is made also where its level is off, "
    "and shapes or means in place of tensors"
)


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the time of own lines inside the model that log or print, and use tensors."""
    rows = [row for row in INNER_LINES.of(evidence.tables) if _WRITES.search(row["source"]) and not row["is_plain"]]
    return of_lines(rows, evidence, "goes into logs and prints inside the model", REMEDY)


RULE = Rule(find, refines=("small-operators", "python-in-forward"))
