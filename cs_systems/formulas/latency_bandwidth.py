"""Linear fit of message times by size, t(n) = α + n/β, with its quality.

α is the latency, the time of an empty message; β is the bandwidth that large messages approach (Hockney 1994). The fit
minimizes the squared relative residuals, (t − t̂)/t, so that each size counts alike. Without these weights, a time of
3 ms at 1 GiB would leave an α of 10 µs undetermined.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cs_systems.core.units import counted

FEWEST_SIZES = 3  # a line fits any two sizes exactly


@dataclass(frozen=True)
class Fit:
    """Fit of t(n) = latency_s + n / bandwidth_bytes_per_s over `sizes` distinct sizes.

    bandwidth_bytes_per_s: None if the time does not grow with the size.
    r_squared: fraction of the weighted sum of squares that the line explains; None if all times are alike.
    worst_relative_residual: the largest |t − t̂|/t. Above about a tenth, the line does not describe the sizes in
        between: a library that changes its algorithm with the size has several lines.
    """

    latency_s: float
    bandwidth_bytes_per_s: float | None
    r_squared: float | None
    worst_relative_residual: float
    sizes: int

    def time_s(self, size_bytes: float) -> float:
        """Return the time that the fit predicts for a message of that size."""
        return self.latency_s + (size_bytes / self.bandwidth_bytes_per_s if self.bandwidth_bytes_per_s else 0.0)

    @property
    def half_bandwidth_bytes(self) -> float | None:
        """Message size α β, at which latency takes half of the time and half of the bandwidth is reached."""
        return self.latency_s * self.bandwidth_bytes_per_s if self.bandwidth_bytes_per_s else None


def fit(sizes_bytes: Sequence[int], times_s: Sequence[float]) -> Fit | None:
    """Return the fit to the times of messages of these sizes; None for fewer than 3 distinct sizes.

    α is at least 0 and the time does not fall with the size; the result is the best line under these constraints.

    Raises:
        ValueError: the numbers of sizes and times differ, or a time is not finite and above 0.
    """
    if len(sizes_bytes) != len(times_s):
        lengths = f"times_s has {counted(len(times_s), 'value')}, but sizes_bytes has {len(sizes_bytes)}"
        raise ValueError(f"{lengths}; give one time for each size")
    if bad := [t for t in times_s if not (t > 0 and math.isfinite(t))]:
        raise ValueError(f"a time is {bad[0]} s; give only finite times above 0")
    distinct = len(set(sizes_bytes))
    if distinct < FEWEST_SIZES:
        return None
    # Divided by t, t = α + s n becomes 1 = α x + s y with x = 1/t and y = n/t: a regression without an intercept.
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
    mean = sx / xx  # mean of the times with the same weights, 1/t²
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
