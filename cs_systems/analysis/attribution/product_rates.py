"""Matrix products of a step by recorded shape: the measured time, and the least time that each could take."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import NamedTuple

import numpy as np

from cs_systems.analysis.attribution.kernel_families import family
from cs_systems.analysis.attribution.operator_table import operators_of
from cs_systems.analysis.attribution.profile import Profile
from cs_systems.core.statistics import ROUNDING_S
from cs_systems.formulas.peaks import peak_bandwidth
from cs_systems.readers.forms.columns import UNKNOWN
from cs_systems.readers.forms.trace import steps_of

# Operator → position of its two factors among its inputs. Convolutions are left out: their bytes depend on more.
FACTORS = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}
# Kernels without tensor cores, and fp64 kernels: other rules compare their precision with a lower one.
ON_CUDA_CORES = re.compile(r"sgemm|simt|ffma|f32f32_f32f32|dgemm|d884|f64f64|<double", re.IGNORECASE)
SHORT = re.compile(r"bf16|bfloat16|f16|half|nvjet_[ht]s", re.IGNORECASE)  # types of two bytes
LEAST_RATE = 0.02  # share of the products' time; the rate of rarer products is not used as a limit for the others
SLOW_MEMORY = 1e12  # bytes/s; assumed for a device without a data sheet


class Product(NamedTuple):
    """Matrix products of equal shapes, per step.

    sizes: (rows, inner, columns) of one product, without its batch. least_s: the time of these products at the rate of
    the fastest products of the step, or at the memory's bandwidth if that takes longer.
    """

    operator: str
    sizes: tuple[int, int, int]
    calls: float
    time_s: float
    least_s: float


def product_rates(profile: Profile) -> list[Product]:
    """Return the products on tensor cores of a mean step, the longest first; [] where no shapes were recorded."""
    trace, kernels, ops = profile.trace, profile.trace.kernels, operators_of(profile.trace)
    if ops is None:
        return []
    multiplies = kernels.function.codes_where(
        lambda function: family(function.name) == "matmul" and not ON_CUDA_CORES.search(function.name)
    )
    inside = steps_of(kernels.launched_s, profile.steps)[1] & ~np.isnan(kernels.launch_start_s)
    which = np.flatnonzero(multiplies & inside)
    by = ops.at(kernels.thread[which], kernels.launch_start_s[which])
    which, by = which[by != UNKNOWN], by[by != UNKNOWN]
    lasted = kernels.end_s[which] - kernels.start_s[which]
    is_short = kernels.function.codes_where(lambda function: SHORT.search(function.name))[which]
    # (operator, batch, sizes, bytes of an element) → calls, s
    sums: dict[tuple[str, int, tuple[int, int, int], int], list[float]] = defaultdict(lambda: [0.0, 0.0])
    operators = set[int]()
    for number, time_s, short in zip(by.tolist(), lasted.tolist(), is_short.tolist(), strict=True):
        signature = ops.signature[number]
        if (found := _sizes(signature.name, signature.shapes)) is None:
            continue
        one = sums[(signature.name, *found, 2 if short else 4)]
        one[0] += number not in operators  # a product may run several kernels, such as with split k
        one[1] += time_s
        operators.add(number)
    steps = len(profile.steps)
    whole_s = sum(time_s for _, time_s in sums.values())
    rates = [
        2 * calls * batch * np.prod(sizes, dtype=float) / time_s
        for (_, batch, sizes, _), (calls, time_s) in sums.items()
        if time_s >= max(ROUNDING_S, LEAST_RATE * whole_s)
    ]
    sheet = peak_bandwidth(trace.devices.get(profile.devices[0], ""))
    bytes_per_s, best = sheet.per_s if sheet else SLOW_MEMORY, max(rates, default=0.0)
    made = []
    for (name, batch, (m, k, n), each), (calls, time_s) in sums.items():
        flops, moved = 2.0 * batch * m * k * n, float(each) * batch * (m * k + k * n + m * n)
        least_s = calls * max(flops / best if best else 0.0, moved / bytes_per_s)
        made.append(Product(name, (m, k, n), calls / steps, time_s / steps, least_s / steps))
    return sorted(made, key=lambda one: -one.time_s)


def _sizes(name: str, shapes: object) -> tuple[int, tuple[int, int, int]] | None:
    """Return (batch, (rows, inner, columns)) of a product; None for another operator, or shapes that do not fit."""
    at = FACTORS.get(name)
    if at is None or not isinstance(shapes, tuple) or len(shapes) < at + 2:
        return None
    first, second = shapes[at : at + 2]
    if not (isinstance(first, tuple) and isinstance(second, tuple) and len(first) == len(second) in (2, 3)):
        return None
    *batch, m, k = first
    *_, inner, n = second
    sizes = (*batch, m, k, n)
    if inner != k or not all(isinstance(size, int) and 0 < size < 1 << 31 for size in sizes):
        return None
    return (batch[0] if batch else 1), (m, k, n)
