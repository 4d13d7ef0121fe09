"""Colours, markers, sizes, panels and the legend that all figures share."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Middle tones stand out on white and on a dark page, and colour-blind eyes can tell them apart; markers differ as well.
COLORS = ("#3b82c4", "#e08a2e", "#2f9e77", "#c0568f", "#8572c9", "#9a8430", "#5aa9b8", "#b5554a")

MARKERS = "os^Dv<>P"

GREY = "#8a8f98"

INK = "#1e2227"

MOST_CURVES = len(COLORS)

WIDTH = 8  # inches, the width of a README

LEGEND_WIDTH = 120  # characters


def one_panel(height: float) -> tuple[Figure, Axes]:
    """Return a figure of the shared width with one panel; height in inches."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(WIDTH, height), layout="constrained")
    return drawn, drawn.add_subplot()


def with_legend(drawn: Figure, axes: Axes, along: bool = True) -> Figure:
    """Place the legend below, in rows, because beside the figure it would take its width."""
    handles, labels = axes.get_legend_handles_labels()
    if along and labels:
        columns = max(1, min(len(labels), LEGEND_WIDTH // (max(map(len, labels)) + 6)))
        drawn.legend(handles, labels, loc="outside lower left", ncols=columns, fontsize=9)
    return drawn
