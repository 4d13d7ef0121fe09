"""Shared drawing helpers of all figures: colours, markers, sizes, panels, scales and the legend."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from textwrap import fill
from typing import TYPE_CHECKING, Any

from cs_systems.core.printable import plain
from cs_systems.report import palette

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

COLORS = tuple(look.color for look in palette.SERIES)

MARKERS = "os^Dv<>P"

GREY = palette.SOFT.light

INK = palette.INK.light

MOST_CURVES = len(COLORS)

WIDTH = 8  # inches, the width of a README

LEGEND_ROW = 0.19  # inches

LEGEND_KEY = 8  # width of the sample of a line or bar with the space around it, in characters

DASHES: tuple[dict[str, Any], ...] = ({}, {"linestyle": "--", "markerfacecolor": palette.PAGE.light})

TEXT_WIDTH = 88  # characters of an axis label that fit the width of a figure

# look of curves without a colour of their own
CROWD: dict[str, Any] = {"color": GREY, "alpha": 0.6, "linewidth": 0.8}


def one_panel(height: float) -> tuple[Figure, Axes]:
    """Return a figure of the shared width with one panel; height in inches."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(WIDTH, height), layout="constrained")
    return drawn, drawn.add_subplot()


def log_scale(axis: Axis, text: Callable[[float], str] = "{:,g}".format) -> None:
    """Make an axis logarithmic, with plain numbers at some ticks and none between them."""
    from matplotlib.ticker import AutoLocator, LogLocator, NullFormatter, NullLocator

    side = "x" if axis is axis.axes.xaxis else "y"
    axis.axes.set(**{f"{side}scale": "log"})
    low, high = getattr(axis.axes.dataLim, f"interval{side}")
    decades = high / low if 0 < low < high < float("inf") else 1.0
    subs = (1.0,) if decades > 200 else (1.0, 2.0, 5.0) if decades > 20 else (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)
    axis.set_major_locator(LogLocator(subs=subs) if decades > 2 else AutoLocator())
    axis.set_major_formatter(lambda value, _: text(value))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())  # the default writes powers of ten in LaTeX


def curve_styles(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the style of each curve: its own colour and marker, while there are enough.

    Beyond that, curves with the same first words in their names share a colour, and differ in dashes and hollow
    markers. The others are grey.
    """
    first = {name: name.partition(" · ")[0] for name in names}
    looks = [{"color": color, "marker": marker} for color, marker in zip(COLORS, MARKERS, strict=True)]
    groups = {word: [name for name in names if first[name] == word] for word in first.values()}
    if len(names) > MOST_CURVES >= len(groups) and max(map(len, groups.values())) <= len(DASHES):
        return {
            name: look | {"label": name} | dash
            for look, group in zip(looks, groups.values(), strict=False)
            for dash, name in zip(DASHES, group, strict=False)
        }
    styles = {name: look | {"label": name} for name, look in zip(names, looks, strict=False)}
    return styles | {name: CROWD | {"zorder": 1.5} for name in names[MOST_CURVES:]}


def wrap_labels(drawn: Figure) -> Figure:
    """Break the labels of axes, and the title, into lines that fit the figure."""
    for axes in drawn.axes:
        spec = axes.get_subplotspec()
        columns = spec.get_gridspec().ncols if spec else 1
        for text in (axes.xaxis.label, axes.title):
            text.set_text(fill(text.get_text(), _room(drawn, float(axes.xaxis.label.get_fontsize())) // columns))
    if title := drawn.get_suptitle():
        drawn.suptitle(fill(title, TEXT_WIDTH), x=0.01, ha="left", fontsize=11)
    return drawn


def _room(drawn: Figure, letters_pt: float) -> int:
    """Return the characters of a line as wide as the figure."""
    return int(TEXT_WIDTH * drawn.get_figwidth() / WIDTH * 10 / letters_pt)


def filled(look: palette.Paint) -> dict[str, Any]:
    """Return the arguments of a bar: its colour, and its hatch in a colour that stands out from it."""
    over = palette.HATCH.light if look.hue in palette.FILLS else palette.PAGE.light
    return {"facecolor": look.color, "hatch": look.hatch, "edgecolor": over, "linewidth": 0}


def on_patch(text: Any) -> None:
    """Draw the text on a patch in the page's colour, so that bars and lines below it do not disturb."""
    text.set_bbox({"facecolor": palette.PAGE.light, "edgecolor": "none", "boxstyle": "round,pad=0.15", "alpha": 0.85})


@contextmanager
def texts_from_outside() -> Iterator[None]:
    """Silence warnings about outside texts with characters missing in the font or too long for the page."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # matplotlib draws a box for it
        warnings.filterwarnings("ignore", "constrained_layout not applied")  # for labels longer than the page
        yield


def plain_lines(text: str) -> str:
    return "\n".join(map(plain, text.split("\n")))


def with_legend(drawn: Figure, axes: Axes, along: bool = True, letters_pt: float = 9) -> Figure:
    """Place the legend below the figure, to keep the figure's width, in as few rows as fit."""
    handles, labels = axes.get_legend_handles_labels()
    labels = [fill(plain_lines(label), _room(drawn, letters_pt) - LEGEND_KEY) for label in labels]
    if along and labels:
        for rows in range(1, len(labels) + 1):
            columns = -(-len(labels) // rows)
            legend = drawn.legend(handles, labels, loc="outside lower left", ncols=columns, fontsize=letters_pt)
            with texts_from_outside():
                fits = legend.get_window_extent().x1 <= drawn.bbox.x1
            if fits or columns == 1:
                break
            legend.remove()
        drawn.set_figheight(drawn.get_figheight() + LEGEND_ROW * max(0, rows - 2))
    return drawn
