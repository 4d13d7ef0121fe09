"""Figure of a comparison: the ratio of each cell's times, with its interval."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import shorten
from typing import TYPE_CHECKING

from cs_systems.report import palette
from cs_systems.report.figures.drawing import INK, log_scale, one_panel, with_legend

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from cs_systems.analysis.comparison.runs import ComparisonRow

LOOKS = {  # verdict → colour, marker
    "slower": ("vermilion", ">"),
    "faster": ("blue", "<"),
    "no difference": ("grey", "o"),
    "unknown": ("grey", "x"),
}
MOST_ROWS = 80
SEPARATOR = " · "  # of the parts of a description
NAME_WIDTH = 60  # limit of a label's characters


def ratios(rows: Sequence[ComparisonRow]) -> Figure:
    """Draw the ratio of each row with its interval; left of the line at 1, the candidate is faster."""
    shown = rows[:MOST_ROWS]
    drawn, axes = one_panel(1.2 + 0.26 * len(shown))
    axes.axvline(1, color=INK, linewidth=1, linestyle="--")
    for verdict, (hue, marker) in LOOKS.items():
        color = palette.HUES[hue].light
        for place, (y, row) in enumerate((y, row) for y, row in enumerate(shown) if row["verdict"] == verdict):
            low, high = row["ratio_low"], row["ratio_high"]
            if low is not None and high is not None:
                axes.plot([low, high], [y, y], color=color, linewidth=1.6)
            label = None if place else verdict
            axes.plot(row["ratio"], y, color=color, marker=marker, linestyle="", label=label)
    several = len({row["phase"] for row in rows}) > 1
    names = [f"{name} · {row['phase']}" if several else name for name, row in zip(_apart(shown), shown, strict=True)]
    axes.set_yticks(range(len(shown)), [shorten(name, NAME_WIDTH, placeholder=" …") for name in names])
    axes.set_ylim(len(shown) - 0.4, -0.6)
    log_scale(axes.xaxis, "{:g}".format)
    more = f"; {len(rows) - len(shown)} more are in the table" if len(rows) > len(shown) else ""
    axes.set_xlabel(f"candidate over baseline (line: 95% interval{more})", loc="right")
    axes.grid(axis="x")
    return with_legend(drawn, axes)


def _apart(rows: Sequence[ComparisonRow]) -> list[str]:
    """Return the descriptions of the cells without the parts that all share, unless nothing else would be left."""
    parts = [row["cell"].split(SEPARATOR) for row in rows]
    shared = set(parts[0]).intersection(*parts[1:]) if len({row["cell"] for row in rows}) > 1 else set[str]()
    own = [SEPARATOR.join(part for part in of_one if part not in shared) for of_one in parts]
    return [name or row["cell"] for name, row in zip(own, rows, strict=True)]
