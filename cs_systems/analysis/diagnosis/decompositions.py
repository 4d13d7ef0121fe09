"""Rule for decompositions of matrices: singular values for a penalty, or a diagonal covariance that is factorised."""

from __future__ import annotations

import re

from cs_systems.analysis.comparison.loop_findings import COVARIANCES, INNER_LINES
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis.own_python import called_at
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


NOTABLE_OF_COVARIANCES = 0.15  # share of the step
MOST_LONGER = 2.0  # times the step; what takes longer was timed on a busier machine, and says nothing
FOR_COVARIANCES = (
    "if it stays diagonal, use Independent(Normal(mean, std), 1), the same distribution, which needs neither"
)


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the time of own lines that decompose a matrix, or of distributions with a diagonal one."""
    found = [each for each in (_of_lines(evidence), _of_covariances(evidence)) if each is not None]
    return max(found, key=lambda each: each.takes or 0.0, default=None)


def _of_lines(evidence: Evidence) -> Diagnosis | None:
    """Find own lines that decompose a matrix; the time of their gradients is not in it."""
    lines = INNER_LINES.of(evidence.tables)
    rows = [row for row in lines if row["method"] in METHODS and _CALLS.search(row["source"])]
    return of_lines(rows, evidence, "is decompositions of matrices", REMEDY, NOTABLE, is_known=False)


def _of_covariances(evidence: Evidence) -> Diagnosis | None:
    """Find multivariate normal distributions of independent numbers."""
    rows, step_s = COVARIANCES.of(evidence.tables), evidence.step_s
    if step_s is None or not rows:
        return None
    lasted_s = sum(row["time_s"] for row in rows)
    if not NOTABLE_OF_COVARIANCES * step_s <= lasted_s <= MOST_LONGER * step_s:
        return None
    lasted_s = min(step_s, lasted_s)
    row = max(rows, key=lambda each: each["time_s"])
    work = "" if row["given"] == "scale_tril" else "factorises matrices and "
    cause = (
        f"{lasted_s / step_s:.0%} of the step is MultivariateNormal with its backward, which {work}solves "
        f"triangular systems, although its {row['given']} of {row['rows']} × {row['rows']} elements was diagonal"
    )
    where = called_at(row["function"], row["place"], None)
    return Diagnosis(cause, FOR_COVARIANCES, step_s, evidence=tuple(rows), where=where, takes=lasted_s)


RULE = Rule(find, refines=("small-operators",))
