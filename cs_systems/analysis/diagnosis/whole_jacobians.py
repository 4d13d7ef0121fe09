"""Rule for Jacobians and Hessians of a whole batch, with a backward pass for each of their outputs."""

from __future__ import annotations

import re

from cs_systems.analysis.comparison.loop_findings import INNER_LINES
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis.python_in_forward import FEWEST, places

NOTABLE = 0.2  # share of the step
METHODS = ("jacobian", "hessian")
_CALLS = re.compile(r"(?:functional\.|(?<![\w.]))(?:jacobian|hessian)\(")  # of torch.autograd, also imported
_VECTORISED = re.compile(r"vectorize\s*=\s*True|forward-mode")
REMEDY = (
    "where the samples of a batch do not depend on each other, sum the outputs over the batch first, for one pass per "
    "output of a sample, or use torch.func.vmap(torch.func.jacrev(f))"
)


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the time of own lines that compute a Jacobian; that of the backward pass through it is not in it."""
    rows = [
        row
        for row in INNER_LINES.of(evidence.tables)
        if row["method"] in METHODS and _CALLS.search(row["source"]) and not _VECTORISED.search(row["source"])
    ]
    step_s = evidence.step_s
    if not evidence.is_loop or step_s is None or sum(row["samples"] for row in rows) < FEWEST:
        return None
    time_s = min(step_s, sum(row["time_s"] for row in rows))
    if time_s < NOTABLE * step_s:
        return None
    what = "Jacobians with a backward pass for each of their outputs"
    cause = f"{time_s / step_s:.0%} of the step is {what}: {places(rows, step_s)}"
    return Diagnosis(cause, REMEDY, step_s, None, evidence=tuple(rows), takes=time_s)


RULE = Rule(find, refines=("small-operators", "repeated-backward"))
