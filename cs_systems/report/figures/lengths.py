"""Figures of curves along a length or a model size, on logarithmic axes: step time, FLOP/s and peak memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from cs_systems.core import units
from cs_systems.record import RunRecord
from cs_systems.report.figures.drawing import (
    CROWD,
    INK,
    WIDTH,
    curve_styles,
    log_scale,
    with_legend,
)
from cs_systems.report.figures.labels import LENGTHS, SIZES, labels
from cs_systems.report.frame import STEP
from cs_systems.report.tables.columns import title
from cs_systems.report.tables.records import in_order, varying

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TICKS_WIDTH = 70  # most characters of all tick labels in the width of a figure
# Columns that curves are drawn from.
DRAWN = ("fitted", "median_s", "p10_s", "p90_s", "model_flops_per_s", "peak_allocated_bytes", "predicted_peak_bytes")
Draw = Callable[["Axes", list[float], "pd.DataFrame", dict[str, Any]], None]


def time(records: Sequence[RunRecord], data: pd.DataFrame) -> Figure:
    """Draw step time along a length, log-log, with a p10 to p90 band for each backend."""
    unit = units.best_unit(units.SCALES["_s"], _steps(data)["median_s"].dropna())

    def draw(axes: Axes, x: list[float], points: pd.DataFrame, style: dict[str, Any]) -> None:
        axes.plot(x, points["median_s"] / unit.factor, **style)
        low, high = (points[end] / unit.factor for end in ("p10_s", "p90_s"))
        axes.fill_between(x, low, high, color=style["color"], alpha=0.25, linewidth=0, zorder=1)

    return _curves(data, f"{unit.label} (median, band p10 to p90)", draw)


def rate(records: Sequence[RunRecord], data: pd.DataFrame) -> Figure:
    """Draw credited FLOP/s along a length, under the device's ceiling."""
    unit = units.best_unit(units.SCALES["_flops_per_s"], data["ceiling_flops_per_s"].dropna())

    def draw(axes: Axes, x: list[float], points: pd.DataFrame, style: dict[str, Any]) -> None:
        axes.plot(x, points["model_flops_per_s"] / unit.factor, **style)

    ceilings = {}
    for (_, source), cells in data.groupby(["ceiling_flops_per_s", "ceiling_source"]):
        precisions = ", ".join(dict.fromkeys(cells["precision"].dropna()))
        height = float(cells["ceiling_flops_per_s"].iloc[0])
        name = f"{precisions} ceiling, {units.in_unit(height, unit)} {unit.label} ({source})"
        ceilings[name] = height / unit.factor
    return _curves(data, f"{unit.label}, causal attention counts half", draw, ceilings=ceilings)


def memory(records: Sequence[RunRecord], data: pd.DataFrame) -> Figure:
    """Draw peak memory along a length: measured, and (dotted) predicted by the cost model, also if it did not fit.

    The peak of a cell that did not fit is from before it failed, so it is not a point of the curve.
    """
    unit = units.best_unit(units.SCALES["_bytes"], data["peak_allocated_bytes"].dropna().astype(float))

    def draw(axes: Axes, x: list[float], points: pd.DataFrame, style: dict[str, Any]) -> None:
        fits = points["fitted"].notna()
        predicted = points["predicted_peak_bytes"] / unit.factor
        axes.plot(x, points["peak_allocated_bytes"].where(fits) / unit.factor, **style)
        axes.plot(x, predicted, color=style["color"], linestyle=":", linewidth=1.2)
        axes.plot(x, predicted.mask(fits), color=style["color"], linestyle="", marker="x", markersize=8)

    crosses = ", ×: did not fit" if (data["status"] == "oom").any() else ""
    return _curves(data, f"{unit.label} (dotted: predicted{crosses})", draw, failed=True)


def runs_along(data: pd.DataFrame, column: str) -> bool:
    along = _along(data)
    return along is not None and bool(data.loc[data[column].notna(), along].nunique() > 1)


def _along(data: pd.DataFrame) -> str | None:
    """Return the column for the horizontal axis: the first length that varies within one size, else the sizes."""
    sizes = data.groupby("size", dropna=False)
    varied = (name for name in LENGTHS if (sizes[name].nunique() > 1).any())
    return next(varied, "size" if data["size"].nunique() > 1 else None)


def _curves(
    data: pd.DataFrame,
    ylabel: str,
    draw: Draw,
    failed: bool = False,
    ceilings: Mapping[str, float] = MappingProxyType({}),
) -> Figure:
    """Draw a panel for each mode, with a curve for each backend along the length; repeats become their median."""
    from matplotlib.figure import Figure

    along = str(_along(data))
    rows = in_order(data[(data["phase"] == STEP) | (failed & data["phase"].isna())])
    apart, with_it = _apart(rows, along, [name for name in varying(data)[0] if name not in (along, "repeat", "mode")])
    is_ok = rows["status"] == "ok"
    fitted = is_ok.astype(float).where(is_ok)
    rows = rows.assign(curve=labels(rows, apart), mode=rows["mode"].fillna(""), fitted=fitted)
    measured = [*dict.fromkeys(rows.loc[is_ok, "curve"])]
    styles = curve_styles(measured)
    modes = [*dict.fromkeys(rows.loc[is_ok, "mode"])]
    known = [*dict.fromkeys(rows[along].dropna())]
    places = (
        {size: float(i) for i, size in enumerate(known)} if along == "size" else {x: float(x) for x in sorted(known)}
    )
    drawn = Figure(figsize=(WIDTH, 4.2), layout="constrained")
    panels = drawn.subplots(1, len(modes), sharey=True, squeeze=False)[0]
    if _is_tight(places, len(modes)):
        drawn.set_figheight(drawn.get_figheight() + 0.7)
    for axes, mode in zip(panels, modes, strict=True):
        _log_log(axes, _axis_title(along, with_it), places, len(modes))
        if len(modes) > 1:
            axes.set_title(mode, fontsize=10)
        for label, style in styles.items():
            points = rows[(rows["mode"] == mode) & (rows["curve"] == label)].groupby(along)[[*DRAWN]]
            middle = points.median().astype(float).sort_index(key=lambda index: index.map(places))
            draw(axes, [places[x] for x in middle.index], middle, style)
        for (label, height), dashes in zip(ceilings.items(), cycle(("--", "-.", ":"))):
            axes.axhline(height, color=INK, linewidth=1.2, linestyle=dashes, label=label)
    for axes in panels:
        log_scale(axes.yaxis)
    panels[0].set_ylabel(ylabel)
    if unnamed := sum("label" not in style for style in styles.values()):
        panels[0].plot([], [], label=f"{unnamed} more; the table names them", **CROWD)
    return with_legend(drawn, panels[0], along=len(measured) > 1 or bool(ceilings))


def _apart(rows: pd.DataFrame, along: str, names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return (names that distinguish curves, sizes that do not because `along` and the other names determine them)."""
    apart, fixed = [*names], []
    for name in (n for n in reversed(SIZES) if n in apart):  # derived columns are dropped first
        others = [along, "mode", *(n for n in apart if n != name)]
        if (rows.groupby(others, dropna=False)[name].nunique() <= 1).all():
            apart.remove(name)
            fixed.append(name)
    return apart, fixed


def _axis_title(along: str, with_it: Sequence[str]) -> str:
    """Return the axis title with the columns that change along it, except aliases and derived ones."""
    own = {"seq": "sequence length", "seq_len": "sequence length"}.get(along, title(along))
    shown = (*LENGTHS, "context_length") if along == "size" else LENGTHS
    others = [title(name) for name in with_it if name in shown]
    verb = "varies" if len(others) == 1 else "vary"
    return f"{own} ({' and '.join(others)} {verb} too)" if others else own


def _log_log(axes: Axes, title: str, places: Mapping[Any, float], panels: int) -> None:
    """Make both axes logarithmic, except for names, which are evenly spaced."""
    if names := [str(what) for what in places if isinstance(what, str)]:
        turned: dict[str, Any] = {"rotation": 35, "ha": "right"} if _is_tight(places, panels) else {}
        axes.set_xticks([*places.values()], names, **turned)
    else:
        axes.set_xscale("log", base=2)
        axes.set_xticks([*places][:: max(1, len(places) * panels // 9)])
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.minorticks_off()
    axes.set_xlabel(title)
    axes.grid()


def _is_tight(places: Mapping[Any, float], panels: int) -> bool:
    """Return whether names below an axis would touch each other and must be rotated."""
    return panels * sum(len(name) for name in places if isinstance(name, str)) > TICKS_WIDTH


def _steps(data: pd.DataFrame) -> pd.DataFrame:
    return data[data["phase"] == STEP]
