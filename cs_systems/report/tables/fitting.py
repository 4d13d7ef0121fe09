"""Columns of a table that fit a width in characters, of a terminal or of a page in a paper, and each column's width."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from cs_systems.core.printable import shortened
from cs_systems.report.tables.columns import SHORT, Column
from cs_systems.report.tables.table import Table

WRAP_WIDTH = 22  # text columns may wrap down to this width
NARROW_WIDTH = 10  # used if the columns do not fit otherwise
GAP = 2  # characters between two columns
CODE_WIDTH = 28  # of a name of the user's own code, on a terminal that is too narrow for whole names
_OF_A_MODULE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
LONG_WORD = 12  # longest word that is not broken on paper, in characters
_PIECE = re.compile(rf"[^_./:,;<>()=+-]{{1,{LONG_WORD}}}[_./:,;<>()=+-]*|[_./:,;<>()=+-]+")


def pieces(text: str) -> list[str]:
    """Return the pieces of a text that stay whole on paper: words, and parts of long words such as paths."""
    words = text.split()
    return [piece for word in words for piece in (_PIECE.findall(word) if len(word) > LONG_WORD else [word])]


def in_lines(text: str, most: int) -> list[str]:
    """Return the text broken between words into at most this many lines, with the longest line as short as possible."""
    for width in range(max(map(len, text.split()), default=1), len(text) + 1):
        lines = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
        if len(lines) <= most:
            return lines
    return [text]


@dataclass(frozen=True)
class Breaks:
    """Functions that split a heading into lines, and a text into the parts between which a line may end."""

    heading: Callable[[str], list[str]]
    text: Callable[[str], list[str]]


TERMINAL = Breaks(heading=lambda title: [title], text=str.split)
PAPER = tuple(Breaks(partial(in_lines, most=most), pieces) for most in (2, 3))  # preferred first


def fitting(
    table: Table, width: int, wrap: int = WRAP_WIDTH, breaks: Breaks = TERMINAL
) -> tuple[list[Column], list[Column]]:
    """Return (columns that fit, columns left out); optional columns are dropped in their order."""
    columns, left_out = list(table.columns), []
    for name in table.optional:
        if least(columns, wrap, breaks) <= width:
            break
        left_out += [c for c in columns if c.name == name]
        columns = [c for c in columns if c.name != name]
    return columns, left_out


def with_short_code(table: Table) -> Table:
    """Return the table with the names of the user's own code, `path.py:name` or `module:name`, cut in their middle."""
    texts = dict.fromkeys(text for c in table.columns for text in (c.title, *c.cells))
    codes = [text for text in texts if (".py:" in text and " " not in text) or _OF_A_MODULE.fullmatch(text)]
    short = dict(zip(codes, shortened(codes, CODE_WIDTH), strict=True))
    columns = [
        replace(c, title=short.get(c.title, c.title), cells=tuple(short.get(cell, cell) for cell in c.cells))
        for c in table.columns
    ]
    return replace(table, columns=tuple(columns)) if short else table


def least(columns: Sequence[Column], wrap: int = WRAP_WIDTH, breaks: Breaks = TERMINAL) -> int:
    """Return the least width of a table of these columns."""
    return sum(_width(c, wrap, breaks) for c in columns) + GAP * (len(columns) - 1)


def widths(columns: Sequence[Column], room: int, wrap: int, breaks: Breaks = TERMINAL) -> list[int]:
    """Return the widths of the columns: the least ones, plus what the first long texts can use."""
    spare, found = room - least(columns, wrap, breaks), []
    for column in columns:
        narrow = _width(column, wrap, breaks)
        more = min(spare, max(map(len, _texts(column, breaks))) - narrow)
        spare -= more
        found.append(narrow + more)
    return found


def with_short_titles(table: Table) -> Table:
    """Return the table with shorter headings for times of phases; a column of optimizers' names keeps its own."""
    columns = (replace(c, title=SHORT.get(c.title, c.title)) if c.numeric else c for c in table.columns)
    return replace(table, columns=tuple(columns))


def _texts(column: Column, breaks: Breaks) -> tuple[str, ...]:
    return (*breaks.heading(column.title), column.unit, *column.cells)


def _width(column: Column, wrap: int, breaks: Breaks) -> int:
    """Return the least width of a column: numbers and names are never cut, long texts may wrap between words."""
    texts = _texts(column, breaks)
    longest = max(map(len, texts))
    if column.numeric:
        return longest
    return min(longest, max(wrap, *(len(word) for text in texts for word in breaks.text(text))))
