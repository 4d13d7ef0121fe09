"""Rule for checks of values inside forward: hooks or lines that search every result for NaN or infinity."""

from __future__ import annotations

import re

from cs_systems.analysis.comparison.loop_findings import INNER_LINES
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis.python_in_forward import of_lines

_CHECKS = re.compile(r"\bis_?(nan|inf|finite)\b|\bnan_to_num\b|\bassert\b.*\b(all|any|allclose)\(")
REMEDY = "remove the checks, look at the loss alone, or check every hundredth step"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the time of own functions with lines that look for NaN or infinity in results."""
    rows = INNER_LINES.of(evidence.tables)
    by_function: dict[tuple[str, str], float] = {}
    checking: dict[tuple[str, str], float] = {}
    for row in rows:
        function = row["function"], row["place"].partition(":")[0]
        by_function[function] = by_function.get(function, 0.0) + row["time_s"]
        if _CHECKS.search(row["source"]):
            checking[function] = checking.get(function, 0.0) + row["time_s"]
    mostly = {function for function, time_s in checking.items() if time_s >= by_function[function] / 3}
    chosen = [
        row
        for row in rows
        if (row["function"], row["place"].partition(":")[0]) in mostly or _CHECKS.search(row["source"])
    ]
    return of_lines(chosen, evidence, "is checks for NaN or infinity inside the model", REMEDY)


RULE = Rule(find, refines=("small-operators", "python-in-forward"))
