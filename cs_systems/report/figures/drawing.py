"""Colours, markers, sizes, panels and the legend that all figures share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cs_systems.report import palette

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = tuple(look.color for look in palette.SERIES)

MARKERS = "os^Dv<>P"

GREY = palette.SOFT.light

INK = palette.INK.light

MOST_CURVES = len(COLORS)

WIDTH = 8  # inches, the width of a README

LEGEND_WIDTH = 120  # characters


def one_panel(height: float) -> tuple[Figure, Axes]:
    """Return a figure of the shared width with one panel; height in inches."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(WIDTH, height), layout="constrained")
    return drawn, drawn.add_subplot()


def filled(look: palette.Paint) -> dict[str, Any]:
    """Return the arguments of a bar: its colour, and its hatch in a colour that stands out from it."""
    over = palette.HATCH.light if look.hue in palette.FILLS else palette.PAGE.light
    return {"facecolor": look.color, "hatch": look.hatch, "edgecolor": over, "linewidth": 0}


def beside(text: Any) -> None:
    """Put the text on a patch of the page's colour, because bars and lines may pass below it."""
    text.set_bbox({"facecolor": palette.PAGE.light, "edgecolor": "none", "boxstyle": "round,pad=0.15", "alpha": 0.85})


def with_legend(drawn: Figure, axes: Axes, along: bool = True) -> Figure:
    """Place the legend below, in rows, because beside the figure it would take its width."""
    handles, labels = axes.get_legend_handles_labels()
    if along and labels:
        columns = max(1, min(len(labels), LEGEND_WIDTH // (max(map(len, labels)) + 6)))
        drawn.legend(handles, labels, loc="outside lower left", ncols=columns, fontsize=9)
    return drawn
