"""Tests of fitting t(n) = α + n/β to measured times."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cs_systems.formulas.latency_bandwidth import fit

SIZES = [2**k for k in range(10, 31, 2)]
alphas = st.floats(1e-6, 1e-2)
betas = st.floats(1e8, 1e12)


@given(alpha=alphas, beta=betas)
def test_fit_recovers_latency_and_bandwidth_of_exact_times(alpha: float, beta: float) -> None:
    found = fit(SIZES, [alpha + n / beta for n in SIZES])
    assert found is not None
    assert found.bandwidth_bytes_per_s is not None
    assert found.latency_s == pytest.approx(alpha, rel=1e-3)
    assert found.bandwidth_bytes_per_s == pytest.approx(beta, rel=1e-3)
    assert found.r_squared == pytest.approx(1, abs=1e-6)
    assert found.worst_relative_residual < 1e-6
    assert found.half_bandwidth_bytes == pytest.approx(alpha * beta, rel=1e-2)
    assert found.time_s(3000) == pytest.approx(alpha + 3000 / beta, rel=1e-3)


@given(alpha=alphas, beta=betas, noise=st.lists(st.floats(0.95, 1.05), min_size=len(SIZES), max_size=len(SIZES)))
@settings(max_examples=50)
def test_fit_residual_is_bounded_with_5_percent_noise(alpha: float, beta: float, noise: list[float]) -> None:
    """The true line has residuals of at most 0.05/0.95, and the fitted line has no larger sum of squares."""
    times = [f * (alpha + n / beta) for f, n in zip(noise, SIZES, strict=True)]
    found = fit(SIZES, times)
    assert found is not None
    assert found.worst_relative_residual <= 0.05 / 0.95 * len(SIZES) ** 0.5 + 1e-9


@given(times=st.lists(st.floats(1e-6, 10), min_size=3, max_size=10))
def test_fit_of_any_times_is_physical(times: list[float]) -> None:
    found = fit(SIZES[: len(times)], times)
    assert found is not None
    assert found.latency_s >= 0
    assert found.bandwidth_bytes_per_s is None or found.bandwidth_bytes_per_s > 0
    assert found.r_squared is None or found.r_squared <= 1 + 1e-9
    predicted = [found.time_s(n) for n in SIZES[: len(times)]]
    assert max(abs(t - s) / t for t, s in zip(times, predicted, strict=True)) == pytest.approx(
        found.worst_relative_residual, abs=1e-9
    )


def test_fit_weights_small_messages_as_much_as_large_ones() -> None:
    """Without weights, a large message that is 10% off would change the latency by 100 times α."""
    times = [10e-6 + n / 1e11 for n in SIZES]
    times[-1] *= 1.1
    found = fit(SIZES, times)
    assert found is not None
    assert found.latency_s == pytest.approx(10e-6, rel=0.05)


def test_fit_of_constant_times_has_no_bandwidth() -> None:
    found = fit(SIZES, [1e-3] * len(SIZES))
    assert found is not None
    assert (found.bandwidth_bytes_per_s, found.r_squared, found.half_bandwidth_bytes) == (None, None, None)
    assert found.time_s(10**12) == pytest.approx(1e-3)


def test_fit_requires_three_sizes() -> None:
    assert fit([1024, 4096], [1e-5, 2e-5]) is None
    assert fit([1024, 1024, 4096], [1e-5, 1e-5, 2e-5]) is None


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ([1e-5, 0.0, 1e-5], "a time is 0.0 s; give only finite times above 0"),
        ([1e-5, 1e-5], "times_s has 2 values, but sizes_bytes has 3; give one time for each size"),
        ([1e-5, float("nan"), 1e-5], "a time is nan s; give only finite times above 0"),
    ],
)
def test_fit_rejects_times_that_are_zero_missing_or_nan(times: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit([1, 2, 3], times)
