"""The time of a message by its size: t(n) = α + n/β, fitted to what was measured, and how well.

α is the latency, the time of a message of no bytes; β the bandwidth that large ones approach (Hockney 1994). The fit is
least squares of the relative residuals, (t − t̂)/t: each size counts alike. Without those weights a time of 3 ms at
1 GiB would leave an α of 10 µs to chance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

FEWEST_SIZES = 3  # a line goes through any two


@dataclass(frozen=True)
class Fit:
    """t(n) = latency_s + n / bandwidth_bytes_per_s over `sizes` sizes.

    bandwidth_bytes_per_s: None where the time does not grow with the size.
    r_squared: of the weighted squares, the share that the line explains; None where all times are alike.
    worst_relative_residual: the largest |t − t̂|/t. Above a tenth or so the line is no description of the sizes between:
        a library that changes its algorithm with the size has several lines.
    """

    latency_s: float
    bandwidth_bytes_per_s: float | None
    r_squared: float | None
    worst_relative_residual: float
    sizes: int

    def time_s(self, size_bytes: float) -> float:
        """What the line says of a message of that size."""
        return self.latency_s + (size_bytes / self.bandwidth_bytes_per_s if self.bandwidth_bytes_per_s else 0.0)

    @property
    def half_bandwidth_bytes(self) -> float | None:
        """α β: the size at which half of the time is latency, and half of the bandwidth is reached."""
        return self.latency_s * self.bandwidth_bytes_per_s if self.bandwidth_bytes_per_s else None


def fit(sizes_bytes: Sequence[int], times_s: Sequence[float]) -> Fit | None:
    """The line through times (> 0, else ValueError) of messages of these sizes; None for fewer than 3 distinct sizes.

    α is not let below 0, nor the time to fall with the size: the best line of those that remain is returned.
    """
    if len(sizes_bytes) != len(times_s) or any(not (t > 0 and math.isfinite(t)) for t in times_s):
        raise ValueError("a fit needs one time above 0 for each size")
    distinct = len(set(sizes_bytes))
    if distinct < FEWEST_SIZES:
        return None
    # Divided by t, t = α + s n is 1 = α x + s y with x = 1/t and y = n/t: both are columns without an intercept.
    x, y = [1 / t for t in times_s], [n / t for n, t in zip(sizes_bytes, times_s, strict=True)]
    xx, xy, yy = _dot(x, x), _dot(x, y), _dot(y, y)
    sx, sy = math.fsum(x), math.fsum(y)
    determinant = xx * yy - xy * xy
    alpha, slope = (sx * yy - sy * xy) / determinant, (sy * xx - sx * xy) / determinant
    if alpha < 0:
        alpha, slope = 0.0, sy / yy
    elif slope <= 0:
        alpha, slope = sx / xx, 0.0
    residuals = [1 - alpha * a - slope * b for a, b in zip(x, y, strict=True)]
    mean = sx / xx  # of the times with the same weights, 1/t²
    total = math.fsum((1 - mean * a) ** 2 for a in x)
    return Fit(
        alpha,
        1 / slope if slope > 0 else None,
        1 - _dot(residuals, residuals) / total if total > 1e-24 else None,
        max(map(abs, residuals)),
        distinct,
    )


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return math.fsum(p * q for p, q in zip(a, b, strict=True))
