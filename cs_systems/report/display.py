"""Tables of records and configurations at a Python prompt and in a notebook, as text and as HTML."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from typing import Any

from cs_systems.config import RunConfig, describe
from cs_systems.core.printable import visible
from cs_systems.core.units import counted
from cs_systems.record import Row, RunRecord
from cs_systems.report.tables import records
from cs_systems.report.tables.columns import title
from cs_systems.report.tables.formats import terminal
from cs_systems.report.tables.rows import plain_table
from cs_systems.report.tables.table import Table

MOST_CELLS = 20  # number of cells of a grid that are shown, so that they fit a screen


def as_text(heading: str, shown: Sequence[RunRecord] | Sequence[RunConfig]) -> str:
    """Return the heading and the tables, without a newline at the end."""
    tables, problem = _tables(shown)
    text = terminal(tables, shutil.get_terminal_size().columns, color=False)
    return "\n".join(filter(None, [heading, visible(problem), text])).rstrip("\n")


def as_html(heading: str, shown: Sequence[RunRecord] | Sequence[RunConfig]) -> str:
    """Return the heading and the tables as a part of a page, with every text escaped."""
    from cs_systems.report.pages._templates import render

    tables, problem = _tables(shown)
    return render("notebook.html.jinja", {"heading": heading, "problem": problem, "tables": tables})


def _tables(shown: Sequence[Any]) -> tuple[list[Table], str]:
    """Return the tables, or the reason why there are none, because showing an object must not fail."""
    if not shown:
        return [], ""
    if isinstance(shown[0], RunConfig):
        return [_table_of_cells(shown)], ""
    try:
        return records.tables(shown), ""
    except Exception as error:  # a record from a file may hold anything
        return [], f"no table: {type(error).__name__}: {error}"


def _table_of_cells(cells: Sequence[RunConfig]) -> Table:
    """Return a table of the fields that vary; fields with one value for all cells are in its caption."""
    rows = [_fields(cell) for cell in cells]
    apart = [name for name in rows[0] if any(row.get(name) != rows[0].get(name) for row in rows)]
    silent = {*apart, *(f"{part}.{name}" for part in ("model", "shape") for name in apart)}
    if "size" in apart:
        silent |= {f"model.{name}" for cell in cells for name in ("name", *cell.model.changed())}
    lines = [{name: row.get(name) for name in apart} or {"cell": describe(cells[0])} for row in rows[:MOST_CELLS]]
    common = describe(cells[0], silent) if apart else ""
    notes = [f"and {len(cells) - MOST_CELLS} more cells"] if len(cells) > MOST_CELLS else []
    caption = "; constant: ".join(filter(None, [counted(len(cells), "cell"), common]))
    return plain_table(lines, caption, notes, {name: title(name) for name in apart})


def _fields(cell: RunConfig) -> Row:
    """Return the fields of a cell in one row, under their names in tables."""
    run = {f.name: getattr(cell, f.name) for f in dataclasses.fields(cell) if f.name not in ("model", "shape")}
    shape = dataclasses.asdict(cell.shape) if cell.shape else {}
    words = {name: " ".join(value) if isinstance(value, tuple) else value for name, value in run.items()}
    return {"size": cell.model.label, "context_length": cell.model.context_length, **shape, **words}
