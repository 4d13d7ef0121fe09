"""Rule for decompositions of matrices, such as singular values for a penalty, or the inverse of a constant matrix."""

from __future__ import annotations

import re

from cs_systems.analysis.comparison.loop_findings import CONSTANT_MATRICES, INNER_LINES, ConstantMatrixRow
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis.python_in_forward import of_lines
from cs_systems.core.units import counted

NOTABLE = 0.2  # share of the step; some methods need a small one
OF_CONSTANTS = 0.1  # of the step, where nothing needs them
# Cholesky's is left out: it costs a fraction of the others, and methods with covariances need it in each step.
_NAMES = "svd|svdvals|eig|eigvals|eigh|eigvalsh|inv|pinv|inverse|pinverse|matrix_rank"
_CALLS = re.compile(rf"\b(?:torch|linalg|LA)\.(?:{_NAMES})\(|\b(?:linalg|LA)\.cond\(|norm\(.*[\"']nuc[\"']")
METHODS = {*_NAMES.split("|"), "cond", "norm", "matrix_norm"}
REMEDY = (
    "decompose every few steps, or a smaller matrix; where one number is enough, compute it alone, such as the largest "
    "singular value by a power iteration (torch.nn.utils.parametrizations.spectral_norm); solve() in place of an "
    "inverse"
)
ONCE = "compute it once before the loop, and again only where the matrix changes"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find decompositions of matrices that stay the same, or the time of own lines that decompose a matrix.

    The time of their gradients is not in it.
    """
    if (constant := _of_constants(evidence)) is not None:
        return constant
    lines = INNER_LINES.of(evidence.tables)
    rows = [row for row in lines if row["method"] in METHODS and _CALLS.search(row["source"])]
    return of_lines(rows, evidence, "is decompositions of matrices", REMEDY, NOTABLE, is_known=False)


def _of_constants(evidence: Evidence) -> Diagnosis | None:
    rows, step_s = CONSTANT_MATRICES.of(evidence.tables), evidence.step_s
    if step_s is None or not rows:
        return None
    takes = min(step_s, sum(row["time_s"] for row in rows))
    if takes < OF_CONSTANTS * step_s:
        return None
    first: ConstantMatrixRow = max(rows, key=lambda each: each["time_s"])
    where = f"{first['function']}() at {first['place']}" if first["function"] else first["place"]
    cause = (
        f"{takes / step_s:.0%} of the step is decompositions of matrices that were the same in all {first['steps']} "
        f"steps that were looked at: {first['calls_of']} ({first['shape']}), {counted(first['calls'], 'call')} per "
        f"step, {where}"
    )
    return Diagnosis(cause, ONCE, step_s, takes=takes, evidence=tuple({**row} for row in rows))


RULE = Rule(find, refines=("small-operators",))
