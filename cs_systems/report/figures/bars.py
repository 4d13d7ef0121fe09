"""Figures with one stacked bar per cell: step time by phase, and kernel time by family."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

from cs_systems.core import units
from cs_systems.record import RunRecord
from cs_systems.report import palette
from cs_systems.report.figures.drawing import INK, filled, on_patch, one_panel, with_legend
from cs_systems.report.figures.labels import labels
from cs_systems.report.frame import STEP
from cs_systems.report.tables import columns as cols
from cs_systems.report.tables.records import in_order, varying

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_BARS = 12  # of more, nobody compares the lengths; the table has all cells
FLAT = 50  # times: bars that are this much shorter than the longest show no phases; each then fills the width
LEAST_LABELLED = 6  # percent: smallest segment of a bar with room for its number


def phases(records: Sequence[RunRecord], data: pd.DataFrame) -> Figure:
    """Draw step time by phase: a stacked bar per cell with p10 to p90, or the reason why the cell failed.

    Every phase is as long as its own median. Medians do not add up, so a mark shows the step's median. Of cells whose
    steps differ too much for one scale, each bar shows the shares of the phases.
    """
    apart = varying(data)[0]
    cells, hidden = _shown(in_order(data.drop_duplicates("record")))
    names = [p for p in cols.phases_of(data) if p != STEP]
    steps = _of_phase(data, STEP, cells)
    unit = units.best_unit(units.SCALES["_s"], steps["median_s"].dropna())
    drawn, axes = _panel(len(cells))
    parts = {name: _of_phase(data, name, cells)["median_s"].fillna(0).tolist() for name in names}
    parts["outside the phases"] = steps["wall_minus_phases_s"].clip(lower=0).fillna(0).tolist()
    times = steps["median_s"].tolist()
    known = [time for time in times if time == time]
    in_shares = bool(known) and max(known) > FLAT * min(known)
    scales = [100 / time if in_shares and time else 1 / unit.factor for time in times]
    medians, lows, highs = (
        [time * scale for time, scale in zip(steps[c], scales, strict=True)] for c in ("median_s", "p10_s", "p90_s")
    )
    left = [0.0] * len(cells)
    looks = _looks(names) | {"outside the phases": palette.paint("outside")}
    for name, of_phase in parts.items():
        if not any(of_phase):
            continue
        drawn_s = zip(of_phase, scales, medians, strict=True)
        widths = [part * scale if median == median else 0.0 for part, scale, median in drawn_s]
        axes.barh(range(len(cells)), widths, left=left, label=name, height=0.72, **filled(looks[name]))
        left = [a + b for a, b in zip(left, widths, strict=True)]
    reach = max((v for v in (*highs, *medians, *left) if v == v), default=1.0)
    for y, (cell, median, low, high) in enumerate(zip(cells.to_dict("records"), medians, lows, highs, strict=True)):
        measured = median == median
        if measured:
            axes.plot([low, high], [y, y], color=INK, linewidth=1.4)
            axes.plot([median], [y], "|", color=INK, markersize=11, markeredgewidth=1.4)
        label = _time(times[y], unit, in_shares) if measured else _failure_label(cell)
        axes.text((max(high, left[y]) if measured else 0) + 0.012 * reach, y, label, va="center", fontsize=9)
    axes.set_yticks(range(len(cells)), labels(cells, apart))
    axes.set_xlim(0, reach * 1.16)
    more = _more(hidden)
    bar, axis = "bar: medians of the phases; mark: of the step", "% of the step" if in_shares else unit.label
    axes.set_xlabel(f"{axis} ({bar}; line: p10 to p90{more})", loc="right")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.grid(axis="x")
    return with_legend(drawn, axes)


def families(records: Sequence[RunRecord], data: pd.DataFrame) -> Figure:
    """Draw one stacked bar per profiled cell: the shares of its kernel time by kernel family, with the total time."""
    families_of = [r.results.get("families", []) for r in records]
    cells = in_order(data.drop_duplicates("record"))
    cells, hidden = _shown(cells[[bool(families_of[number]) for number in cells["record"]]])
    times = [{row["family"]: row["time_s"] for row in families_of[number]} for number in cells["record"]]
    drawn, axes = _panel(len(cells))
    left = [0.0] * len(times)
    for name, look in _looks(dict.fromkeys(name for one in times for name in one)).items():  # longest first
        widths = [100 * one.get(name, 0.0) / sum(one.values()) for one in times]
        axes.barh(range(len(times)), widths, left=left, label=name, height=0.72, **filled(look))
        for y, (start, width) in enumerate(zip(left, widths, strict=True)):
            if width >= LEAST_LABELLED:
                on_patch(axes.text(start + width / 2, y, f"{width:.0f}%", ha="center", va="center", fontsize=8))
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for y, one in enumerate(times):
        axes.text(101, y, units.human(sum(one.values()), "s"), va="center", fontsize=9)
    axes.set_yticks(range(len(times)), labels(cells, varying(data)[0]))
    axes.set_xlim(0, 112)
    more = _more(hidden)
    axes.set_xlabel(f"% of the kernel time of a step (right: kernel time of the step{more})", loc="right")
    axes.set_xticks(range(0, 101, 20))
    return with_legend(drawn, axes)


def _panel(bars: int) -> tuple[Figure, Axes]:
    """Return a figure with room for this many bars, the first one at the top."""
    drawn, axes = one_panel(1.3 + 0.3 * bars)
    axes.set_ylim(bars - 0.4, -0.6)
    axes.set_ymargin(0)
    return drawn, axes


def _shown(cells: pd.DataFrame) -> tuple[pd.DataFrame, int]:
    """Return (cells to draw, number of omitted cells); omitted cells are spread evenly."""
    if len(cells) <= MOST_BARS:
        return cells, 0
    chosen = [round(number * (len(cells) - 1) / (MOST_BARS - 1)) for number in range(MOST_BARS)]
    return cells.iloc[chosen], len(cells) - MOST_BARS


def _looks(names: Iterable[str]) -> dict[str, palette.Paint]:
    """Return the look of each family or phase; a user's own names get the remaining hues."""
    known = {name: palette.paint(name) for name in names if name in palette.FAMILIES | palette.PHASES}
    taken = {look.hue for look in known.values()}
    free = cycle([palette.Paint(hue) for hue in palette.HUES if hue not in taken] or palette.SERIES)
    return {name: known.get(name) or next(free) for name in names}


def _of_phase(data: pd.DataFrame, phase: str, cells: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of one phase for each of the cells; a row is empty if the cell has no such phase."""
    return data[data["phase"] == phase].set_index("record").reindex(cells["record"])


def _more(hidden: int) -> str:
    return f"; {units.counted(hidden, 'more cell')} in the table" if hidden else ""


def _time(time_s: float, unit: units.Unit, own_unit: bool) -> str:
    """Return a duration in the figure's unit, or in its own where the durations differ too much for one."""
    return units.human(time_s, "s") if own_unit else f"{units.significant(time_s / unit.factor)} {unit.label}"


def _failure_label(cell: dict[Any, Any]) -> str:
    predicted = cell["predicted_peak_bytes"]
    more = f": predicted {units.human(predicted, 'bytes')}" if isinstance(predicted, int | float) else ""
    return f"{cell['status']}{more}"
