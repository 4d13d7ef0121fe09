"""Table as text, one function per format: `FORMATS[name](tables, width, color) -> str`.

Every cell, heading, caption and note is escaped for its format, because text from records is data.
"""

from __future__ import annotations

import csv
import io
import os
import re
import sys
from collections.abc import Callable, Sequence
from html import escape
from typing import TYPE_CHECKING

from cs_systems.core.diagnostic import NEEDS_GPU
from cs_systems.core.printable import plain, text_cell, visible
from cs_systems.report.tables import document, latex, typst
from cs_systems.report.tables.columns import Column
from cs_systems.report.tables.fitting import (
    GAP,
    NARROW_WIDTH,
    WRAP_WIDTH,
    fitting,
    least,
    widths,
    with_short_code,
    with_short_titles,
)
from cs_systems.report.tables.table import Table

if TYPE_CHECKING:
    from rich.console import Console, JustifyMethod
    from rich.table import Table as RichTable

DEFAULT_WIDTH = 80
_AT_END = re.compile(r"(?: |\x1b\[[0-9;]*m)+$", re.MULTILINE)
STYLES = {"ok": "", "oom": "yellow", "unavailable": "yellow", "missing": "yellow", NEEDS_GPU: "dim"}  # others: red
STYLED = ("note", "status", "state")  # columns with the colour of the row's status


def terminal(tables: Sequence[Table], width: int | None, color: bool) -> str:
    """Format tables for a terminal: the columns that fit, with the caption above and the notes below.

    A table that is too wide is shown in its short form; then columns are dropped in their order. Without a width, as
    for a pipe or a file, every column fits and no cell wraps.
    """
    from rich.text import Text

    out = io.StringIO()
    asked = width or _columns_variable()
    for number, table in enumerate(tables):
        headings = {column.name: column.heading for column in table.columns}
        table = with_short_titles(table)
        whole = least(table.columns, WRAP_WIDTH if asked else sys.maxsize)
        console = _console(out, asked or max(DEFAULT_WIDTH, whole), color)
        if whole > console.width and table.short is not None:
            table = with_short_titles(table.short)
        if least(table.columns) > console.width:
            table = with_short_code(table)
        columns, left_out = fitting(table, console.width)
        if number:
            console.print()
        console.print(Text(table.caption, style="bold"))
        if columns:
            # only the least width for now: the rest may be spare
            wrap = WRAP_WIDTH if least(columns) <= console.width else NARROW_WIDTH
            room = max(
                console.width, least(columns, wrap)
            )  # wider than the terminal if otherwise a number would be cut
            _console(out, room, color).print(_rich(table, columns, widths(columns, room, wrap), ruled=not color))
        if left_out:
            hidden = ", ".join(headings[c.name] for c in left_out)
            console.print(Text(f"hidden columns: {hidden}; widen the terminal or {table.remedy}", style="dim"))
        for note in table.notes_of(columns):
            console.print(Text(note, style="dim"))
    return without_trailing_spaces(out.getvalue())


def text_width(width: int | None) -> int:
    """Return the width for sentences: of the terminal, else from the environment, else 80."""
    return width or _columns_variable() or DEFAULT_WIDTH


def without_trailing_spaces(text: str) -> str:
    """Return the text without trailing spaces in its lines, also where a style ends after them."""
    return _AT_END.sub(lambda found: found[0].replace(" ", ""), text)


def _columns_variable() -> int | None:
    """Return the width in the environment variable COLUMNS; None if it is not set."""
    asked = os.environ.get("COLUMNS", "")
    return int(asked) if asked.isdecimal() and int(asked) else None


def _console(out: io.StringIO, width: int, color: bool) -> Console:
    from rich.console import Console

    # without a height, rich assumes 80 columns for TERM=dumb
    return Console(file=out, width=width, height=25, force_terminal=color, no_color=not color, highlight=False)


def _rich(table: Table, columns: Sequence[Column], widths: Sequence[int], *, ruled: bool) -> RichTable:
    """Return the table for rich; `ruled`: with a line below the headings, which bold headings do not need."""
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    frame, gap = (box.SIMPLE_HEAD, GAP - 1) if ruled else (None, GAP)  # the frame itself adds a space
    rich = RichTable(box=frame, padding=(0, gap, 0, 0), show_edge=False, pad_edge=False)
    for c, width in zip(columns, widths, strict=True):
        heading = Text("\n".join(filter(None, (c.title, c.unit))))
        justify: JustifyMethod = "right" if c.numeric else "left"
        rich.add_column(heading, justify=justify, width=width, no_wrap=c.numeric)
    for line, status in zip(zip(*(c.cells for c in columns), strict=True), table.statuses, strict=True):
        style = STYLES.get(status, "red")
        rich.add_row(*(Text(t, style if c.name in STYLED else "") for c, t in zip(columns, line, strict=True)))
    return rich


def markdown(tables: Sequence[Table], width: int | None, color: bool) -> str:
    """Format tables as GitHub's Markdown."""
    from tabulate import tabulate

    parts = []
    for table in tables:
        body = tabulate(
            [[_markdown(cell) for cell in line] for line in _lines(table)],
            headers=[_markdown(c.heading) for c in table.columns],
            tablefmt="pipe",
            colalign=["right" if c.numeric else "left" for c in table.columns],
            disable_numparse=True,
        )
        parts += [f"**{_markdown(table.caption)}**", body]
        if notes := table.notes_of(table.columns):
            parts.append("\n".join(f"- {_markdown(note)}" for note in notes))
    return "\n\n".join(parts) + "\n"


def comma_separated(tables: Sequence[Table], width: int | None, color: bool) -> str:
    """Format tables as CSV: columns by their own names, full values in base units, unknown empty, no notes.

    A text that a spreadsheet would take for a formula gets an apostrophe in front; numbers stay as they are.
    """
    out = io.StringIO()
    for number, table in enumerate(tables):
        if number:
            out.write("\n")
        writer = csv.writer(out, lineterminator="\n")
        names, columns = [], []
        for c in table.columns:
            phase, dot, name = c.name.rpartition(".")
            is_range = name.startswith("range_")  # backward.range_ms becomes backward.p10_ms and backward.p90_ms
            ends = [phase + dot + name.replace("range", end, 1) for end in ("p10", "p90")] if is_range else [c.name]
            names += ends
            columns += [[_csv(v[i] if isinstance(v, tuple) else v) for v in c.values] for i in range(len(ends))]
        writer.writerow(map(text_cell, names))
        writer.writerows(zip(*columns, strict=True))
    return out.getvalue()


# `pages.tables` adds html: its templates are above this folder.
FORMATS: dict[str, Callable[[Sequence[Table], int | None, bool], str]] = {
    "terminal": terminal,
    "markdown": markdown,
    "latex": latex.latex,
    "typst": typst.typst,
    "csv": comma_separated,
    "json": document.cells,
}


def _lines(table: Table) -> list[tuple[str, ...]]:
    return list(zip(*(c.cells for c in table.columns), strict=True))


def paragraph(text: str, format: str) -> str:
    """Return a sentence outside of the tables, escaped for its format, with its ending.

    In CSV it is a row of its own.
    """
    if format == "csv":
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerow([text_cell(text)])
        return out.getvalue()
    if format == "json":
        return document.note(text)
    if format == "html":
        return f"<p>{escape(plain(text))}</p>\n"
    escaped = {"markdown": _markdown, "latex": latex.escaped, "typst": lambda sentence: f"#{typst.literal(sentence)}"}
    return (escaped[format](plain(text)) if format in escaped else visible(text)) + "\n"


def _csv(value: object) -> object:
    return value if value is None or isinstance(value, int | float) else text_cell(str(value))


def _markdown(text: str) -> str:
    """Escape text for Markdown.

    Underscores inside a word are kept, because they do not mark emphasis. A note that begins like a list item (`- `, `+
    ` or `1. `) is escaped too.
    """
    text = re.sub(r"([\\`*\[\]|~#$])", r"\\\1", text)
    text = re.sub(r"^(\d*)([-+.)])(?=[\s-])", r"\1\\\2", text)
    text = re.sub(r"(?<![0-9A-Za-z])_|_(?![0-9A-Za-z])", r"\\_", text)
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
