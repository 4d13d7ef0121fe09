"""Rule for casts between precisions: tensors, most often weights, are converted anew for each use."""

from __future__ import annotations

import re

from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.core.tables import Row
from cs_systems.core.units import counted

# PyTorch's copies between fp32 and a shorter type; a copy that keeps the type is a `direct_copy` kernel without
# LoadWithCast.
KERNEL = re.compile(r"b?float(16|8\w*?)(to\w+)?_copy_kernel|direct_copy_kernel.*(Load|Store)WithCast|_to_copy_\d+$")
NOTABLE = 0.15  # share of the step; autocast with a large batch converts for a few percent
REMEDY = (
    "hold the weights in bf16 (model.to(torch.bfloat16)), or convert each once per step: one torch.autocast context "
    "around all micro-batches, with its cache on"
)


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the time of kernels that convert between precisions; at best none is left."""
    step_s, rows = evidence.step_s, casts(evidence)
    if step_s is None or not rows:
        return None
    time_s, calls = sum(row["time_s"] for row in rows), sum(row["calls_per_step"] for row in rows)
    cause = f"{time_s / step_s:.0%} of the step is casts between precisions ({counted(round(calls), 'kernel')})"
    return Diagnosis(cause, REMEDY, step_s, step_s - time_s, evidence=tuple(rows), takes=time_s)


def casts(evidence: Evidence) -> list[Row]:
    """Return the kernels that convert between precisions; none if they take less than a notable share."""
    rows, time_s = evidence.kernels_named(KERNEL, ("copy", "elementwise"))
    return [*rows] if evidence.step_s and time_s >= NOTABLE * evidence.step_s else []


RULE = Rule(find, shortens_kernels=True, refines=("unfused-elementwise",))
