"""Rule for double precision: matrix products in fp64, which most GPUs compute at a fraction of the rate of bf16."""

from __future__ import annotations

import re

from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence

KERNEL = re.compile(r"(?<![a-z])dgemm|d884|f64f64|<double|double>", re.IGNORECASE)  # not GroupedGemm
NOTABLE = 0.1  # share of the step
REMEDY = (
    "compute in fp32 or bf16: convert the inputs and the model (.float(), model.to(torch.bfloat16)); arrays of NumPy "
    "are fp64"
)


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the time of fp64 products; what another precision would gain is not known."""
    step_s = evidence.step_s
    if step_s is None:
        return None
    rows, time_s = evidence.kernels_named(KERNEL, ("matmul",))
    if time_s < NOTABLE * step_s:
        return None
    cause = f"{time_s / step_s:.0%} of the step is matrix products in fp64"
    return Diagnosis(cause, REMEDY, step_s, None, evidence=rows, takes=time_s)


RULE = Rule(find, shortens_kernels=True)
