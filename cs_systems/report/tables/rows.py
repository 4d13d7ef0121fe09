"""Plain rows (a `results` table, a comparison) in any format: `render_rows(rows, format, caption) -> str`.

The end of a column's name sets its unit: `ratio_low` has none, `a_median_s` gets the most readable one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from cs_systems.config import one_of
from cs_systems.core import units
from cs_systems.record import Row
from cs_systems.report.tables.columns import Column, spans_units, text
from cs_systems.report.tables.formats import FORMATS
from cs_systems.report.tables.table import Table

MEAN_COUNT = "_per_step"  # end of the names of counts that are means over the steps


def render_rows(
    rows: Sequence[Row],
    format: str = "terminal",
    caption: str = "",
    notes: Sequence[str] = (),
    titles: dict[str, str] | None = None,
    width: int | None = None,
    color: bool = False,
    alike: Sequence[str] = (),
    optional: Sequence[str] = (),
    own_units: Sequence[str] = (),
    short: Mapping[str, Mapping[Any, str]] | None = None,
    legends: Mapping[str, str] | None = None,
) -> str:
    """Return the rows as one table with the columns of the first row.

    titles: column → heading, where names are not enough, shown unchanged. alike: columns to compare with each other,
    which share a unit. optional: columns that a narrow terminal may drop, in this order. own_units: columns in which
    each cell has its own unit. short: column → value → the shorter text that is shown; a page keeps the whole one.
    legends: column → its explanation, which is shown below the table where the column is shown.
    """
    write = FORMATS[one_of("format", format, FORMATS)]
    table = table_of(rows, caption, notes, titles, alike, own_units, short, legends)
    return write([replace(table, optional=tuple(optional), remedy="use --format csv")], width, color)


def table_of(
    rows: Sequence[Row],
    caption: str = "",
    notes: Sequence[str] = (),
    titles: dict[str, str] | None = None,
    alike: Sequence[str] = (),
    own_units: Sequence[str] = (),
    short: Mapping[str, Mapping[Any, str]] | None = None,
    legends: Mapping[str, str] | None = None,
) -> Table:
    """Return plain rows as a Table, which every format takes."""
    names = list(rows[0]) if rows else []
    shared = [row[name] for row in rows for name in alike]
    columns = tuple(
        _column(name, (titles or {}).get(name), rows, shared if name in alike else [row[name] for row in rows])
        for name in names
    )
    columns = tuple(_with_own_units(column) if column.name in own_units else column for column in columns)
    columns = tuple(replace(column, legend=(legends or {}).get(column.name, "")) for column in columns)
    if short:
        columns = tuple(_with_short_cells(column, short.get(column.name, {})) for column in columns)
    return Table(caption, columns, tuple(notes), ("ok",) * len(rows))


def _column(name: str, title: str | None, rows: Sequence[Row], scale: Sequence[object]) -> Column:
    """Return one column; `scale` holds the values that set the unit."""
    values = tuple(row[name] for row in rows)
    numbers = [float(v) for v in scale if isinstance(v, int | float) and not isinstance(v, bool)]
    suffix = units.base_suffix(name)
    unit = units.best_unit(units.SCALES[suffix], numbers) if suffix and numbers else None
    if title is None:
        title = name.removesuffix(suffix or "").replace("_", " ") + ("/s" if suffix == "_per_s" else "")
    cells = tuple(text(v, unit) for v in values)
    if name.endswith(MEAN_COUNT) and numbers:
        title, cells = _counted(title, values, cells)
    column = Column(name, title, unit.label if unit else "", cells, values, bool(numbers))
    return _with_own_units(column) if unit and spans_units(unit, numbers) else column


def _counted(title: str, values: Sequence[Any], cells: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """Return the heading and the cells of a count per step: whole numbers, or means, which the heading says."""
    if all(v is None or float(v).is_integer() for v in values):
        return title, tuple(cell if v is None else f"{v:,.0f}" for v, cell in zip(values, cells, strict=True))
    return f"mean {title}", cells


def _with_short_cells(column: Column, short: Mapping[Any, str]) -> Column:
    cells = (short.get(v, cell) for v, cell in zip(column.values, column.cells, strict=True))
    return replace(column, cells=tuple(cells))


def _with_own_units(column: Column) -> Column:
    """Return the column with a unit in each cell: side by side, 512 B and 3 GiB are not `0.000000477 GiB` and `3`."""
    cells = (units.human(v, column.name) if column.numeric and v else text(v, None) for v in column.values)
    return replace(column, unit="", cells=tuple(cells))
