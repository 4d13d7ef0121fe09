"""Statistics held against numpy, against tables, and against simulated machines whose truth is known."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cs_systems import stats

DURATIONS = st.lists(st.floats(1e-7, 1e3), min_size=1, max_size=50)


@given(DURATIONS, st.floats(0, 1))
def test_quantile_is_numpys(samples: list[float], q: float) -> None:
    assert stats.quantile(samples, q) == pytest.approx(float(np.quantile(samples, q)), rel=1e-12)


@given(DURATIONS)
def test_summary_is_numpys(samples: list[float]) -> None:
    got = stats.summary(samples)
    assert got.n == len(samples)
    assert got.median == pytest.approx(float(np.median(samples)))
    assert got.mean == pytest.approx(float(np.mean(samples)))
    assert (got.min, got.max) == (min(samples), max(samples))
    assert got.min <= got.p10 <= got.median <= got.p90 <= got.max
    if len(samples) == 1:
        assert got.std is None
    else:
        assert got.std == pytest.approx(float(np.std(samples, ddof=1)), abs=1e-9)
    if got.low is not None and got.high is not None:
        assert got.low <= got.median <= got.high


def test_no_samples_is_an_error() -> None:
    with pytest.raises(ValueError, match="no samples"):
        stats.summary([])


@pytest.mark.parametrize(
    ("n", "ranks"), [(5, None), (6, (1, 6)), (10, (2, 9)), (20, (6, 15)), (30, (10, 21)), (100, (40, 61))]
)
def test_median_interval_is_the_tables(n: int, ranks: tuple[int, int] | None) -> None:
    """Conover, Practical Nonparametric Statistics, table A3 (p = ½, 95%)."""
    assert stats.median_interval(range(1, n + 1)) == ranks


def test_median_interval_covers() -> None:
    rng = random.Random(1)
    hits = 0
    for _ in range(1000):
        low, high = stats.median_interval([rng.lognormvariate(0, 1) for _ in range(15)]) or (1, 1)
        hits += low <= 1 <= high
    assert hits >= 935
