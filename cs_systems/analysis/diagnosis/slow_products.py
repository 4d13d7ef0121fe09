"""Rule for slow matrix products: they reach a small share of the device's peak, or of the step's other products."""

from __future__ import annotations

import re

from cs_systems.analysis.attribution.product_rates import Product, product_rates
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis._forms import of_kernels
from cs_systems.config import Precision
from cs_systems.core.tables import Row

# cuBLAS's largest products reach about this share of a data sheet's dense peak; no remedy reaches the full peak
ATTAINABLE = 0.8
REMEDY = "use a larger batch or context, and sizes that are multiples of 128"
# times the least time; tiles that do not fill the device, or a small k, already cost a factor of two to three
SLOWER = 4.0
LONG_S = 20e-6  # a shorter product may be limited by its launch
NOTABLE = 0.1  # share of the step
ALIGNED = 8  # elements of two bytes that tensor cores load at once, 16 bytes
TILE = 64  # a smaller size leaves most of a tile of the tensor cores empty
# 16-bit products of CUTLASS and cuBLAS with rows that allow loads of only one or two elements
UNALIGNED_KERNEL = re.compile(r"(?:bf16|f16|h161616|h16816|s161616|s16816)\w*gemm\w*_align[12](?!\d)", re.IGNORECASE)
ALIGN = f"pad these sizes to multiples of {TILE}, such as a vocabulary of 50257 to 50304"
MERGE = f"compute several of these products as one, or use sizes of at least {TILE}"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the excess time over the same products at the attainable share of the peak, if compute limits them.

    With recorded shapes, the rate of each product is known; the attainable rate is the fastest products' in the
    same step, or the memory bandwidth. Without shapes, kernel names show unaligned sizes.
    """
    step_s = evidence.step_s
    if step_s is None or evidence.setting("precision") == Precision.FP32:  # `unused_tensor_cores` reports these
        return None
    rows: list[Row] = [row for row in evidence.rows_of("matmul") if row.get("ceiling") == "compute"]
    lasted_s = sum(row["time_s"] for row in rows)
    if not lasted_s:
        return _of_trace(evidence, step_s)
    at_peak_s = sum(row["time_s"] * (row.get("ceiling_share") or 0.0) for row in rows)
    gain_s = max(0.0, lasted_s - at_peak_s / ATTAINABLE)
    cause = (
        f"matrix products take {lasted_s / step_s:.0%} of the step at {at_peak_s / lasted_s:.0%} of the device's peak"
    )
    return Diagnosis(cause, REMEDY, step_s, step_s - gain_s, evidence=tuple(rows))


def _of_trace(evidence: Evidence, step_s: float) -> Diagnosis | None:
    products = product_rates(evidence.usual.profile) if evidence.usual else []
    slow = [one for one in products if one.time_s > max(SLOWER * one.least_s, LONG_S * one.calls)]
    time_s, least_s = sum(one.time_s for one in slow), sum(one.least_s for one in slow)
    if not products:
        what = f"16-bit matrix products of sizes that are no multiples of {ALIGNED}"
        return of_kernels(evidence, UNALIGNED_KERNEL, what, ALIGN, NOTABLE, ("matmul",))
    if time_s - least_s < NOTABLE * step_s:
        return None
    worst = max(slow, key=lambda one: one.time_s - one.least_s)
    share, times = min(1.0, time_s / step_s), time_s / least_s
    cause = (
        f"{share:.0%} of the step is matrix products that take {times:.0f} times as long as their FLOPs and bytes need"
    )
    rows: tuple[Row, ...] = tuple(
        {"operator": one.operator, "shapes": _shapes(one), "time_s": one.time_s, "least_s": one.least_s} for one in slow
    )
    where = f"{_shapes(worst)}{_why(worst)}"
    gain_s = min(step_s, time_s) - least_s
    return Diagnosis(cause, _remedy(worst), step_s, step_s - gain_s, evidence=rows, where=where, takes=gain_s)


def _shapes(one: Product) -> str:
    m, k, n = one.sizes
    return f"{m}×{k} by {k}×{n}"


def _unaligned(one: Product) -> list[int]:
    """Return the row and column lengths of the factors and the result that are not multiples of 16 bytes."""
    return [size for size in dict.fromkeys(one.sizes) if size % ALIGNED]


def _why(one: Product) -> str:
    unaligned = _unaligned(one)
    return f"; {' and '.join(map(str, unaligned))} is no multiple of {ALIGNED}" if len(unaligned) == 1 else ""


def _remedy(one: Product) -> str:
    return MERGE if min(one.sizes) < TILE else ALIGN if _unaligned(one) else REMEDY


RULE = Rule(find, shortens_kernels=True)
