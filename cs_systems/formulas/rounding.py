"""Explanation of the error of a sum in low precision: units in the last place, binade by binade. Pure arithmetic.

A binary format with p significant bits has, at x, the ulp 2^(max(⌊log2 |x|⌋, emin) − p + 1). Results round to the
nearest multiple of it, ties to even (IEEE 754-2019, 4.3.1). The unit roundoff is u = 2^−p.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cs_systems.config import Precision
from cs_systems.record import Row


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
# A binade with less than this share of the largest error is left out of the explanation.
TELLING = 0.5
FORMATS = {Precision.FP32: FP32, Precision.BF16: BF16, Precision.FP16: FP16}


def binades(value: float, addend: Format, accumulator: Format, count: int) -> list[Row]:
    """Return one row per binade that the sum passes while `value` is added `count` times to 0.

    `value` is stored as `addend`; the sum is stored as `accumulator`. A row has {from, below, ulp, addend_in_ulps,
    added_in_ulps, additions, error}. An addition that begins in [from, below) adds a whole number of ulps, on average
    `added_in_ulps`. `error` is the total excess that rounding added in the binade.
    """
    stored, total, rows = addend.rounded(value), 0.0, dict[float, Row]()
    for done in range(count):
        low = 2.0 ** (math.frexp(total or stored)[1] - 1)
        row = rows.setdefault(low, {"from": low, "additions": 0, "error": 0.0})
        after = accumulator.rounded(total + stored)
        times = count - done if after == total else 1  # a sum that an addition leaves unchanged never changes again
        row["additions"] += times
        row["error"] += (after - total - stored) * times
        if after == total:
            break
        total = after
    return [_described(row, stored, accumulator.ulp(row["from"])) for row in rows.values()]


def _described(row: Row, stored: float, ulp: float) -> Row:
    return {
        "from": row["from"],
        "below": 2 * row["from"],
        "ulp": ulp,
        "addend_in_ulps": stored / ulp,
        "added_in_ulps": (stored + row["error"] / row["additions"]) / ulp,
        "additions": row["additions"],
        "error": row["error"],
    }


def total(value: float, addend: Format, accumulator: Format, count: int) -> float:
    """Return the sum that `binades` describes."""
    rounding: float = sum(row["error"] for row in binades(value, addend, accumulator, count))
    return count * addend.rounded(value) + rounding


def why(value: float, addend: Format, accumulator: Format, count: int) -> str:
    """Return the cause of the sum's error in a sentence: the stored addend, or the binades with the largest errors."""
    stored = addend.rounded(value)
    of_addend = count * (stored - value)
    rows = binades(value, addend, accumulator, count)
    most = max(abs(row["error"]) for row in rows)
    if abs(of_addend) > most:
        return f"{value} is {stored:.8g} in {addend.name}, {of_addend:+.2g} over all additions"
    costly = [row for row in rows if abs(row["error"]) >= TELLING * most]
    return "; ".join(_where(row, stored, accumulator) for row in costly)


def _where(row: Row, stored: float, accumulator: Format) -> str:
    place = f"from {row['from']:g} on, an ulp of {accumulator.name} is {row['ulp']:.3g}"
    if row["added_in_ulps"] == 0:
        return f"{place}, and {stored:.4g} is less than half of it, so that the sum no longer changes"
    given, added = (_ulps(row[name]) for name in ("addend_in_ulps", "added_in_ulps"))
    return f"{place}: {given} ulps are rounded to {added}, {row['error']:+.2g} over {row['additions']:,} additions"


def _ulps(number: float) -> str:
    return f"{number:.4g}" if number < 1000 else f"{number:,.1f}"
