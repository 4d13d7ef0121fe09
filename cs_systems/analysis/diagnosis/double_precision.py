"""Rule for double precision: matrix products in fp64, which most GPUs compute at a fraction of the rate of bf16."""

from __future__ import annotations

import re

from cs_systems.analysis.comparison.loop_findings import DOUBLE
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis._forms import of_kernels
from cs_systems.config import Phase

KERNEL = re.compile(r"(?<![a-z])dgemm|d884|f64f64|<double|double>", re.IGNORECASE)  # not GroupedGemm
ARGUMENT = re.compile(r"\(([^()]*\W)?double\b[^()]*")  # in the argument list of a kernel, which may be cut off
SLOW = re.compile(r"GeForce|\bGTX\b|\bRTX\b|Quadro RTX|Tesla T4|\bT4\b|\bL40?S?\b|\bA(10|16|40)\b")
DOMINANT = 0.3  # share of the step
ARGUMENTS = "compute in float where its precision is enough, literals without f (0.5) included, which are fp64"
NOTABLE = 0.1  # share of the step
SLOWER = 0.8  # times the rate of float32; above it, another precision gains little
REMEDY = (
    "compute in fp32 or bf16: convert the inputs and the model (.float(), model.to(torch.bfloat16)); arrays of NumPy "
    "are fp64"
)


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the time of fp64 products, by kernels or by a loop's weights; the gain of another precision is unknown."""
    step_s = evidence.step_s
    if step_s is None:
        return None
    found = of_kernels(evidence, KERNEL, "matrix products in fp64", REMEDY, NOTABLE, ("matmul",))
    return found or _of_arguments(evidence, step_s) or _of_weights(evidence, step_s)


def _of_arguments(evidence: Evidence, step_s: float) -> Diagnosis | None:
    """Find kernels of a program without PyTorch that take fp64 values, on a GPU made for graphics or inference."""
    device = evidence.device_name or ""
    if evidence.uses_torch or not SLOW.search(device):
        return None
    rows, time_s = evidence.kernels_named(ARGUMENT)
    if time_s < DOMINANT * step_s:
        return None
    worst = max(rows, key=lambda row: row["time_s"])
    cause = (
        f"{time_s / step_s:.0%} of the step is kernels that take arguments in fp64 (double), which {device} computes"
    )
    cause += " at 1/32 of the rate of fp32 or less"
    where = str(worst["kernel"])[:60]
    return Diagnosis(cause, ARGUMENTS, step_s, None, evidence=rows, takes=time_s, where=where)


def _of_weights(evidence: Evidence, step_s: float) -> Diagnosis | None:
    """Find products with weights in fp64 by their least number of operations, at the rate that was measured."""
    row = DOUBLE.first(evidence.tables)
    if row is None or not 0 < row["flops_per_s"] <= SLOWER * row["float32_flops_per_s"]:
        return None
    phases_s = evidence.phases_s(Phase.FORWARD, Phase.BACKWARD)
    # The rate is of a core that nobody else uses, as is the fastest step.
    timed = evidence.measurement.timed if evidence.measurement is not None else ()
    fastest_s = min((sample.wall_s for sample in timed), default=step_s) or step_s
    time_s = min(phases_s, step_s / fastest_s * row["flops"] / row["flops_per_s"])
    if time_s < NOTABLE * step_s:
        return None
    ratio = row["flops_per_s"] / row["float32_flops_per_s"]
    is_all = time_s == phases_s  # the rates were measured while the machine was busier than in the steps
    share = "most of forward and backward" if is_all else f"at least {time_s / step_s:.0%} of the step"
    cause = (
        f"{row['parameters']} of {row['of_parameters']} parameters are fp64, and {share} is products with them, at "
        f"{ratio:.2g} times the rate of fp32"
    )
    return Diagnosis(cause, REMEDY, step_s, None, evidence=(row,), takes=time_s)


RULE = Rule(find, shortens_kernels=True, refines=("rollouts",))
