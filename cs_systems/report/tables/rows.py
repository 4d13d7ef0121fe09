"""Rows in any format: of a declared table by `render_table`, of any other by `render_rows`.

The end of a column's name sets its unit: `ratio_low` has none, `a_median_s` gets the most readable one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from cs_systems.config import one_of
from cs_systems.core import tables, units
from cs_systems.core.printable import LONGEST_NAME, shortened
from cs_systems.core.tables import Row
from cs_systems.report.frame_cells import FIELD_COLUMNS
from cs_systems.report.tables import document
from cs_systems.report.tables.columns import UNKNOWN, Column, spans_units, text
from cs_systems.report.tables.fitting import WRAP_WIDTH
from cs_systems.report.tables.formats import DEFAULT_WIDTH, FORMATS
from cs_systems.report.tables.table import Table

MEAN_COUNT = "_per_step"  # suffix in names of counts that are means over the steps
NO_DATA = "no data"
# whole numbers that name something, or a size as its option is typed
SIZES = {name for name, each in FIELD_COLUMNS.items() if each.path.startswith(("model.", "shape.")) and name != "calls"}
NAMES = {"step", "at_step", "rank", "stream", "event", "first_event"}
NOT_COUNTED = frozenset({*SIZES, *NAMES, "context", "largest_context", "largest_batch"})
LONGEST_IN_A_FILE = 200  # characters of a name in Markdown
LONGEST_ON_PAPER = 48  # in LaTeX and Typst, where it takes two lines of a table column


def render_rows(
    rows: Sequence[Row],
    format: str = "terminal",
    caption: str = "",
    notes: Sequence[str] = (),
    titles: Mapping[str, str] | None = None,
    width: int | None = None,
    color: bool = False,
) -> str:
    """Return the rows as one table with the columns of the first row.

    titles: column → heading, shown unchanged, for columns with unclear names.
    """
    return _written(plain_table(rows, caption, notes, titles), format, width, color)


def plain_table(
    rows: Sequence[Row], caption: str = "", notes: Sequence[str] = (), titles: Mapping[str, str] | None = None
) -> Table:
    """Return rows of any table as a Table, with the columns of the first row."""
    names = rows[0] if rows else ()
    columns = [_column(name, (titles or {}).get(name, tables.heading(name)), rows) for name in names]
    return Table(caption, tuple(columns), tuple(notes), ("ok",) * len(rows))


def render_table(
    declared: tables.Table[Any],
    rows: Sequence[Row],
    format: str = "terminal",
    notes: Sequence[str] = (),
    width: int | None = None,
    color: bool = False,
    alike: Sequence[str] = (),
    *,
    is_explained: bool = True,
) -> str:
    """Return the rows of a declared table as text: with every column in CSV and JSON, else those worth printing.

    alike: columns to compare with each other, which share a unit. is_explained: whether notes on columns stand below.
    """
    if format == "csv":
        return render_rows(flat(rows), "csv")
    if format == "json":
        return document.table(declared, rows, notes)
    if not rows:
        notes = [*declared.notes, *notes]
        if format == "terminal":
            return render_rows((), format, declared.caption, [NO_DATA, *notes])
        return render_rows([{"": NO_DATA}], format, declared.caption, notes)
    short = {
        name: _shorter(name, rows, _room(format, width, declared.columns[name].beside))
        for name in declared.titles
        if rows and declared.columns[name].beside
    }
    if format in ("terminal", "html"):
        wrapping = [name for name in declared.titles if declared.columns[name].wraps]
        short |= {name: {row[name]: _with_breaks(row[name]) for row in rows} for name in wrapping}
    made = table_of(declared, rows, notes, alike, short)
    if not is_explained:
        made = replace(made, columns=tuple(replace(column, legend="") for column in made.columns))
    return _written(made, format, width, color)


def table_of(
    declared: tables.Table[Any],
    rows: Sequence[Row],
    notes: Sequence[str] = (),
    alike: Sequence[str] = (),
    short: Mapping[str, Mapping[Any, str]] = MappingProxyType({}),
) -> Table:
    """Return the rows of a declared table as a Table, which every format accepts.

    short: column → value → the shorter text that is shown; a page keeps the whole one.
    """
    known, rows = _columns_of(declared, rows), flat(rows)
    shown = {name: one for name, one in known.items() if tells_something(name, rows)}
    shared = [row[name] for row in rows for name in alike if name in shown]
    columns = []
    for name, one in shown.items():
        column = _column(name, one.heading, rows, shared if name in alike else None, one.form)
        if one.own_unit:
            column = _with_own_units(column)
        cells = (short.get(name, {}).get(v, cell) for v, cell in zip(column.values, column.cells, strict=True))
        columns.append(replace(column, legend=one.note, cells=tuple(cells)))
    statuses = tuple(str(row.get("state") or row.get("status") or "ok") for row in rows)
    made = Table(declared.caption, tuple(columns), (*declared.notes, *notes), statuses)
    return replace(made, optional=declared.optional, name=declared.name)


def flat(rows: Sequence[Row]) -> Sequence[Row]:
    """Return the rows with a column for each key of a mapping; None in rows without the key."""
    keys = {name: _keys(name, rows) for name in rows[0] if isinstance(rows[0][name], Mapping)} if rows else {}
    return [_flat(row, keys) for row in rows] if keys else rows


def _flat(row: Row, keys: Mapping[str, Sequence[Any]]) -> Row:
    made = dict[str, Any]()
    for name, value in row.items():
        made |= {f"{key}_{name}": value.get(key) for key in keys[name]} if name in keys else {name: value}
    return made


def _keys(column: str, rows: Sequence[Row]) -> list[Any]:
    return [*dict.fromkeys(key for row in rows for key in row[column])]


def _columns_of(declared: tables.Table[Any], rows: Sequence[Row]) -> dict[str, tables.Column]:
    """Return the printed columns of these rows, flat, with their headings."""
    found = dict[str, tables.Column]()
    for name, title in declared.titles.items():
        column = declared.columns[name]
        if rows and isinstance(rows[0][name], Mapping):
            for key in _keys(name, rows):
                found[f"{key}_{name}"] = replace(column, heading=f"{key:,}" if isinstance(key, int) else key)
        else:
            found[name] = replace(column, heading=title)
    return found


def tells_something(column: str, rows: Sequence[Row]) -> bool:
    """Return whether a column is worth showing: not if all values are unknown, or it only numbers a single device."""
    values = [row[column] for row in rows]
    return any(v not in (None, "", UNKNOWN) for v in values) and not (column == "device" and len({*values}) == 1)


def _room(format: str, width: int | None, beside: int) -> int:
    """Return how many characters a long name may take."""
    rooms = {
        "terminal": max(20, (width or DEFAULT_WIDTH) - beside),
        "html": LONGEST_NAME,
        "latex": LONGEST_ON_PAPER,
        "typst": LONGEST_ON_PAPER,
    }
    return rooms.get(format, LONGEST_IN_A_FILE)


def _shorter(column: str, rows: Sequence[Row], room: int) -> dict[Any, str]:
    from cs_systems.analysis.attribution.kernel_families import short_name, short_scope

    changes: dict[str, Callable[[str], str]] = {"kernel": short_name, "scope": short_scope}
    change = changes.get(column, str)
    given = {row[column]: change(row[column]) for row in rows if row[column] is not None}
    return dict(zip(given, shortened([*given.values()], room), strict=True))


def _with_breaks(text: str) -> str:
    """Return the text with spaces around the + of words that are longer than a narrow column."""
    return " ".join(word.replace("+", " + ") if len(word) > WRAP_WIDTH else word for word in text.split(" "))


def _written(table: Table, format: str, width: int | None, color: bool) -> str:
    return FORMATS[one_of("format", format, FORMATS)]([replace(table, remedy="use --format csv")], width, color)


def _column(
    name: str, title: str, rows: Sequence[Row], scale: Sequence[object] | None = None, form: str = ""
) -> Column:
    """Return one column; `scale` holds the values that set the unit, by default the column's own."""
    values = tuple(row[name] for row in rows)
    if form:
        cells = tuple(UNKNOWN if v is None else format(v, form) for v in values)
        return Column(name, title, "", cells, values, numeric=True)
    numbers = [float(v) for v in scale or values if isinstance(v, int | float) and not isinstance(v, bool)]
    suffix = units.base_suffix(name)
    unit = units.best_unit(units.SCALES[suffix], numbers) if suffix and numbers else None
    cells = tuple(text(v, unit, grouped=name not in NOT_COUNTED) for v in values)
    if name.endswith(MEAN_COUNT) and numbers:
        title, cells = _counted(title, values, cells)
    column = Column(name, title, unit.label if unit else "", cells, values, bool(numbers))
    return _with_own_units(column) if unit and spans_units(unit, numbers) else column


def _counted(title: str, values: Sequence[Any], cells: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """Return heading and cells of a count per step: whole numbers, or means, as the heading then says."""
    if all(v is None or float(v).is_integer() for v in values):
        return title, tuple(cell if v is None else f"{v:,.0f}" for v, cell in zip(values, cells, strict=True))
    return f"mean {title}", cells


def _with_own_units(column: Column) -> Column:
    """Return the column with a unit in each cell, so that 512 B next to 3 GiB is not `0.000000477 GiB`."""
    cells = (units.human(v, column.name) if column.numeric and v else text(v, None) for v in column.values)
    return replace(column, unit="", cells=tuple(cells))
