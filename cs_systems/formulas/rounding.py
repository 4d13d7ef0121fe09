"""Explanation of a sum's error in low precision by units in the last place, binade by binade.

A binary format with p significant bits has, at x, the ulp 2^(max(⌊log2 |x|⌋, emin) − p + 1). Results round to the
nearest multiple of it, ties to even (IEEE 754-2019, 4.3.1). The unit roundoff is u = 2^−p.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cache
from typing import TypedDict

from cs_systems.config import Precision
from cs_systems.core.tables import Table


class ModuleDtypes(TypedDict):
    """Module of a step with the dtypes of its tensors, in the order of the first calls; names are sorted."""

    module: str
    type: str
    leaf: bool  # whether it has no child modules
    root: bool  # whether no other module called it
    calls: int
    parameters: list[str]
    inputs: list[str]
    outputs: list[str]
    output_gradients: list[str]
    parameter_gradients: list[str]
    autocast: list[str]  # contexts in which it was called, such as `cpu bfloat16` and `off`
    devices: list[str]


class AutocastContext(TypedDict):
    """Autocast context that was entered, in `autocast_contexts`; `enabled` is torch's own result, not the argument."""

    device: str
    dtype: str
    enabled: bool


class AccumulationRow(TypedDict):
    """Sum of one number added `count` times, in `accumulation`."""

    variant: str
    accumulator: str  # dtype of the accumulator
    addend: str
    count: int
    exact: float
    sum: float
    error: float


class SummationRow(TypedDict):
    """Error of a sum of uniform random numbers against float64, in `summation`."""

    method: str
    length: int
    median_relative_error: float
    largest_relative_error: float
    unit_roundoff: float


class NormalizationError(TypedDict):
    """Error of an operation with some steps in low precision."""

    error: float | None  # median relative error of the finite rows; None if there are none
    finite: float  # share of rows without inf or NaN
    unit_roundoff: float


class NormalizationRow(NormalizationError):
    """Step of an operation in low precision, in `normalization`."""

    operation: str
    case: str
    step: str


class NormalizationLimits(TypedDict):
    """Input sizes from which on, and up to which, one low step gives a wrong result; None if it never does."""

    breaks_from: float | None
    breaks_up_to: float | None
    overflows: bool


class NormalizationRangeRow(NormalizationLimits):
    """Sizes at which a step in low precision gives wrong results, in `normalization_range`."""

    operation: str
    step: str


@dataclass(frozen=True)
class Format:
    """Binary floating-point format.

    `bits` counts the significant bits, the hidden one included. `emin` is the exponent of the smallest normal number.
    """

    name: str
    bits: int
    emin: int
    largest: float

    @property
    def unit_roundoff(self) -> float:
        return 2.0**-self.bits

    def ulp(self, x: float) -> float:
        """Return the distance from x to the next number away from zero."""
        exponent = max(math.frexp(x)[1] - 1, self.emin) if x else self.emin
        return 2.0 ** (exponent - self.bits + 1)

    def rounded(self, x: float) -> float:
        """Return the nearest number of the format, ties to even; inf beyond the largest."""
        if not math.isfinite(x):
            return x
        unit = self.ulp(x)
        nearest = round(x / unit) * unit
        return math.copysign(math.inf, x) if abs(nearest) > self.largest else nearest


FP32 = Format("fp32", 24, -126, (2 - 2.0**-23) * 2.0**127)
BF16 = Format("bf16", 8, -126, (2 - 2.0**-7) * 2.0**127)
FP16 = Format("fp16", 11, -14, 65504.0)
# binades with less than this share of the largest error are not explained
TELLING = 0.5
FORMATS = {Precision.FP32: FP32, Precision.BF16: BF16, Precision.FP16: FP16}


@dataclass(frozen=True)
class Binade:
    """Repeated additions of one number while the running sum is in [low, below)."""

    low: float
    ulp: float  # ulp of the sum
    stored: float  # the rounded number that is added
    additions: int
    error: float  # total error added by rounding

    @property
    def below(self) -> float:
        return 2 * self.low

    @property
    def addend_in_ulps(self) -> float:
        return self.stored / self.ulp

    @property
    def added_in_ulps(self) -> float:
        """Return the mean change of the sum by an addition, each a whole number of ulps."""
        return (self.stored + self.error / self.additions) / self.ulp


@cache  # a table, its explanation and its answer need the same sums
def binades(value: float, addend: Format, accumulator: Format, count: int) -> tuple[Binade, ...]:
    """Return the binades that the sum passes while `value` is added `count` times to 0.

    `value` is stored as `addend`; the sum is stored as `accumulator`.
    """
    stored, total = addend.rounded(value), 0.0
    additions, errors = Counter[float](), defaultdict[float, float](float)  # key: the smallest number of the binade
    for done in range(count):
        low = 2.0 ** (math.frexp(total or stored)[1] - 1)
        after = accumulator.rounded(total + stored)
        times = count - done if after == total else 1  # a sum that one addition leaves unchanged never changes again
        additions[low] += times
        errors[low] += (after - total - stored) * times
        if after == total:
            break
        total = after
    return tuple(Binade(low, accumulator.ulp(low), stored, count, errors[low]) for low, count in additions.items())


def total(value: float, addend: Format, accumulator: Format, count: int) -> float:
    """Return the sum that `binades` describes."""
    rounding: float = sum(binade.error for binade in binades(value, addend, accumulator, count))
    return count * addend.rounded(value) + rounding


def why(value: float, addend: Format, accumulator: Format, count: int) -> str:
    """Return the cause of the sum's error in a sentence: the stored addend, or the binades with the largest errors."""
    stored = addend.rounded(value)
    of_addend = count * (stored - value)
    rows = binades(value, addend, accumulator, count)
    most = max(abs(binade.error) for binade in rows)
    if abs(of_addend) > most:
        return f"{value} is {stored:.8g} in {addend.name}, {of_addend:+.2g} over all additions"
    costly = [binade for binade in rows if abs(binade.error) >= TELLING * most]
    return "; ".join(_where(binade, accumulator) for binade in costly)


def _where(binade: Binade, accumulator: Format) -> str:
    place = f"from {binade.low:g} on, an ulp of {accumulator.name} is {binade.ulp:.3g}"
    if binade.added_in_ulps == 0:
        return f"{place}, and {binade.stored:.4g} is less than half of it, so that the sum no longer changes"
    given, added = _ulps(binade.addend_in_ulps), _ulps(binade.added_in_ulps)
    return f"{place}: {given} ulps are rounded to {added}, {binade.error:+.2g} over {binade.additions:,} additions"


def _ulps(number: float) -> str:
    return f"{number:.4g}" if number < 1000 else f"{number:,.1f}"


AUTOCAST_CONTEXTS = Table("autocast_contexts", AutocastContext, "autocast contexts that were entered")
ACCUMULATION = Table("accumulation", AccumulationRow, "sums of one number added many times")
SUMMATION = Table("summation", SummationRow, "errors of sums of random numbers")
NORMALIZATION = Table("normalization", NormalizationRow, "error by step in low precision")
NORMALIZATION_RANGE = Table("normalization_range", NormalizationRangeRow, "input sizes at which a step fails")
