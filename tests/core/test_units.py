"""Units: numbers as text, and columns with a unit in their names."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cs_systems.config import ConfigError
from cs_systems.core import units


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0213, "0.0213"),
        (1.2, "1.20"),
        (12.34, "12.3"),
        (0.9996, "1.00"),
        (1234.4, "1,234"),
        (0, "0"),
        (-2.5, "-2.50"),
    ],
)
def test_numbers_have_three_significant_digits(value: float, shown: str) -> None:
    assert units.significant(value) == shown


@given(st.floats(1e-6, 1e12))
def test_shown_number_is_within_half_a_percent(value: float) -> None:
    shown = units.significant(value)
    assert "e" not in shown
    assert math.isclose(float(shown.replace(",", "")), value, rel_tol=5.1e-3)


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_every_float_is_formatted(value: float) -> None:
    assert isinstance(units.significant(value), str)


@pytest.mark.parametrize(
    ("values", "label"),
    [([0.012, 0.4, 3.0], "ms"), ([3e-6, 4e-6], "µs"), ([2e-9], "ns"), ([0.0, math.nan, 5.0], "s"), ([0.0], "s")],
)
def test_best_unit_fits_the_median(values: list[float], label: str) -> None:
    assert units.best_unit(units.SCALES["_s"], values).label == label


@pytest.mark.parametrize(
    ("value", "quantity", "shown"),
    [
        (3.1e7, "flops_per_s", "31.0 MFLOP/s"),
        (4.2e6, "flops", "4.20 MFLOP"),
        (5e5, "flops", "500,000 FLOP"),
        (1.1e9, "flops_per_s", "1.10 GFLOP/s"),
    ],
)
def test_small_flop_counts_are_shown_with_a_unit(value: float, quantity: str, shown: str) -> None:
    assert units.human(value, quantity) == shown


@pytest.mark.parametrize(
    ("name", "column", "label"),
    [
        ("median_s", "median_s", None),
        ("median_ms", "median_s", "ms"),
        ("peak_gib", "peak_bytes", "GiB"),
        ("model_tflops_per_s", "model_flops_per_s", "TFLOP/s"),
    ],
)
def test_column_name_can_select_a_unit(name: str, column: str, label: str | None) -> None:
    found, unit = units.resolve(name, ["median_s", "peak_bytes", "model_flops_per_s"])
    assert (found, unit and unit.label) == (column, label)


def test_unknown_column_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown column 'medain_s'; did you mean median_s"):
        units.resolve("medain_s", ["median_s", "mean_s", "phase"])


@pytest.mark.parametrize(
    ("value", "column", "shown"),
    [
        (162_349_764_813, "predicted_peak_bytes", "151 GiB"),
        (0.0123, "s", "12.3 ms"),
        (999.4e-9, "s", "999 ns"),
        (999.6e-9, "s", "1.00 µs"),  # not 1,000 ns
        (0.417, "mfu", "41.7%"),
        (16, "size_bytes", "16 B"),
        (12.5, "bytes", "12.5 B"),
        (51_234.0, "tokens_per_s", "51,234"),
        (7, "warmup", "7.00"),
    ],
)
def test_single_number_has_the_unit_of_its_column(value: float, column: str, shown: str) -> None:
    assert units.human(value, column) == shown


@pytest.mark.parametrize(
    ("share", "shown"), [(0.4171, "41.7%"), (0.99959, "99.9%"), (1 - 1e-12, "100.0%"), (0, "0.0%")]
)
def test_share_is_whole_only_if_nothing_is_missing(share: float, shown: str) -> None:
    assert units.percent(share) == shown


def test_count_has_its_noun_in_singular_or_plural() -> None:
    shown = [units.counted(n, "cell") for n in (0, 1, 2, 1200)]
    assert shown == ["0 cells", "1 cell", "2 cells", "1,200 cells"]
    assert units.counted(3, "other process", "other processes") == "3 other processes"
