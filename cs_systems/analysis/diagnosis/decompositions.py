"""Rule for decompositions of matrices inside forward or the loss, such as the singular values for a penalty."""

from __future__ import annotations

import re

from cs_systems.analysis.comparison.loop_findings import INNER_LINES
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis.python_in_forward import of_lines

NOTABLE = 0.2  # share of the step; some methods need a small one
# Cholesky's is left out: it costs a fraction of the others, and methods with covariances need it in each step.
_NAMES = "svd|svdvals|eig|eigvals|eigh|eigvalsh|inv|pinv|inverse|pinverse|matrix_rank"
_CALLS = re.compile(rf"\b(?:torch|linalg|LA)\.(?:{_NAMES})\(|\b(?:linalg|LA)\.cond\(|norm\(.*[\"']nuc[\"']")
METHODS = {*_NAMES.split("|"), "cond", "norm", "matrix_norm"}
REMEDY = (
    "decompose every few steps, or a smaller matrix; where one number is enough, compute it alone, such as the largest "
    "singular value by a power iteration (torch.nn.utils.parametrizations.spectral_norm); solve() in place of an "
    "inverse"
)


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the time of own lines that decompose a matrix; that of their gradients is not in it."""
    lines = INNER_LINES.of(evidence.tables)
    rows = [row for row in lines if row["method"] in METHODS and _CALLS.search(row["source"])]
    return of_lines(rows, evidence, "is decompositions of matrices", REMEDY, NOTABLE, is_known=False)


RULE = Rule(find, refines=("small-operators",))
