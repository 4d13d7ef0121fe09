"""Rule for own products: a matrix product or convolution that the program itself wrote takes most of the step."""

from __future__ import annotations

import re

from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.core.tables import Row
from cs_systems.core.units import human

DOMINANT = 0.5  # share of the step
PRODUCT = re.compile(r"mat(rix)?_?mul|mul\w*matri|gemm|conv(ol|[123]d)", re.IGNORECASE)
# names of libraries and compilers, or of tensor cores
OTHERS = re.compile(
    r"::|cu(blas|tlass|dnn)|mma|nvjet|wgrad|dgrad|winograd|(im|ex)plicit|splitk|tensor_?core|half|bf16|triton|miopen|cijk|"
    r"gemm\w*\d+x\d+|^(maxwell|pascal|volta|turing|ampere|sm\d+)_",
    re.IGNORECASE,
)
ARGUMENTS = re.compile(r"\bfloat( const)? ?\*")  # nsys writes a space before the asterisk, Kineto does not
REMEDY = "call the product of a library (cuBLAS, cuDNN, CUTLASS), which can use the tensor cores"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find kernels with the name of a product that no library has; PyTorch's programs may have them from a compiler."""
    step_s = evidence.step_s
    if step_s is None or evidence.has_compiled_kernels:
        return None
    rows: list[Row] = [{**row} for row in evidence.kernels() if _is_own(row["kernel"], evidence.uses_torch)]
    time_s = min(step_s, sum(row["time_s"] for row in rows))
    if time_s < DOMINANT * step_s:
        return None
    worst = max(rows, key=lambda row: row["time_s"])
    name = worst["kernel"].split("(")[0].removeprefix("void ")[:60]
    precision = " in fp32" if ARGUMENTS.search(worst["kernel"]) else ""
    each = human(worst["mean_s"], "s")
    cause = f"{time_s / step_s:.0%} of the step is a matrix product or convolution of the program's own{precision}"
    return Diagnosis(cause, REMEDY, step_s, takes=time_s, evidence=tuple(rows), where=f"{name}, {each} each")


def _is_own(kernel: str, uses_torch: bool) -> bool:
    name, _, arguments = kernel.partition("(")
    is_known = bool(ARGUMENTS.search(arguments)) or not (uses_torch or arguments)
    return is_known and PRODUCT.search(name) is not None and not OTHERS.search(name)


RULE = Rule(find, shortens_kernels=True)
