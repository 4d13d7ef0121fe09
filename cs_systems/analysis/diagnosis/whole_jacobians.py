"""Rule for Jacobians and Hessians of a whole batch, with a backward pass for each of their outputs."""

from __future__ import annotations

import re

from cs_systems.analysis.comparison.loop_findings import INNER_LINES
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis.python_in_forward import of_lines

NOTABLE = 0.2  # share of the step
METHODS = ("jacobian", "hessian")
_CALLS = re.compile(r"(?:functional\.|(?<![\w.]))(?:jacobian|hessian)\(")  # of torch.autograd, also imported
_VECTORISED = re.compile(r"vectorize\s*=\s*True|forward-mode")
REMEDY = (
    "where the samples of a batch do not depend on each other, sum the outputs over the batch first, for one pass per "
    "output of a sample, or use torch.func.vmap(torch.func.jacrev(f))"
)


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the time of own lines that compute a Jacobian, without the backward pass through it."""
    rows = [
        row
        for row in INNER_LINES.of(evidence.tables)
        if row["method"] in METHODS and _CALLS.search(row["source"]) and not _VECTORISED.search(row["source"])
    ]
    what = "is Jacobians with a backward pass for each of their outputs"
    return of_lines(rows, evidence, what, REMEDY, NOTABLE, is_known=False)


RULE = Rule(find, refines=("small-operators", "repeated-backward"))
