"""Rule for unused tensor cores: fp32 matrix products and convolutions with TF32 off, on a GPU with tensor cores."""

from __future__ import annotations

import re
from collections.abc import Sequence

from cs_systems.analysis.attribution.tables import families
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis._measured import with_part
from cs_systems.config import Phase, Precision
from cs_systems.core.tables import Row
from cs_systems.formulas.cost import COST
from cs_systems.formulas.peaks import CEILING, has_tensor_cores, lacks_bf16

# Names of cuDNN's convolutions on the CUDA cores; it computes others as products.
FP32_CONVOLUTION = re.compile(r"scudnn|convolve_sgemm|(winograd\w*|[dw]grad\w*_engine)<float", re.IGNORECASE)
# Names of cuBLAS's and CUTLASS's products on the CUDA cores: fp32 in and out, without TF32.
FP32_KERNEL = re.compile(rf"sgemm|simt|ffma|f32f32_f32f32|{FP32_CONVOLUTION.pattern}", re.IGNORECASE)
# A phase counts if its products take this share of it, even at the peak; if less, they do not limit it.
PRODUCTS_SHARE = 0.25
OPTIONS = {"precision": (Precision.BF16, Precision.FP16, Precision.TF32, Precision.BF16_PURE)}
FASTER = (Precision.BF16, Precision.FP16)
# Under autocast the host also launches the casts: of 11 model families on one H200 it took 1.09 to 1.43 times as long.
AUTOCAST = 1.43
REMEDY = "compute in bf16 (torch.autocast; --precision bf16), or at least allow TF32 (--precision tf32)"
# of a program without PyTorch
PLAIN, PLAIN_WITHOUT_BF16 = "compute these products in bf16, or in TF32", "compute these products in fp16"
WITHOUT_BF16 = "compute in fp16 (torch.autocast with dtype=torch.float16 and a GradScaler; --precision fp16)"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the time of fp32 products: from their kernels, or without a trace from the phases that contain them."""
    step_s, now = evidence.step_s, evidence.peak_flops_per_s(Precision.FP32)
    then = next(filter(None, map(evidence.peak_flops_per_s, FASTER)), None)
    if step_s is None or not (then or has_tensor_cores(evidence.device_name or "")):
        return None
    rows = _products(evidence, now)
    products_s = min(step_s, sum(row["time_s"] for row in rows))
    if not products_s:
        return None
    what = _names(rows) if "family" in rows[0] else " and ".join(row["phase"] for row in rows)
    cause = f"{products_s / step_s:.0%} of the step is {what} in fp32, which leaves the tensor cores idle"
    least_s = _least_s(evidence, then) if then else None
    return Diagnosis(
        cause,
        _remedy(evidence),
        step_s,
        least_s,
        evidence=tuple(rows),
        takes=products_s,
        options=OPTIONS,
        expected=with_part(evidence, "products", "bf16", AUTOCAST),
    )


def _names(rows: Sequence[Row]) -> str:
    """Return what the kernels of these rows compute."""
    convolving = [FP32_CONVOLUTION.search(row.get("kernel") or "") for row in rows]
    names = [
        name for name, found in (("matrix products", not all(convolving)), ("convolutions", any(convolving))) if found
    ]
    return " and ".join(names)


def _remedy(evidence: Evidence) -> str:
    is_old = lacks_bf16(evidence.device_name or "")
    if not evidence.uses_torch:
        return PLAIN_WITHOUT_BF16 if is_old else PLAIN
    return WITHOUT_BF16 if is_old else REMEDY


def _least_s(evidence: Evidence, peak_flops_per_s: float) -> float | None:
    """Return the time of the step's FLOPs at this peak, with half the bytes; None if these are unknown.

    The time of the fp32 kernels gives no bound, because their distance from their own peak is not recorded.
    """
    costs, ceilings = COST.of(evidence.tables), CEILING.of(evidence.tables)
    rate = ceilings[0].get("peak_bytes_per_s") if ceilings else None
    flops = [row.get("hardware_flops") for row in costs]
    if not costs or any(each is None for each in flops):
        return None
    moved = [(row.get("bytes") or 0) / 2 / rate if rate else 0.0 for row in costs]
    return sum(max((each or 0) / peak_flops_per_s, least_s) for each, least_s in zip(flops, moved, strict=True))


def _products(evidence: Evidence, peak_flops_per_s: float | None) -> list[Row]:
    """Return the most precise data on fp32 products: their kernels, their family, or phases that may contain them."""
    if kernels := [row for row in evidence.kernels() if row["family"] == "matmul"]:
        return [row for row in kernels if FP32_KERNEL.search(row["kernel"])]
    if evidence.setting("precision") != Precision.FP32 or peak_flops_per_s is None:
        return []
    if "families" in evidence.tables:
        return [row for row in families.of(evidence.tables) if row["family"] == "matmul"]
    phases = [(phase, evidence.phase_s(phase)) for phase in (Phase.FORWARD, Phase.BACKWARD)]
    flops = {row["phase"]: row.get("hardware_flops") or 0 for row in COST.of(evidence.tables)}
    return [
        {"phase": phase.value, "time_s": time_s}
        for phase, time_s in phases
        if time_s and flops.get(phase, 0) / peak_flops_per_s > PRODUCTS_SHARE * time_s
    ]


RULE = Rule(find, shortens_kernels=True)
