"""Figures in a paper: as wide as a column, or as a page if panels stand side by side, in small letters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cs_systems.report.figures.drawing import with_legend

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMN_IN, PAGE_IN = 3.25, 6.75
LETTERS_PT = 7.0
LESS_HEIGHT = 0.7  # share of the height on a screen: letters and bars are smaller too


def width_in(drawn: Figure) -> float:
    """Return the width of the figure in a paper: of the page, if panels stand side by side."""
    grids = (spec.get_gridspec() for axes in drawn.axes if (spec := axes.get_subplotspec()))
    return PAGE_IN if any(grid.ncols > 1 for grid in grids) else COLUMN_IN


def on_paper(drawn: Figure) -> Figure:
    """Return the figure at its width in a paper, with its letters, labels and legend in proportion."""
    from matplotlib.lines import Line2D
    from matplotlib.text import Text

    width = width_in(drawn)
    drawn.set_size_inches(width, drawn.get_figheight() * LESS_HEIGHT)
    for legend in drawn.legends:
        legend.remove()
    for axes in drawn.axes:
        for text in axes.findobj(Text):
            text.set_fontsize(LETTERS_PT)
        for line in axes.findobj(Line2D):
            line.set_markersize(line.get_markersize() * LETTERS_PT / 10)
        axes.tick_params(labelsize=LETTERS_PT)
    return with_legend(drawn, drawn.axes[0], letters_pt=LETTERS_PT)
