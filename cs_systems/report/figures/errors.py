"""Figures of low precision, from the tables `accumulation`, `normalization`, `training_curve`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from typing import TYPE_CHECKING

from cs_systems.analysis.comparison.precision import TRAINING_CURVE
from cs_systems.config import Precision, describe
from cs_systems.core.printable import plain
from cs_systems.formulas.rounding import NORMALIZATION, SUMMATION
from cs_systems.record import RunRecord
from cs_systems.report.figures.drawing import COLORS, INK, MARKERS, WIDTH, log_scale, with_legend

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def sums(records: Sequence[RunRecord]) -> Figure:
    """Draw the median relative error of random sums by length, in a panel per dtype, with the roundoff dashed."""
    from matplotlib.figure import Figure

    tables = {r.config["precision"]: rows for r in records if (rows := SUMMATION.of(r.results))}
    drawn = Figure(figsize=(WIDTH, 4.0), layout="constrained")
    panels = drawn.subplots(1, len(tables), sharey=True, squeeze=False)[0]
    methods = dict.fromkeys(row["method"] for rows in tables.values() for row in rows)
    looks = dict(zip(methods, zip(cycle(COLORS), cycle(MARKERS), strict=False), strict=False))
    for axes, (precision, rows) in zip(panels, tables.items(), strict=True):
        for method, (color, marker) in looks.items():
            points = [(row["length"], row["median_relative_error"]) for row in rows if row["method"] == method]
            if points:
                axes.plot(*zip(*points, strict=True), color=color, marker=marker, markersize=4, label=method)
        axes.axhline(rows[0]["unit_roundoff"], color=INK, linewidth=1, linestyle="--", label="unit roundoff")
        axes.set_xscale("log", base=2)
        log_scale(axes.yaxis, "{:g}".format)
        axes.set_xticks([2**k for k in (4, 8, 12, 16)])
        axes.minorticks_off()
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.set_title(precision, fontsize=10)
        axes.set_xlabel("terms")
        axes.grid()
    panels[0].set_ylabel("median relative error")
    return with_legend(drawn, max(panels, key=lambda axes: len(axes.lines)))


# Operation → its hardest case, which the figure of steps shows.
SHOWN_CASES = {"LayerNorm": "mean 16 σ", "RMSNorm": "mean 0", "softmax": "σ 1"}


def steps(records: Sequence[RunRecord]) -> Figure:
    """Draw the error with only one step in low precision, in unit roundoffs, in a panel per operation."""
    from matplotlib.figure import Figure

    tables = {r.config["precision"]: rows for r in records if (rows := NORMALIZATION.of(r.results))}
    rows = next(iter(tables.values()))
    names = {o: [r["step"] for r in rows if (r["operation"], r["case"]) == (o, c)] for o, c in SHOWN_CASES.items()}
    heights = [len(found) + 1 for found in names.values()]
    drawn = Figure(figsize=(WIDTH, 1 + 0.24 * sum(heights)), layout="constrained")
    panels = drawn.subplots(len(names), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    apart = 0.8 / len(tables)
    for axes, (operation, found) in zip(panels, names.items(), strict=True):
        looks = zip(tables.items(), cycle(COLORS), cycle(MARKERS), strict=False)
        for number, ((precision, table), color, marker) in enumerate(looks):
            of_case = [r for r in table if (r["operation"], r["case"]) == (operation, SHOWN_CASES[operation])]
            errors = {r["step"]: r["error"] / r["unit_roundoff"] for r in of_case if r["error"]}
            points = [
                (errors[name], i + (number - (len(tables) - 1) / 2) * apart)
                for i, name in enumerate(found)
                if name in errors
            ]
            style = {"color": color, "marker": marker, "markersize": 5, "linestyle": "", "label": precision}
            axes.plot(*(zip(*points, strict=True) if points else ([], [])), **style)
        axes.axvline(1, color=INK, linewidth=1, linestyle="--")
        axes.set_yticks(range(len(found)), map(plain, found), fontsize=8)
        axes.set_ylim(len(found) - 0.4, -0.6)
        log_scale(axes.xaxis, "{:g}".format)
        axes.set_title(f"{operation}, {SHOWN_CASES[operation]}", fontsize=10, loc="left")
        axes.grid(axis="x")
    panels[-1].set_xlabel("relative error with only this step in low precision, in unit roundoffs (dashed: 1)")
    return with_legend(drawn, panels[0])


def curves(records: Sequence[RunRecord]) -> Figure:
    """Draw the loss of every training step on the same data, with a curve per precision and a panel per model.

    A panel below shows the distance of each curve from fp32's curve, if fp32 was measured.
    """
    from matplotlib.figure import Figure

    cells: dict[str, dict[str, list[float]]] = {}
    for record in records:
        if rows := TRAINING_CURVE.of(record.results):
            cell = describe(replace(record.run_config, workload="train_step"), {"precision", "mode"})
            cells.setdefault(cell, {})[record.config["precision"]] = [row["loss"] for row in rows]
    drawn = Figure(figsize=(WIDTH, 4.4), layout="constrained")
    panels = drawn.subplots(2, len(cells), sharex="col", squeeze=False, height_ratios=(3, 1))
    names = dict.fromkeys(name for curves_of in cells.values() for name in curves_of)
    looks = dict(zip(names, cycle(COLORS), strict=False))
    for (above, below), (cell, found) in zip(panels.T, cells.items(), strict=True):
        baseline = found.get(Precision.FP32.value)
        for name, losses in found.items():
            above.plot(losses, color=looks[name], linewidth=1.2, label=name)
            if baseline and losses is not baseline:
                apart = [abs(a - b) or math.nan for a, b in zip(losses, baseline, strict=False)]
                below.plot(apart, color=looks[name], linewidth=1.2)
        above.set_title(cell, fontsize=10)
        below.set_xlabel("training step")
        log_scale(below.yaxis, "{:g}".format)
        for axes in (above, below):
            axes.grid()
    panels[0][0].set_ylabel("loss")
    panels[1][0].set_ylabel("distance to fp32")
    return with_legend(drawn, max(panels[0], key=lambda axes: len(axes.lines)))
