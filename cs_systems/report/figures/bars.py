"""Figures with one stacked bar per cell: step time by phase, and kernel time by family."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

from cs_systems.core import units
from cs_systems.record import RunRecord
from cs_systems.report.figures.drawing import COLORS, GREY, INK, one_panel, with_legend
from cs_systems.report.figures.labels import labels
from cs_systems.report.frame import STEP
from cs_systems.report.tables import columns as cols
from cs_systems.report.tables.records import in_order, varying

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

MOST_BARS = 32
LEAST_LABELLED = 6  # percent: smallest segment of a bar with room for its number


def phases(records: Sequence[RunRecord], data: pd.DataFrame) -> Figure:
    """Draw step time by phase: a stacked bar per cell with p10 to p90, or the reason that the cell failed."""
    apart = varying(data)[0]
    cells = in_order(data.drop_duplicates("record")).head(MOST_BARS)
    names = [p for p in cols.phases_of(data) if p != STEP]
    steps = _of_phase(data, STEP, cells)
    unit = units.best_unit(units.SCALES["_s"], steps["median_s"].dropna())
    hidden = data["record"].nunique() - len(cells)
    drawn, axes = one_panel(1.3 + 0.3 * len(cells))
    at = range(len(cells))
    left = [0.0] * len(cells)
    for name, color in zip(names, cycle(COLORS)):
        widths = (_of_phase(data, name, cells)["median_s"].fillna(0) / unit.factor).tolist()
        axes.barh(at, widths, left=left, color=color, label=name, height=0.72)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    rest = (steps["wall_minus_phases_s"].clip(lower=0).fillna(0) / unit.factor).tolist()
    if any(rest):
        axes.barh(at, rest, left=left, color=GREY, label="outside the phases", height=0.72)
    ends = [(steps[c] / unit.factor).tolist() for c in ("median_s", "p10_s", "p90_s")]
    for y, (middle, low, high) in enumerate(zip(*ends, strict=True)):
        if middle == middle:
            axes.plot([low, high], [y, y], color=INK, linewidth=1.4)
    reach = max(filter(lambda v: v == v, ends[2]), default=1.0)
    for y, (cell, high) in enumerate(zip(cells.to_dict("records"), ends[2], strict=True)):
        label = f"{units.significant(ends[0][y])} {unit.label}" if high == high else _failure_label(cell)
        axes.text((high if high == high else 0) + 0.012 * reach, y, label, va="center", fontsize=9)
    axes.set_yticks(at, labels(cells, apart))
    axes.set_ylim(len(cells) - 0.4, -0.6)
    axes.set_xlim(0, reach * 1.16)
    more = f"; {hidden} more cells are in the table" if hidden else ""
    axes.set_xlabel(f"{unit.label} (bars: medians of the phases; line: p10 to p90 of the step{more})")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.grid(axis="x")
    return with_legend(drawn, axes)


def families(records: Sequence[RunRecord], data: pd.DataFrame) -> Figure:
    """Draw one stacked bar per profiled cell: the shares of its kernel time by kernel family, with the total time."""
    families_of = [r.results.get("families", []) for r in records]
    cells = in_order(data.drop_duplicates("record"))
    cells = cells[[bool(families_of[number]) for number in cells["record"]]].head(MOST_BARS)
    times = [{row["family"]: row["time_s"] for row in families_of[number]} for number in cells["record"]]
    drawn, axes = one_panel(1.3 + 0.3 * len(cells))
    left = [0.0] * len(times)
    shown = dict.fromkeys(name for one in times for name in one)  # each cell's longest first
    for name, color in zip(shown, cycle((*COLORS, GREY, INK))):
        widths = [100 * one.get(name, 0.0) / sum(one.values()) for one in times]
        axes.barh(range(len(times)), widths, left=left, color=color, label=name, height=0.72)
        for y, (start, width) in enumerate(zip(left, widths, strict=True)):
            if width >= LEAST_LABELLED:
                axes.text(start + width / 2, y, f"{width:.0f}%", ha="center", va="center", fontsize=8, color="white")
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for y, one in enumerate(times):
        axes.text(101, y, units.human(sum(one.values()), "s"), va="center", fontsize=9)
    axes.set_yticks(range(len(times)), labels(cells, varying(data)[0]))
    axes.set_ylim(len(times) - 0.4, -0.6)
    axes.set_xlim(0, 112)
    axes.set_xlabel("% of the kernel time of a step (right: kernel time of the step)")
    axes.set_xticks(range(0, 101, 20))
    return with_legend(drawn, axes)


def _of_phase(data: pd.DataFrame, phase: str, cells: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of one phase for each of the cells, empty where a cell has none."""
    return data[data["phase"] == phase].set_index("record").reindex(cells["record"])


def _failure_label(cell: dict[Any, Any]) -> str:
    predicted = cell["predicted_peak_bytes"]
    more = f": predicted {units.human(predicted, 'bytes')}" if isinstance(predicted, int | float) else ""
    return f"{cell['status']}{more}"
