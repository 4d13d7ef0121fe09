"""Names of cells in figures: labels of bars and curves, and the subject of a figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cs_systems.core.printable import plain
from cs_systems.core.units import counted
from cs_systems.report.frame import CLEAN
from cs_systems.report.frame_cells import FIELD_COLUMNS, LIKE
from cs_systems.report.tables.columns import title

if TYPE_CHECKING:
    import pandas as pd


def _lengths() -> tuple[str, ...]:
    """Return the columns of sizes that a curve may run along, first choice first; a call's before a model's."""
    along = [name for name in reversed(FIELD_COLUMNS) if FIELD_COLUMNS[name].field.axis]
    return tuple(sorted(along, key=lambda name: FIELD_COLUMNS[name].field.axis))


def _sizes() -> tuple[str, ...]:
    """Return LENGTHS, the columns that take their values or give them theirs, and the head that a kernel computes."""
    lengths = {FIELD_COLUMNS[name].path for name in LENGTHS}
    bound = {path for pair in LIKE.items() if lengths & {*pair} for path in pair} - lengths
    return (*LENGTHS, *(name for name, each in FIELD_COLUMNS.items() if each.path in bound), "executed_d_head")


# columns for a curve's horizontal axis, in order of preference
LENGTHS = _lengths()
# sizes that may change together with it, and then do not distinguish curves
SIZES = _sizes()
# numbers that a label shows with their names, because they are ambiguous alone
NAMED_NUMBERS = frozenset(
    {*SIZES, "repeat", *(n for n, each in FIELD_COLUMNS.items() if each.field.label == "heading")}
)


def labels(data: pd.DataFrame, names: Sequence[str]) -> list[str]:
    """Return labels like `small · ctx 256 · naive`, without values that a cell lacks.

    A legend omits labels that start with an underscore.
    """
    known = data.notna()
    columns = [
        [_label(name, value) if is_known else "" for value, is_known in zip(data[name], known[name], strict=True)]
        for name in names
    ]
    parts = zip(*columns, strict=True) if names else [()] * len(data)
    joined = [" · ".join(filter(None, of_cell)) for of_cell in parts]
    return [f" {label}" if label.startswith("_") else label for label in joined]


def _label(name: Any, value: Any) -> str:
    """Return the value in words."""
    if (each := FIELD_COLUMNS.get(name)) and each.field.counts:
        return counted(int(value), each.field.counts)
    if each and each.field.label == "words":
        return each.phrase(value)
    if name == "causal":
        return "causal" if value else "full"
    shown = plain(str(value))
    return f"{title(name)} {shown}" if name in NAMED_NUMBERS else shown


def subject(data: pd.DataFrame) -> str:
    """Return the subject of a figure: `train_step under nsys on NVIDIA H200`."""
    devices = data["device_name"].dropna().unique()
    profiler = data["profiler"].fillna(CLEAN).iloc[0]
    under = "" if profiler == CLEAN else f" under {profiler}"
    return plain(f"{data['workload'].iloc[0]}{under}" + (f" on {devices[0]}" if len(devices) == 1 else ""))
