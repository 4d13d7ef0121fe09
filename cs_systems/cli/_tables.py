"""Text of the tables of a trace or a snapshot, as wide as the terminal, with a heading, notes and shortened names."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cs_systems.cli._output import Format, terminal_width
from cs_systems.config import ConfigError, one_of
from cs_systems.core.printable import LONGEST_NAME, shortened
from cs_systems.record import Row
from cs_systems.report.tables.profile import OPTIONAL, says_something
from cs_systems.report.tables.snapshot import LEAVES

if TYPE_CHECKING:
    from cs_systems.analysis.diagnosis import Diagnosis

Part = tuple[str, Sequence[Row], dict[str, str], list[str]]  # caption, rows, columns with their headings, notes
SHARES = "of baseline: change relative to the row's own time; of all time: to all kernel time"
COMPARED = tuple(f"{side}_{unit}" for side in ("a", "b", "difference") for unit in ("s", "bytes"))
MOST_REASONS = 5  # unreadable files whose reason is shown
# Width of the other columns of a table with such a column.
BESIDE = {
    "kernel": 52, "range": 55, "annotation": 48, "operator": 60, "caller": 60, "file": 50, "scope": 45, "module": 50,
    "path": 50,
}  # fmt: skip


def chosen_tables(
    given: Sequence[str], known: Collection[str], compares: bool, format: Format, top: int | None
) -> list[str]:
    """Return the tables that --table names, or all. Raises ConfigError if they do not suit --format or --top."""
    tables = [one_of("table of a comparison" if compares else "table", name, known) for name in given or known]
    if format == "csv" and len(tables) != 1:
        raise ConfigError(f"--format csv writes one table; choose one with --table: {', '.join(tables)}")
    if top is not None and top < 1:
        raise ConfigError(f"--top is {top}; it must be at least 1")
    return tables


def check_top(top: int | None, tables: Sequence[str], long: Sequence[str]) -> None:
    """Raise ConfigError for a --top without effect: only the long tables are cut."""
    if top is not None and not {*tables} & {*long}:
        raise ConfigError(
            f"--top shortens only the tables {', '.join(long)}, and not {', '.join(tables)}; leave out --top"
        )


def first_reasons(reasons: Sequence[str]) -> list[str]:
    """Return why files cannot be read, for the first of them, and how many more there are."""
    rest = len(reasons) - MOST_REASONS
    return [
        *reasons[:MOST_REASONS],
        *([f"{rest} more file{'s cannot' if rest > 1 else ' cannot'} be read"] if rest > 0 else []),
    ]


def none_readable(reasons: Sequence[str]) -> str:
    """Return the error for several files none of which can be read, a line each."""
    return "\n  ".join([f"none of the {len(reasons)} files can be read:", *first_reasons(reasons)])


def table_text(
    caption: str,
    rows: Sequence[Row],
    titles: Mapping[str, str],
    notes: Sequence[str],
    format: str = "terminal",
    output: Path | None = None,
) -> str:
    """Return one table in a format of `report.rows.render_rows`; CSV has every column, the others those of `titles`.

    output: the file that the text is for; None for the terminal.
    """
    from cs_systems.report.tables.rows import render_rows

    if format == "csv":
        return render_rows(rows, "csv")
    if not rows and format == "terminal":
        notes = ["no data", *notes]
    elif not rows:
        rows, titles = [{"": "no data"}], {"": ""}
    width = terminal_width(output)
    shown = {c: title for c, title in titles.items() if rows and says_something(c, rows)}
    short: dict[str, dict[Any, str]] = {}
    for column in BESIDE.keys() & shown.keys():
        from cs_systems.analysis.attribution.kernel_families import short_name, short_scope

        rooms = {"terminal": max(20, (width or 80) - BESIDE[column]), "html": LONGEST_NAME}
        shorter: dict[str, Callable[[str], str]] = {"kernel": short_name, "scope": short_scope}
        change = shorter.get(column, str)
        given = {row[column]: change(row[column]) for row in rows if row[column] is not None}
        short[column] = dict(zip(given, shortened([*given.values()], rooms.get(format, 200)), strict=True))
    return render_rows(
        [{column: row[column] for column in shown} for row in rows],
        format,
        caption,
        notes,
        shown,
        width,
        width is not None,
        optional=(*LEAVES, *OPTIONAL),
        own_units=COMPARED,
        short=short,
    )


def difference_part(by: str, rows: Sequence[Row], notes: Sequence[str] = ()) -> Part:
    """Return the rows of `analysis.difference` as a table."""
    titles = {
        by: by, "a_s": "baseline", "b_s": "candidate", "difference_s": "change", "change_share": "of baseline",
        "share": "of all time",
    }  # fmt: skip
    return f"kernel time per step by {by}, candidate compared with baseline", rows, titles, [*notes]


def document_text(
    format: str,
    heading: Sequence[str],
    parts: Sequence[Part],
    output: Path | None,
    found: Sequence[Diagnosis] | None = None,
    doubt: str | None = None,
) -> list[str]:
    """Return the diagnoses, the heading and the tables.

    `doubt` is a line of the heading about all numbers: it comes first, and beside CSV on the standard error.
    On a terminal the heading is printed as lines; in other formats as notes, which every format escapes.
    """
    from cs_systems.core.printable import plain
    from cs_systems.report import diagnoses
    from cs_systems.report.tables.formats import text_width

    begin = ""
    if format in diagnoses.IN:
        begin = diagnoses.text(found, format, terminal_width(output), doubt)
        heading = [sentence for sentence in heading if sentence != doubt]
    elif format == "csv" and doubt:
        print(plain(doubt), file=sys.stderr)
    if format == "terminal":
        width = text_width(terminal_width(output))
        fill = partial(textwrap.fill, width=width, break_on_hyphens=False, break_long_words=False)
        first, *rest = map(plain, heading)
        # In a pipe the first line is whole, so that a program finds the file in it.
        lines = [first if terminal_width(output) is None else fill(first), *map(fill, rest)]
        return [begin + "\n".join(lines) + "\n", *(table_text(*part, format, output) for part in parts)]
    begun, *others = parts
    return [
        begin + table_text(*begun[:3], [*heading, *begun[3]], format, output),
        *(table_text(*part, format, output) for part in others),
    ]
