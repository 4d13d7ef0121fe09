"""Layout of a table in a paper, shared by LaTeX and Typst: columns, their widths, the heading and the parts.

A table is as wide as a column of text. Wider tables are shortened or lose columns, as on a narrow terminal; a table
that may not lose a column takes the width of the page. Sizes are in characters of half an em, the width of a digit.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

from cs_systems.report.tables.columns import Column
from cs_systems.report.tables.fitting import (
    NARROW_WIDTH,
    PAPER,
    WRAP_WIDTH,
    Breaks,
    fitting,
    least,
    pieces,
    widths,
    with_short_titles,
)
from cs_systems.report.tables.table import Table

COLUMN = 58  # characters of 8 pt in 3.25 in, a narrow column of the usual classes with two columns
PAGE = 98  # in 5.5 in, the text of a narrow page
SLACK = 2  # characters that a wrapped text gets more, because capitals and signs are wider than digits
MOST_LINES = 48  # lines of one LaTeX float; a page holds more
LINES_OF_FRAME = 5  # lines for rules, and for space around the caption and the notes

NEGATIVE = re.compile(r"(?<![^\s(])-(?=\d)")  # a hyphen before a number, which becomes a minus
Line = tuple[str, ...]


class Part(NamedTuple):
    """Rows and notes of one float; one that holds the last notes alone has no rows."""

    rows: list[Line]
    notes: list[str]


@dataclass(frozen=True)
class PaperTable:
    """Table laid out for a paper.

    Attributes:
        name: Its label without the prefix, such as `train-step`.
        caption: The whole caption.
        numeric: For each column, True if it is aligned right.
        widths_em: For each column, its width if its texts may wrap; None for its natural width.
        head: Lines of the heading.
        parts: The floats; one unless rows and notes are taller than a page.
        spans: True if the table takes the width of the page.
        hidden: Sentence that names the columns left out; "" if there are none.
    """

    name: str
    caption: str
    numeric: tuple[bool, ...]
    widths_em: tuple[float | None, ...]
    head: tuple[Line, ...]
    parts: tuple[Part, ...]
    spans: bool
    hidden: str


def laid_out(tables: Sequence[Table]) -> list[PaperTable]:
    """Return the layout of each table; tables of one name are numbered."""
    made, taken = [], dict[str, int]()
    for table in tables:
        name = label(table.name or table.caption)
        taken[name] = taken.get(name, 0) + 1
        made.append(_laid_out(table, name if taken[name] == 1 else f"{name}-{taken[name]}"))
    return made


def label(text: str) -> str:
    """Return the first words of a text as a label made of letters, digits and hyphens."""
    return "-".join(re.findall(r"[a-z0-9]+", text.lower())[:6]) or "table"


def _laid_out(table: Table, name: str) -> PaperTable:
    form = _chosen(table)
    columns, room = form.columns, form.room
    wrap = WRAP_WIDTH if least(columns, WRAP_WIDTH, form.breaks) <= room else NARROW_WIDTH
    given = widths(columns, max(room, least(columns, wrap, form.breaks)), wrap, form.breaks)
    wraps = [max(map(len, c.cells), default=0) > width for c, width in zip(columns, given, strict=True)]
    head = _head(columns, form.breaks)
    hidden = ", ".join(c.heading for c in form.left_out)
    return PaperTable(
        name=name,
        caption=table.caption,
        numeric=tuple(c.numeric for c in columns),
        widths_em=tuple((width + SLACK) / 2 if wrapped else None for width, wrapped in zip(given, wraps, strict=True)),
        head=head,
        parts=tuple(_parts(form, given, len(head))),
        spans=room > COLUMN,
        hidden=f"hidden columns: {hidden}; {table.remedy}" if hidden else "",
    )


class _Form(NamedTuple):
    """Form of a table that fits `room` characters, with its columns."""

    table: Table
    columns: Sequence[Column]
    left_out: Sequence[Column]
    breaks: Breaks
    room: int

    @property
    def fits(self) -> bool:
        return least(self.columns, NARROW_WIDTH, self.breaks) <= self.room


def _chosen(table: Table) -> _Form:
    """Return the first form that fits: whole, with short headings, with short cells, with fewer columns, page-wide."""
    short = with_short_titles(table)
    shorter = with_short_titles(table.short) if table.short else short
    whole = [_Form(each, each.columns, (), breaks, COLUMN) for each in (table, short, shorter) for breaks in PAPER]
    fewer = _Form(shorter, *fitting(shorter, COLUMN, NARROW_WIDTH, PAPER[-1]), PAPER[-1], COLUMN)
    wide = table.short or table
    pages = [_Form(wide, wide.columns, (), breaks, PAGE) for breaks in PAPER]
    last = _Form(wide, *fitting(wide, PAGE, NARROW_WIDTH, PAPER[-1]), PAPER[-1], PAGE)
    return next((form for form in (*whole, fewer, *pages) if form.fits), last)


def _head(columns: Sequence[Column], breaks: Breaks) -> tuple[Line, ...]:
    """Return the lines of the heading: titles end above the line of the units."""
    titles = [breaks.heading(c.title) for c in columns]
    lines = [*zip_longest(*(reversed(title) for title in titles), fillvalue="")][::-1]
    units = tuple(c.unit for c in columns)
    return (*lines, *([units] if any(units) else []))


def _parts(form: _Form, given: Sequence[int], head: int) -> list[Part]:
    """Return rows and notes as floats, each with as many rows as fit below its caption and heading."""
    rows = [*zip(*(c.cells for c in form.columns), strict=True)]
    room = MOST_LINES - LINES_OF_FRAME - _height(form.table.caption, form.room) - head
    parts, left = [Part([], [])], room
    for row in rows:
        height = max(_height(cell, width) for cell, width in zip(row, given, strict=True))
        if height > left and parts[-1].rows:
            parts.append(Part([], []))
            left = room
        parts[-1].rows.append(row)
        left -= height
    for note in form.table.notes_of(form.columns):
        height = _height(note, form.room)
        if height > left:
            parts.append(Part([], []))
            left = room + head
        parts[-1].notes.append(note)
        left -= height
    return parts


def _height(text: str, width: int) -> int:
    """Return the lines that a text takes."""
    lines, left = 1, width
    for piece in pieces(text):
        if len(piece) > left and left < width:
            lines, left = lines + 1, width
        left -= len(piece) + 1
    return lines
