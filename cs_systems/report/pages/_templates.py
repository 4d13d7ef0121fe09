"""Renderer of the pages' templates: `render(name, values) -> str`, with every value escaped.

jinja2 is imported here, so a command imports this module only when it makes a page.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from cs_systems.core.printable import plain
from cs_systems.core.units import counted
from cs_systems.report import palette
from cs_systems.report.tables.columns import Column
from cs_systems.report.tables.table import Table

FOLDER = Path(__file__).parent
UNUSUAL = re.compile(r"[^\x20-\x7e\n]+")  # also covers characters in foreign names that change the direction of text
HEADING = re.compile(r"<h2>(.*?)</h2>", re.DOTALL)
LEAST_LISTED = 4  # sections of a page with a list of its contents
MOST_UNFILTERED = 10  # rows that are found without a field to filter them
WIDE = 24  # characters of a word that breaks where there is little room
WORD = re.compile(r"[a-z]+(?![\w.]|::)")
OPTION = re.compile(r"(?<![\w/=-])(?:--[a-z][\w-]*|cs-systems\b)")


class Cell(NamedTuple):
    """Cell of a table in a page.

    full: the full text, if `text` is shortened. sort_key: the number by which a numeric column is sorted, or "".
    note: whether the text may wrap.
    """

    numeric: bool
    text: str
    full: str
    sort_key: Any
    note: bool = False

    @property
    def is_wide(self) -> bool:
        """Return whether a word of the text is too long for a phone or a printed page."""
        return max(map(len, self.text.split()), default=0) > WIDE


class Section(NamedTuple):
    """Section of a page: a table with its notes."""

    heading: str
    id: str
    table: Table
    notes: Sequence[str]


def render(template: str, values: Mapping[str, Any]) -> str:
    """Render a template of this folder as one page that fetches nothing.

    All values are escaped, except `Markup`. Characters that are not printable become spaces.
    """
    text = _with_contents(_environment().get_template(template).render(values))
    return UNUSUAL.sub(lambda found: "".join(c if c.isprintable() else " " for c in found[0]), text)


def _with_contents(page: str) -> str:
    """Return a page with an anchor for each section, `#section-NAME`, and a list of them if they are many."""
    if "<body>" not in page:
        return page  # a part of a page
    known = dict[str, str]()  # anchor → heading, as escaped HTML

    def anchored(found: re.Match[str]) -> str:
        stem = "section-" + "-".join(re.findall(r"[a-z0-9]+", re.sub(r"&[#\w]+;", "", found[1].lower())))
        name = next(name for n in count(1) if (name := stem if n == 1 else f"{stem}-{n}") not in known)
        known[name] = found[1]
        return f'<h2 id="{name}">{found[1]}</h2>'

    page = HEADING.sub(anchored, page)
    if len(known) < LEAST_LISTED:
        return page
    listed = "".join(f'<li><a href="#{name}">{heading}</a></li>' for name, heading in known.items())
    contents = f'<details class="contents"><summary>Contents</summary><ul>{listed}</ul></details>'
    return page.replace("<main>", f"{contents}\n<main>", 1)


@cache
def _environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    # tojson escapes <, >, & and ', so data ends no script whatever its strings contain.
    made.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    made.filters |= {
        "plain": plain,
        "prose": _prose,
        "capital": _capital,
        "counted": counted,
        "rows": _rows,
        "note_first": _note_first,
    }
    made.globals["source"] = lambda name: Markup((FOLDER / name).read_text(encoding="utf-8"))
    made.globals["most_unfiltered"] = MOST_UNFILTERED
    made.globals["palette"] = lambda: Markup(palette.css())
    return made


def _prose(text: str) -> Markup:
    """Return a sentence as HTML in which command-line options and program names do not break at hyphens."""
    return Markup(OPTION.sub(r'<span class="option">\g<0></span>', str(escape(plain(text)))))


def _capital(heading: str) -> str:
    """Return a heading that begins with a capital letter, unless its first word is a name such as `train_step`."""
    return heading[:1].upper() + heading[1:] if WORD.match(heading) else heading


def _note_first(table: Table) -> Table:
    """Return the table with its note, which stays in view at the left edge, as the first column."""
    return replace(table, columns=tuple(sorted(table.columns, key=lambda column: column.name != "note")))


def _rows(table: Table) -> Iterator[tuple[str, list[Cell]]]:
    """Yield the status and the cells of each row."""
    lines = zip(*(zip(c.cells, c.values, strict=True) for c in table.columns), strict=True)
    for status, line in zip(table.statuses, lines, strict=True):
        yield status, [_cell(column, *shown) for column, shown in zip(table.columns, line, strict=True)]


def _cell(column: Column, text: str, value: Any) -> Cell:
    if column.numeric:
        number = value[0] if isinstance(value, tuple) else value
        return Cell(True, text, "", "" if number is None else number)
    full = plain(str(value or ""))
    return Cell(False, text, "" if full == text else full, None, column.name == "note")
