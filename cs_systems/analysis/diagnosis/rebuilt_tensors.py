"""Rule for tensors that are built anew inside the model to take new rows, such as a queue of negatives."""

from __future__ import annotations

import re
from dataclasses import replace

from cs_systems.analysis.comparison.loop_findings import INNER_LINES
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis.python_in_forward import of_lines

BUILDING = ("cat", "concat", "concatenate", "hstack", "vstack", "roll")
REMEDY = "allocate it once, and write the new rows in place at a position that goes around"
_ASSIGNED = re.compile(r"\s*([\w.]+(?:\[[^\]]*\])?)\s*=\s*(?!=)(.*)")


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the time of own lines that join a tensor with others and assign the result to it again.

    No bound is known: a large tensor's copy also empties the caches for the rest of the step.
    """
    building = [row for row in INNER_LINES.of(evidence.tables) if row["method"] in BUILDING]
    built = [(name, row) for row in building if (name := rebuilt(row["source"] or ""))]
    names = ", ".join(dict.fromkeys(name for name, _ in built))
    what = f"is building {names} anew for each change of some rows"
    found = of_lines([row for _, row in built], evidence, what, REMEDY)
    return found and replace(found, at_best=None, takes=found.now - (found.at_best or 0.0))


def rebuilt(source: str) -> str:
    """Return the tensor that a line makes from itself, as in `x = torch.cat([x[1:], y])`; "" if there is none."""
    found = _ASSIGNED.match(source)
    if found is None or not re.search(rf"(?<![\w.]){re.escape(found[1])}(?!\w)", found[2]):
        return ""
    return found[1]


RULE = Rule(find)
