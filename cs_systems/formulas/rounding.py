"""Why a sum in low precision comes out as it does: units in the last place, binade by binade. Pure arithmetic.

A binary format with p significant bits has, at x, the ulp 2^(max(⌊log2 |x|⌋, emin) − p + 1); results round to the
nearest multiple, ties to even (IEEE 754-2019, 4.3.1). Its unit roundoff is u = 2^−p.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cs_systems.config import Precision
from cs_systems.record import Row


@dataclass(frozen=True)
class Format:
    """bits: significant ones, the hidden one too. emin: exponent of the smallest normal number."""

    name: str
    bits: int
    emin: int
    largest: float

    @property
    def unit_roundoff(self) -> float:
        return 2.0**-self.bits

    def ulp(self, x: float) -> float:
        """The distance from x to the next number away from zero."""
        exponent = max(math.frexp(x)[1] - 1, self.emin) if x else self.emin
        return 2.0 ** (exponent - self.bits + 1)

    def rounded(self, x: float) -> float:
        """The nearest number of the format, ties to even; inf beyond the largest."""
        if not math.isfinite(x):
            return x
        unit = self.ulp(x)
        nearest = round(x / unit) * unit
        return math.copysign(math.inf, x) if abs(nearest) > self.largest else nearest


FP32 = Format("fp32", 24, -126, (2 - 2.0**-23) * 2.0**127)
BF16 = Format("bf16", 8, -126, (2 - 2.0**-7) * 2.0**127)
FP16 = Format("fp16", 11, -14, 65504.0)
# Below this share of the largest, a binade's error is not worth a word.
TELLING = 0.5
FORMATS = {Precision.FP32: FP32, Precision.BF16: BF16, Precision.FP16: FP16}


def binades(value: float, addend: Format, accumulator: Format, count: int) -> list[Row]:
    """Adding `value`, stored as `addend`, `count` times to 0: what happens while the sum is between two powers of 2.

    {from, below, ulp, addend_in_ulps, added_in_ulps, additions, error}: an addition that begins in [from, below) adds
    a whole number of ulps, on average `added_in_ulps`; `error` is what rounding there has added too much, in all.
    """
    stored, total, rows = addend.rounded(value), 0.0, dict[float, Row]()
    for done in range(count):
        low = 2.0 ** (math.frexp(total or stored)[1] - 1)
        row = rows.setdefault(low, {"from": low, "additions": 0, "error": 0.0})
        after = accumulator.rounded(total + stored)
        times = count - done if after == total else 1  # a sum that stands still stands still for good
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
    """The sum that `binades` describes."""
    rounding: float = sum(row["error"] for row in binades(value, addend, accumulator, count))
    return count * addend.rounded(value) + rounding


def why(value: float, addend: Format, accumulator: Format, count: int) -> str:
    """In a sentence, where the error of the sum comes from: the stored addend, or the binades that cost most."""
    stored = addend.rounded(value)
    of_addend = count * (stored - value)
    rows = binades(value, addend, accumulator, count)
    most = max(abs(row["error"]) for row in rows)
    if abs(of_addend) > most:
        return f"{value} is {stored:.8g} in {addend.name}, {of_addend:+.2g} over all additions"
    costly = [row for row in rows if abs(row["error"]) >= TELLING * most]
    return "; ".join(_where(row, stored, accumulator) for row in costly)


def _where(row: Row, stored: float, accumulator: Format) -> str:
    where = f"from {row['from']:g} on an ulp of {accumulator.name} is {row['ulp']:.3g}"
    if row["added_in_ulps"] == 0:
        return f"{where}, and {stored:.4g} is less than half of it: the sum stands still"
    given, added = (_ulps(row[name]) for name in ("addend_in_ulps", "added_in_ulps"))
    return f"{where}: {given} ulps are added as {added}, {row['error']:+.2g} over {row['additions']:,} additions"


def _ulps(number: float) -> str:
    return f"{number:.4g}" if number < 1000 else f"{number:,.1f}"
