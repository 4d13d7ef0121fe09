"""Names of cells in figures: labels of bars and curves, and the subject of a figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cs_systems.core.collectives import readable_bytes
from cs_systems.core.printable import plain
from cs_systems.core.units import counted
from cs_systems.report.frame import CLEAN
from cs_systems.report.tables import layout

if TYPE_CHECKING:
    import pandas as pd

# columns for a curve's horizontal axis, in order of preference
LENGTHS = ("seq", "seq_len", "batch", "batch_size", "heads", "d_head")
# sizes that may change together with it, and then do not distinguish curves
SIZES = (*LENGTHS, "context_length", "heads_kv", "seq_k", "executed_d_head")
# numbers that a label shows with their names, because they are ambiguous alone
NAMED_NUMBERS = frozenset({*SIZES, "seed", "repeat", "tp_degree"})
COUNTED = {"world_size": "rank", "calls": "call"}


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
    if name in COUNTED:
        return counted(int(value), COUNTED[name])
    if name == "bucket_size_mb":
        return f"buckets of {value:g} MB"
    if name == "causal":
        return "causal" if value else "full"
    if name == "size_bytes":
        return readable_bytes(value)
    shown = plain(str(value))
    return f"{layout.title(name)} {shown}" if name in NAMED_NUMBERS else shown


def subject(data: pd.DataFrame) -> str:
    """Return the subject of a figure: `train_step under nsys on NVIDIA H200`."""
    devices = data["device_name"].dropna().unique()
    profiler = data["profiler"].fillna(CLEAN).iloc[0]
    under = "" if profiler == CLEAN else f" under {profiler}"
    return plain(f"{data['workload'].iloc[0]}{under}" + (f" on {devices[0]}" if len(devices) == 1 else ""))
