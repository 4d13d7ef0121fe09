"""Rule for activations that are written as a formula of several operators, such as GELU with tanh and a power."""

from __future__ import annotations

import re

from cs_systems.analysis.comparison.loop_findings import ACTIVATION_FORMULAS
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis.product_order import place_of_products, saved
from cs_systems.core.units import counted

TANH = "F.gelu(x, approximate='tanh')"
OF_TRANSFORMERS = "; in a configuration of transformers, gelu_pytorch_tanh in place of gelu_new or gelu_fast"
_LINES = re.compile(r"\*.*\b(tanh|erf|sigmoid|softplus)\(|\b(tanh|erf|sigmoid|softplus)\(.*\*")  # with a product


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the time that torch's operator saves, measured on tensors of the same sizes."""
    rows = [row for row in ACTIVATION_FORMULAS.of(evidence.tables) if row["one_s"] < row["time_s"]]
    saving = saved(evidence, [(row["time_s"], row["one_s"]) for row in rows])
    if saving is None or (step_s := evidence.step_s) is None:
        return None
    first = max(rows, key=lambda row: row["time_s"])
    function, calls = first["activation"], sum(row["calls"] for row in rows)
    cause = (
        f"about {saving.lasted_s / step_s:.0%} of the step is an activation as a formula of "
        f"{counted(first['operators'], 'operator')}, {counted(calls, 'time')} in a step; the single operator takes "
        f"{saving.other_share:.0%} of the time"
    )
    remedy = f"use {function}, which gives the same but for rounding" + OF_TRANSFORMERS * (function == TANH)
    evidence_rows = tuple({**row} for row in rows)
    where = place_of_products(evidence, _LINES)
    return Diagnosis(cause, remedy, step_s, takes=saving.takes, evidence=evidence_rows, where=where)


RULE = Rule(find, refines=("small-operators",))
