"""Tests of units in the last place against torch's dtypes, and of sums that they explain."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cs_systems.config import Precision
from cs_systems.formulas.rounding import BF16, FORMATS, FP16, FP32, Format, binades, total, why
from cs_systems.measure.workloads._sums import DTYPES

BOTH = [pytest.param(FORMATS[p], DTYPES[p], id=p) for p in FORMATS]


@pytest.mark.parametrize(("format", "dtype"), BOTH)
def test_format_limits_match_torch_finfo(format: Format, dtype: torch.dtype) -> None:
    known = torch.finfo(dtype)
    assert (format.largest, format.ulp(1.0), 2.0**format.emin) == (known.max, known.eps, known.tiny)
    assert format.unit_roundoff == known.eps / 2
    assert format.ulp(0.0) == format.ulp(known.tiny) == known.smallest_normal * known.eps


@pytest.mark.parametrize(("format", "dtype"), BOTH)
@given(x=st.floats(allow_nan=False, width=64))
def test_rounding_matches_torch(format: Format, dtype: torch.dtype, x: float) -> None:
    """For 16-bit dtypes use fp32 values, since torch rounds twice from float64."""
    x = x if format is FP32 else float(torch.tensor(x, dtype=torch.float32))
    assert format.rounded(x) == float(torch.tensor(x, dtype=torch.float64).float().to(dtype))


@pytest.mark.parametrize(
    ("addend", "accumulator", "count", "expected"),
    [
        (FP32, FP32, 1000, 10.000133514404297),
        (FP16, FP16, 1000, 9.953125),
        (FP16, FP32, 1000, 10.00213623046875),
        (FP16, FP16, 10_000, 32.0),
        (BF16, BF16, 1000, 4.0),
        (BF16, FP32, 1000, 10.009765625),
    ],
)
def test_total_of_repeated_additions_equals_the_sum_over_binades(
    addend: Format, accumulator: Format, count: int, expected: float
) -> None:
    assert total(0.01, addend, accumulator, count) == expected
    found = binades(0.01, addend, accumulator, count)
    assert sum(binade.additions for binade in found) == count
    assert all(binade.below == 2 * binade.low for binade in found)


@pytest.mark.parametrize(
    ("addend", "accumulator", "count", "expected_text"),
    [
        (FP16, FP32, 1000, "0.01 is 0.010002136 in fp16, +0.0021 over all additions"),
        (FP16, FP16, 1000, "from 8 on, an ulp of fp16 is 0.00781: 1.28 ulps are rounded to 1, -0.55 over 250"),
        (BF16, BF16, 1000, "is 0.0312, and 0.01001 is less than half of it, so that the sum no longer changes"),
    ],
)  # fmt: skip
def test_reason_explains_rounding_of_sum(addend: Format, accumulator: Format, count: int, expected_text: str) -> None:
    assert expected_text in why(0.01, addend, accumulator, count)


def test_rounding_beyond_largest_value_gives_infinity() -> None:
    assert FP16.rounded(65519.0) == 65504.0
    assert FP16.rounded(-65520.0) == -math.inf
    assert math.isnan(FP16.rounded(math.nan))
    assert FORMATS.keys() == {Precision.FP32, Precision.BF16, Precision.FP16}
