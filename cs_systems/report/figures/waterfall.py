"""Figure of a search by advise: the step, or what else was its goal, after each kept lever, and what was expected."""

from __future__ import annotations

from textwrap import fill
from typing import TYPE_CHECKING

from cs_systems.core import units
from cs_systems.core.printable import plain
from cs_systems.report.advice import WATERFALL, Advice, TrialRow
from cs_systems.report.figures.drawing import COLORS, INK, one_panel, with_legend

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VALUES = {  # goal → column of the number, of the expected one, and the axis
    "time": ("step_s", "expected_s", "step"),
    "memory": ("peak_bytes", "expected_bytes", "peak memory"),
    "energy": ("step_j", None, "energy of a step"),
    "tokens-per-joule": ("tokens_per_j", None, "tokens per joule"),
}
assert VALUES.keys() == WATERFALL.keys()
NAME_WIDTH = 28  # characters of a label in a line
MOST_LINES = 2


def waterfall(advice: Advice) -> Figure:
    """Draw a bar for the start and for each kept lever, with the interval of its gain and the expected number."""
    column, expected, axis = VALUES[advice.goal]
    rows = advice.waterfall
    values = [_number(row, column) or 0.0 for row in rows]
    unit = units.best_unit(units.SCALES[units.base_suffix(column) or "_per_j"], values)
    drawn, axes = one_panel(1.1 + 0.5 * len(rows))
    lengths = [value / unit.factor for value in values]
    axes.barh(range(len(rows)), lengths, color=COLORS[0], height=0.6, label="measured")
    for y, (row, value) in enumerate(zip(rows, values, strict=True)):
        ends = [end / unit.factor for end in _ends(advice.goal, row, value)]
        if ends:
            axes.plot(ends, [y, y], color=INK, linewidth=1.4, label="95% interval of the gain" if y == 1 else None)
        gain = f", {units.significant(row['gain'])} times" if row["gain"] else ""
        hoped = (_number(row, expected) or 0.0) / unit.factor if expected else 0.0
        text, beside = f"{units.human(value, column)}{gain}", max([lengths[y], hoped, *ends])
        axes.annotate(text, (beside, y), (6, 0), textcoords="offset points", va="center")
    if expected and (known := [(y, found) for y, row in enumerate(rows) if (found := _number(row, expected))]):
        at = [found / unit.factor for _, found in known]
        axes.plot(at, [y for y, _ in known], "D", color=COLORS[1], markersize=5, label="expected")
    axes.set_yticks(range(len(rows)), [fill(_name(row), NAME_WIDTH) for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, 1.25 * max(values) / unit.factor)
    axes.set_xlabel(f"{axis}, {unit.label}" if unit.label else axis, loc="right")
    axes.grid(axis="x")
    return with_legend(drawn, axes)


def _number(row: TrialRow, column: str) -> float | None:
    value: float | None = row[column]  # type: ignore[literal-required]
    return value


def _name(row: TrialRow) -> str:
    """Return the options of a lever, or its name where they are many."""
    is_short = row["change"] and len(row["change"]) <= MOST_LINES * NAME_WIDTH
    return plain(row["change"] if is_short else row["lever"].replace("_", " "))


def _ends(goal: str, row: TrialRow, value: float) -> list[float]:
    """Return the ends of a bar that the interval of its gain allows; empty without one."""
    gain, low, high = row["gain"], row["gain_low"], row["gain_high"]
    if not (gain and low and high) or low == high:
        return []
    if goal == "tokens-per-joule":
        return [value * low / gain, value * high / gain]
    return [value * gain / high, value * gain / low]
