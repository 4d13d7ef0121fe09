"""Kinds of figures and the functions that draw them: KINDS. Called by `plot`, which sets the style."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from statistics import median
from typing import TYPE_CHECKING, Any

from cs_systems.config import Mode
from cs_systems.core import units
from cs_systems.core.collectives import readable_bytes
from cs_systems.core.printable import plain
from cs_systems.record import RunRecord, Sample
from cs_systems.report.collectives import WORKLOAD as COLLECTIVE
from cs_systems.report.figures import collectives, errors, streams
from cs_systems.report.figures.drawing import COLORS, GREY, INK, MARKERS, MOST_CURVES, WIDTH, with_legend
from cs_systems.report.frame import STEP
from cs_systems.report.tables import columns as cols
from cs_systems.report.tables import layout
from cs_systems.report.tables.records import in_order, varying

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Columns that a curve may run along, in order of preference.
LENGTHS = ("seq", "seq_len", "batch", "batch_size", "heads", "d_head")
# Sizes that may change along with it; they do not distinguish curves.
SIZES = (*LENGTHS, "context_length", "heads_kv", "seq_k", "executed_d_head")
# Numbers that a label shows with their name, without which they are ambiguous.
SPOKEN = frozenset({*SIZES, "seed", "repeat"})
MOST_BARS = 32
WRITTEN = 6  # percent: the least segment of a bar that has room for its number
SLOW = 1.2  # a warm-up step this many times slower than usual is labelled with its cause
LOW_CLOCK = 0.95  # of the highest clock seen


@dataclass(frozen=True)
class Kind:
    """Kind of figure; `fits` checks the frame for what `draw` shows; `table` is the results table shown, if any."""

    title: str
    fits: Callable[[pd.DataFrame], bool]
    draw: Callable[[Sequence[RunRecord], pd.DataFrame], Figure]
    table: str | None = None


def phases(records: Sequence[RunRecord], data: pd.DataFrame) -> Figure:
    """Draw step time by phase: a stacked bar per cell, with the wall clock's p10 to p90, or why the cell failed."""
    apart = varying(data)[0]
    cells = in_order(data.drop_duplicates("record")).head(MOST_BARS)
    names = [p for p in cols.phases_of(data) if p != STEP]
    steps = _of_phase(data, STEP, cells)
    unit = units.best_unit(units.SCALES["_s"], steps["median_s"].dropna())
    hidden = data["record"].nunique() - len(cells)
    drawn, axes = _axes(1.3 + 0.3 * len(cells))
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
        said = f"{units.significant(ends[0][y])} {unit.label}" if high == high else _why(cell)
        axes.text((high if high == high else 0) + 0.012 * reach, y, said, va="center", fontsize=9)
    axes.set_yticks(at, _labels(cells, apart))
    axes.set_ylim(len(cells) - 0.4, -0.6)
    axes.set_xlim(0, reach * 1.16)
    more = f"; {hidden} more cells are in the table" if hidden else ""
    axes.set_xlabel(f"{unit.label} (bars: medians of the phases; line: p10 to p90 of the step{more})")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.grid(axis="x")
    return with_legend(drawn, axes)


def families(records: Sequence[RunRecord], data: pd.DataFrame) -> Figure:
    """Draw one stacked bar per profiled cell: the shares of its kernel time by kernel family, with their sum."""
    told = [r.results.get("families", []) for r in records]
    cells = in_order(data.drop_duplicates("record"))
    cells = cells[[bool(told[number]) for number in cells["record"]]].head(MOST_BARS)
    times = [{row["family"]: row["time_s"] for row in told[number]} for number in cells["record"]]
    drawn, axes = _axes(1.3 + 0.3 * len(cells))
    left = [0.0] * len(times)
    shown = dict.fromkeys(name for one in times for name in one)  # each cell's longest first
    for name, color in zip(shown, cycle((*COLORS, GREY, INK))):
        widths = [100 * one.get(name, 0.0) / sum(one.values()) for one in times]
        axes.barh(range(len(times)), widths, left=left, color=color, label=name, height=0.72)
        for y, (start, width) in enumerate(zip(left, widths, strict=True)):
            if width >= WRITTEN:
                axes.text(start + width / 2, y, f"{width:.0f}%", ha="center", va="center", fontsize=8, color="white")
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for y, one in enumerate(times):
        axes.text(101, y, units.human(sum(one.values()), "s"), va="center", fontsize=9)
    axes.set_yticks(range(len(times)), _labels(cells, varying(data)[0]))
    axes.set_ylim(len(times) - 0.4, -0.6)
    axes.set_xlim(0, 112)
    axes.set_xlabel("% of the kernel time of a step, and that time")
    axes.set_xticks(range(0, 101, 20))
    return with_legend(drawn, axes)


def time(records: Sequence[RunRecord], data: pd.DataFrame) -> Figure:
    """Draw step time along a length, log-log, with a p10 to p90 band for each backend."""
    unit = units.best_unit(units.SCALES["_s"], _steps(data)["median_s"].dropna())

    def draw(axes: Axes, x: list[float], points: pd.DataFrame, style: dict[str, Any]) -> None:
        axes.plot(x, points["median_s"] / unit.factor, **style)
        low, high = (points[end] / unit.factor for end in ("p10_s", "p90_s"))
        axes.fill_between(x, low, high, color=style["color"], alpha=0.25, linewidth=0)

    return _curves(data, f"{unit.label} (median, band p10 to p90)", draw)


def rate(records: Sequence[RunRecord], data: pd.DataFrame) -> Figure:
    """Draw credited FLOP/s along a length, under the device's ceiling."""
    unit = units.best_unit(units.SCALES["_flops_per_s"], data["ceiling_flops_per_s"].dropna())

    def draw(axes: Axes, x: list[float], points: pd.DataFrame, style: dict[str, Any]) -> None:
        axes.plot(x, points["model_flops_per_s"] / unit.factor, **style)

    drawn = _curves(data, f"{unit.label}, causal credited half", draw)
    for peak, source in data[["ceiling_flops_per_s", "ceiling_source"]].dropna().drop_duplicates().values.tolist():
        height = peak / unit.factor
        for axes in drawn.axes:
            axes.axhline(height, color=INK, linewidth=1.2, linestyle="--")
        named = f"ceiling {units.significant(height, 4)} {unit.label} ({source})"
        at = (drawn.axes[0].get_yaxis_transform(), (2, -4))
        drawn.axes[0].annotate(named, (0, height), at[1], at[0], "offset points", va="top", fontsize=9)
    return drawn


def memory(records: Sequence[RunRecord], data: pd.DataFrame) -> Figure:
    """Draw peak memory along a length: measured, and (dotted) predicted by the cost model, also where it did not fit.

    A cell that did not fit has a peak from before it failed, which is not a point of the curve.
    """
    unit = units.best_unit(units.SCALES["_bytes"], data["peak_allocated_bytes"].dropna().astype(float))

    def draw(axes: Axes, x: list[float], points: pd.DataFrame, style: dict[str, Any]) -> None:
        fits = points["median_s"].notna()
        predicted = points["predicted_peak_bytes"] / unit.factor
        axes.plot(x, points["peak_allocated_bytes"].where(fits) / unit.factor, **style)
        axes.plot(x, predicted, color=style["color"], linestyle=":", linewidth=1.2)
        axes.plot(x, predicted.mask(fits), color=style["color"], linestyle="", marker="x", markersize=8)

    crosses = ", ×: did not fit" if (data["status"] == "oom").any() else ""
    return _curves(data, f"{unit.label} (dotted: predicted{crosses})", draw, failed=True)


def warmup(records: Sequence[RunRecord], data: pd.DataFrame) -> Figure:
    """Draw every step in order, warm-up included; the slowest at each position is labelled with its causes."""
    measured = [r for r in records if r.is_timing and r.measurement and r.measurement.timed][:MOST_CURVES]
    labels = dict(zip(data["record"], _labels(data, varying(data)[0]), strict=True))
    drawn, axes = _axes(4.2)
    slowest: dict[int, tuple[float, Sample, float | None]] = {}
    for record, color, marker in zip(measured, cycle(COLORS), cycle(MARKERS)):
        assert record.measurement
        taken = record.measurement.samples
        usual = median(record.measurement.durations_s(STEP)) or math.nan
        clock = max((s.sm_clock_hz for s in taken if s.sm_clock_hz), default=None)
        ratios = [s.wall_s / usual for s in taken]
        label = labels[records.index(record)]
        numbers = range(1, len(taken) + 1)
        axes.plot(numbers, ratios, color=color, marker=marker, markersize=4, linewidth=1.2, label=label)
        for number, ratio, sample in zip(numbers, ratios, taken, strict=True):
            if ratio > max(SLOW, slowest.get(number, (0.0,))[0]):
                slowest[number] = (ratio, sample, clock)
    said = ""
    for number, (ratio, sample, clock) in sorted(slowest.items()):
        why = ", ".join(causes(sample, clock)) or "cause not seen"
        if why != said:
            axes.annotate(why, (number, ratio), (8, 0), textcoords="offset points", va="center", fontsize=9)
        said = why
    warm = max(sum(s.warmup for s in r.measurement.samples) for r in measured if r.measurement)
    axes.axvspan(0.5, warm + 0.5, color=GREY, alpha=0.12, linewidth=0, label="warm-up, not counted")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}×")
    axes.set_ylabel("over the timed steps' median")
    axes.set_xlabel("step")
    axes.set_xlim(left=0.5)
    return with_legend(drawn, axes)


def causes(sample: Sample, highest_clock_hz: float | None) -> list[str]:
    """Return the recorded causes of a slow step; empty if none were recorded."""
    found = []
    if sample.compiles or sample.compile_s:
        spent = f" {units.human(sample.compile_s, 's')}" if sample.compile_s else ""
        found.append(f"compiling{spent}")
    if sample.device_mallocs:
        found.append(f"{sample.device_mallocs} cudaMalloc")
    if sample.sm_clock_hz and highest_clock_hz and sample.sm_clock_hz < LOW_CLOCK * highest_clock_hz:
        found.append(f"clock at {units.human(sample.sm_clock_hz, 'hz')}")
    return found


def _measured(data: pd.DataFrame) -> bool:
    return bool(data["median_s"].notna().any())


def _runs_along(data: pd.DataFrame, column: str) -> bool:
    along = _along(data)
    return along is not None and bool(data.loc[data[column].notna(), along].nunique() > 1)


def _has_parts(data: pd.DataFrame) -> bool:
    """Return whether steps have several phases that are not also measured one by one."""
    if data["workload"].iloc[0] == COLLECTIVE:  # only one of its phases is the measurement
        return False
    one_by_one = data["workload"].iloc[0] == "attention" and set(data["mode"]) != {Mode.FORWARD_BACKWARD}
    return not one_by_one and len(cols.phases_of(data)) > 2


def _has_ceiling(data: pd.DataFrame) -> bool:
    return _runs_along(data, "model_flops_per_s") and _runs_along(data, "ceiling_flops_per_s")


def _filled_by(workload: str) -> Callable[[pd.DataFrame], bool]:
    return lambda data: data["workload"].iloc[0] == workload and _measured(data)


def _of(
    drawn_by: Callable[[Sequence[RunRecord]], Figure],
) -> Callable[[Sequence[RunRecord], pd.DataFrame], Figure]:
    """Adapt a figure that needs no frame to the signature of KINDS."""

    def draw(records: Sequence[RunRecord], data: pd.DataFrame) -> Figure:
        return drawn_by(records)

    return draw


KINDS = {
    "collectives": Kind("time and bus bandwidth of a call", _filled_by(COLLECTIVE), _of(collectives.calls)),
    "sums": Kind("error of a sum against its length", _filled_by("accumulation"), _of(errors.sums)),
    "steps": Kind("error by the step in low precision", _filled_by("normalization"), _of(errors.steps)),
    "curves": Kind("loss in training", _filled_by("training_curve"), _of(errors.curves), table="training_curve"),
    "streams": Kind("computing and communication in a step", lambda data: True, _of(streams.streams), table="streams"),
    "families": Kind("kernel time by family", lambda data: True, families, table="families"),
    "phases": Kind("where a step's time goes", _has_parts, phases),
    "rate": Kind("model FLOP/s under the ceiling", _has_ceiling, rate),
    "time": Kind("step time", lambda data: _runs_along(data, "median_s"), time),
    "memory": Kind("peak memory", lambda data: _runs_along(data, "peak_allocated_bytes"), memory),
    "warmup": Kind("every step, warm-up too", _measured, warmup),
}


def _axes(height: float) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(WIDTH, height), layout="constrained")
    return drawn, drawn.add_subplot()


Draw = Callable[["Axes", list[float], "pd.DataFrame", dict[str, Any]], None]


def _curves(data: pd.DataFrame, ylabel: str, draw: Draw, failed: bool = False) -> Figure:
    """Draw a panel for each mode, with a curve for each backend along the length; repeats become their median."""
    from matplotlib.figure import Figure

    along = str(_along(data))
    rows = in_order(data[(data["phase"] == STEP) | (failed & data["phase"].isna())])
    apart, with_it = _apart(rows, along, [name for name in varying(data)[0] if name not in (along, "repeat", "mode")])
    rows = rows.assign(curve=_labels(rows, apart), mode=rows["mode"].fillna(""))
    measured = [*dict.fromkeys(rows.loc[rows["median_s"].notna(), "curve"])]
    looks = dict(zip(measured[:MOST_CURVES], zip(COLORS, MARKERS, strict=True), strict=False))
    modes = [*dict.fromkeys(rows.loc[rows["median_s"].notna(), "mode"])]
    known = [*dict.fromkeys(rows[along].dropna())]
    places = (
        {size: float(i) for i, size in enumerate(known)} if along == "size" else {x: float(x) for x in sorted(known)}
    )
    drawn = Figure(figsize=(WIDTH, 4.2), layout="constrained")
    panels = drawn.subplots(1, len(modes), sharey=True, squeeze=False)[0]
    for axes, mode in zip(panels, modes, strict=True):
        _log_log(axes, _axis_title(along, with_it), places, len(modes))
        if len(modes) > 1:
            axes.set_title(mode, fontsize=10)
        for label, (color, marker) in looks.items():
            points = rows[(rows["mode"] == mode) & (rows["curve"] == label)].groupby(along)
            middle = points.median(numeric_only=True).astype(float).sort_index(key=lambda index: index.map(places))
            draw(axes, [places[x] for x in middle.index], middle, _style(label, color, marker))
    panels[0].set_ylabel(ylabel)
    if hidden := len(measured) - len(looks):
        panels[0].set_xlabel(f"{panels[0].get_xlabel()} ({hidden} more curves are in the table)")
    return with_legend(drawn, panels[0], along=len(looks) > 1)


def _apart(rows: pd.DataFrame, along: str, names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return (names that distinguish curves, names that do not: sizes determined by `along` and the other names)."""
    apart, fixed = [*names], []
    for name in (n for n in reversed(SIZES) if n in apart):  # derived columns are dropped first
        others = [along, "mode", *(n for n in apart if n != name)]
        if (rows.groupby(others, dropna=False)[name].nunique() <= 1).all():
            apart.remove(name)
            fixed.append(name)
    return apart, fixed


def _axis_title(along: str, with_it: Sequence[str]) -> str:
    """Return the axis title with the columns that change along it, except aliases and derived ones."""
    title = {"seq": "sequence length", "seq_len": "sequence length"}.get(along, layout.title(along))
    spoken = (*LENGTHS, "context_length") if along == "size" else LENGTHS
    others = " and ".join(layout.title(name) for name in with_it if name in spoken)
    return f"{title} ({others} with it)" if others else title


def _style(label: str, color: str, marker: str) -> dict[str, Any]:
    return {"label": label, "color": color, "marker": marker}


def _log_log(axes: Axes, title: str, places: Mapping[Any, float], panels: int) -> None:
    """Make both axes logarithmic, except for names, which are evenly spaced."""
    from matplotlib.ticker import LogLocator

    if names := [str(what) for what in places if isinstance(what, str)]:
        axes.set_xticks([*places.values()], names)
    else:
        axes.set_xscale("log", base=2)
        axes.set_xticks([*places][:: max(1, len(places) * panels // 9)])
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.set_xlabel(title)
    axes.grid()


def _along(data: pd.DataFrame) -> str | None:
    """Return the column that a curve runs along: the first length that varies within one size, else the sizes."""
    sizes = data.groupby("size", dropna=False)
    varied = (name for name in LENGTHS if (sizes[name].nunique() > 1).any())
    return next(varied, "size" if data["size"].nunique() > 1 else None)


def _steps(data: pd.DataFrame) -> pd.DataFrame:
    return data[data["phase"] == STEP]


def _of_phase(data: pd.DataFrame, phase: str, cells: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of one phase for each of the cells, empty where a cell has none."""
    return data[data["phase"] == phase].set_index("record").reindex(cells["record"])


def _labels(data: pd.DataFrame, names: Sequence[str]) -> list[str]:
    """Return labels like `small · ctx 256 · naive`; a legend omits labels that start with an underscore."""
    said = (" · ".join(_spoken(n, row[n]) for n in names) for row in data[[*names]].to_dict("records"))
    return [f" {label}" if label.startswith("_") else label for label in said]


def _spoken(name: Any, value: Any) -> str:
    if name == "causal":
        return "causal" if value else "full"
    if name == "size_bytes":
        return readable_bytes(value)
    shown = plain(str(value))
    return f"{layout.title(name)} {shown}" if name in SPOKEN else shown


def _why(cell: dict[Any, Any]) -> str:
    predicted = cell["predicted_peak_bytes"]
    more = f": predicted {units.human(predicted, 'bytes')}" if isinstance(predicted, int | float) else ""
    return f"{cell['status']}{more}"


def subject(data: pd.DataFrame) -> str:
    """Return the subject of a figure: `train_step on NVIDIA H200`."""
    devices = data["device_name"].dropna().unique()
    return plain(f"{data['workload'].iloc[0]}" + (f" on {devices[0]}" if len(devices) == 1 else ""))
