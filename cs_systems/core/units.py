"""Units of columns: conversion from base units for display, and lookup of a column by a name that contains a unit.

Data holds seconds, bytes and FLOPs, and the unit ends the column's name. A name may end in a smaller or larger unit
instead (`median_ms`, `peak_allocated_gib`): the same column, shown in that unit.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from cs_systems.core.validation import one_of


@dataclass(frozen=True)
class Unit:
    """Unit of `factor` base units; `suffix` ends a column's name, `label` appears in a heading."""

    suffix: str
    label: str
    factor: float


def _scale(*units: tuple[str, str, float]) -> tuple[Unit, ...]:
    return tuple(Unit(*u) for u in units)


# Suffix of the base unit → its units, large to small. The order matters: `_flops_per_s` also ends in `_per_s` and `_s`.
# A column is shown in the largest that its median reaches, so that a unit added here changes tables.
SCALES: dict[str, tuple[Unit, ...]] = {
    "_flops_per_s": _scale(
        ("_pflops_per_s", "PFLOP/s", 1e15),
        ("_tflops_per_s", "TFLOP/s", 1e12),
        ("_gflops_per_s", "GFLOP/s", 1e9),
        ("_mflops_per_s", "MFLOP/s", 1e6),
        ("_flops_per_s", "FLOP/s", 1),
    ),
    "_bytes_per_s": _scale(
        ("_tb_per_s", "TB/s", 1e12), ("_gb_per_s", "GB/s", 1e9), ("_mb_per_s", "MB/s", 1e6), ("_bytes_per_s", "B/s", 1)
    ),
    "_per_s": _scale(("_per_s", "", 1)),
    "_per_j": _scale(("_per_j", "", 1)),
    "_j": _scale(("_kj", "kJ", 1e3), ("_j", "J", 1), ("_mj", "mJ", 1e-3)),
    "_w": _scale(("_kw", "kW", 1e3), ("_w", "W", 1), ("_mw", "mW", 1e-3)),
    "_s": _scale(("_s", "s", 1), ("_ms", "ms", 1e-3), ("_us", "µs", 1e-6), ("_ns", "ns", 1e-9)),
    "_bytes": _scale(("_gib", "GiB", 2.0**30), ("_mib", "MiB", 2.0**20), ("_kib", "KiB", 2.0**10), ("_bytes", "B", 1)),
    "_flops": _scale(
        ("_pflops", "PFLOP", 1e15),
        ("_tflops", "TFLOP", 1e12),
        ("_gflops", "GFLOP", 1e9),
        ("_mflops", "MFLOP", 1e6),
        ("_flops", "FLOP", 1),
    ),
    "_c": _scale(("_c", "°C", 1)),
    "_hz": _scale(("_ghz", "GHz", 1e9), ("_mhz", "MHz", 1e6), ("_hz", "Hz", 1)),
    **{share: _scale((share, "%", 1e-2)) for share in ("mfu", "hfu", "spread", "share")},
}


def base_suffix(column: str) -> str | None:
    """Return the base unit's suffix of `column`, or None if it has none (a count, a text)."""
    return next((s for s in SCALES if column.endswith(s) or column == s.removeprefix("_")), None)


def best_unit(units: Iterable[Unit], values: Iterable[float]) -> Unit:
    """Return the largest unit in which the median of known, non-zero magnitudes is at least 1, else the smallest.

    Zeros alone are shown in the base unit.
    """
    units = list(units)
    known = sorted(abs(v) for v in values if math.isfinite(v) and v)
    middle = known[len(known) // 2] if known else 1.0
    return next((u for u in units if float(f"{middle / u.factor:.3g}") >= 1), units[-1])  # as it is printed


def resolve(name: str, columns: Collection[str]) -> tuple[str, Unit | None]:
    """Return the column for `name` and the unit in the name, if any: `median_ms` → (`median_s`, ms).

    Raises ConfigError with the nearest names if the column does not exist.
    """
    if name in columns:
        return name, None
    for base, units in SCALES.items():
        for unit in units:
            column = name.removesuffix(unit.suffix) + base
            if name.endswith(unit.suffix) and column in columns:
                return column, unit
    return one_of("column", name, columns), None


def in_all_units(columns: Iterable[str]) -> list[str]:
    """Return all names for which `resolve` finds these columns: `median_s`, `median_ms`, `median_us`, and so on."""
    names = []
    for name in columns:
        base = base_suffix(name)
        names += [name] if base is None else [name.removesuffix(base) + unit.suffix for unit in SCALES[base]]
    return names


def significant(value: float, digits: int = 3) -> str:
    """Format `value` to `digits` significant digits: 0.0213, 1.20, 12.3, 1,234."""
    return fixed(value, decimals(value, digits))


def decimals(value: float, digits: int = 3) -> int:
    """Return the number of decimals in `digits` significant digits of `value`."""
    if not math.isfinite(value) or value == 0:
        return 0
    return max(0, digits - 1 - int(f"{value:.{digits - 1}e}".partition("e")[2]))


def fixed(value: float, places: int) -> str:
    """Format `value` with `places` decimals and separated thousands; use exponent form if that is unreadable."""
    if not math.isfinite(value):
        return "∞" if value > 0 else "-∞" if value < 0 else ""
    if value and not 1e-6 <= abs(value) < 1e15:
        return f"{value:.2e}"
    return f"{value:,.{places}f}"


def human(value: float, column: str) -> str:
    """Format one number in its best unit: `human(1.62e11, "peak_bytes")`, or of just `"bytes"`, is `151 GiB`."""
    suffix = base_suffix(column)
    if suffix is None:
        return significant(value)
    unit = best_unit(SCALES[suffix], [value])
    space = "" if unit.label == "%" else " "
    return f"{in_unit(value, unit)}{space}{unit.label}".rstrip()


def signed(change: float, column: str) -> str:
    """Format a change like `human`, with its sign."""
    return f"{'−' if change < 0 else '+'}{human(abs(change), column)}"


def in_unit(value: float, unit: Unit) -> str:
    """Format `value` in a unit to three significant digits; whole bytes are shown as a count: 16, not 16.0."""
    is_count = unit.suffix == "_bytes" and float(value).is_integer()
    return f"{value:,.0f}" if is_count else significant(value / unit.factor)


def percent(share: float) -> str:
    """Format a share with one decimal: 41.7%; 100.0% only if nothing is missing."""
    return f"{min(share, 0.999) if share < 1 - 1e-9 else share:.1%}"


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return the number with its noun: `1 cell`, `1,200 cells`; pass an irregular plural."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"
