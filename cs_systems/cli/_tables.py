"""Tables of a trace or a snapshot as text: fitted to the terminal, with a heading, notes and shortened names."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cs_systems.cli._options import flag, refuse
from cs_systems.cli._output import RAW, Format, terminal_width
from cs_systems.config import ConfigError, one_of
from cs_systems.core.tables import Row, Table
from cs_systems.report.tables import document

if TYPE_CHECKING:
    from cs_systems.analysis.diagnosis import Answer

All = Annotated[bool, flag("show every table whole, not only a short answer")]
Section = tuple[Table[Any], Sequence[Row], Sequence[str]]  # a table with its rows and the notes below it
SHARES = "of baseline: change relative to the row's own time; of all time: to all kernel time"
MOST_REASONS = 5  # number of unreadable files that are listed with a reason
SHORT = ("terminal", "json")  # formats with a short answer
MOST_TABLES, MOST_ROWS = 3, 5  # for a short answer if no table is marked for it


def chosen_tables(
    given: Sequence[str], known: Collection[str], compares: bool, format: Format, top: int | None
) -> list[str]:
    """Return the tables that --table names, or all tables. Raises ConfigError if they do not suit --format or --top."""
    tables = [one_of("table of a comparison" if compares else "table", name, known) for name in given or known]
    if format == "csv" and len(tables) != 1:
        raise ConfigError(f"--format csv writes one table; choose one with --table: {', '.join(tables)}")
    if top is not None and top < 1:
        raise ConfigError(f"--top is {top}; it must be at least 1")
    return tables


def is_short(args: Any) -> bool:
    """Return whether the short answer is shown: on a terminal and as JSON, unless options ask for more."""
    return bool(args.format in SHORT and not (args.all or args.table or args.top))


def check_all(args: Any) -> None:
    """Raise ConfigError if --all has no effect."""
    if args.all and args.table:
        raise ConfigError("--all shows every table, and --table only some; leave out one of them")
    if args.all and args.format not in SHORT:
        refuse(["all"], f"--format {args.format} shows every table already")


def shortened(sections: Sequence[Section]) -> list[Section]:
    """Return the tables of a short answer, cut to their first rows; if no table is marked for it, the first tables."""
    brief = [
        (table, rows, notes) for table, all_rows, notes in sections if table.brief and (rows := table.brief(all_rows))
    ] or [(table, rows[:MOST_ROWS], notes) for table, rows, notes in sections[:MOST_TABLES]]
    return [(table, rows, [note for note in notes if note.startswith("warning:")]) for table, rows, notes in brief]


def closing(
    sections: Sequence[Section], shown: Sequence[Section], answer: Answer | None, output: Path | None = None
) -> str:
    """Return the end of a short answer: the names of tables that are left out or cut, and the main cause again."""
    from cs_systems.report.diagnoses import again
    from cs_systems.report.tables.formats import text_width

    more = [*_cut(sections, shown)]
    room = terminal_width(output)
    also = f"{_filled(_listed('more with --all, or --table NAME: ', more, room), text_width(room))}\n" if more else ""
    return "\n".join(filter(None, [also, again(answer, room) if answer else ""]))


def _listed(before: str, names: Sequence[str], room: int | None) -> str:
    """Return the words and the names after them: on a terminal one line, with an ellipsis for those without room."""
    most = len(names)
    while room and most > 1 and len(before + ", ".join(_first(names, most))) > room:
        most -= 1
    return before + ", ".join(_first(names, most))


def _first(names: Sequence[str], most: int) -> list[str]:
    return [*names[:most], *["…"] * (most < len(names))]


def _cut(sections: Sequence[Section], shown: Sequence[Section]) -> dict[str, int]:
    """Return the number of rows of each table of which a short answer does not show all."""
    rows = {table.name: len(rows) for table, rows, _ in shown}
    return {table.name: len(whole) for table, whole, _ in sections if len(whole) > rows.get(table.name, 0)}


def check_top(top: int | None, chosen: Sequence[str], tables: Mapping[str, Table[Any]]) -> None:
    """Raise ConfigError if --top has no effect, because it only cuts long tables."""
    long = [name for name, table in tables.items() if table.most]
    if top is not None and not {*chosen} & {*long}:
        raise ConfigError(
            f"--top shortens only the tables {', '.join(long)}, and not {', '.join(chosen)}; leave out --top"
        )


def first_rows(table: Table[Any], rows: Sequence[Row], top: int | None, format: str) -> tuple[Sequence[Row], int]:
    """Return (the rows to show, the number of rows left out): `top` rows of a long table.

    In CSV and JSON all unless --top is given.
    """
    most = top or (None if format in RAW else table.most)
    shown = rows[:most] if table.most else rows
    return shown, len(rows) - len(shown)


def first_reasons(reasons: Sequence[str]) -> list[str]:
    """Return the reasons why the first unreadable files cannot be read, and the number of further ones."""
    rest = len(reasons) - MOST_REASONS
    return [
        *reasons[:MOST_REASONS],
        *([f"{rest} more file{'s cannot' if rest > 1 else ' cannot'} be read"] if rest > 0 else []),
    ]


def none_readable(reasons: Sequence[str]) -> str:
    """Return the error message for several unreadable files, one line per file."""
    return "\n  ".join([f"none of the {len(reasons)} files can be read:", *first_reasons(reasons)])


def table_text(
    table: Table[Any],
    rows: Sequence[Row],
    notes: Sequence[str] = (),
    format: str = "terminal",
    output: Path | None = None,
) -> str:
    """Return the text of one table; CSV has every column, other formats only the printed columns.

    output: the file that the text is for; None for the terminal.
    """
    from cs_systems.report.tables.rows import render_table

    width = terminal_width(output)
    return render_table(table, rows, format, notes, width, width is not None)


def _filled(text: str, width: int) -> str:
    return textwrap.fill(text, width=width, break_on_hyphens=False, break_long_words=False)


def _joined(sentences: Sequence[str], width: int) -> list[str]:
    """Return the sentences wrapped; one that fits after the end of the one before it stands there."""
    made: list[str] = []
    for sentence in sentences:
        beside = _filled(f"{made[-1]} · {sentence}", width) if made else ""
        if made and beside.count("\n") == _filled(made[-1], width).count("\n"):
            made[-1] += f" · {sentence}"
        else:
            made.append(sentence)
    return [_filled(one, width) for one in made]


def document_text(
    format: str,
    heading: Sequence[str],
    sections: Sequence[Section],
    output: Path | None,
    answer: Answer | None = None,
    opening: str | None = None,
) -> list[str]:
    """Return the diagnoses, the heading and the tables.

    `opening` is a sentence about all numbers, or the line of the heading that qualifies them: it comes first, and for
    CSV it goes to standard error. On a terminal the heading is printed as lines; in other formats as notes, which every
    format escapes.
    """
    from cs_systems.analysis.diagnosis import NO_ANSWER
    from cs_systems.core.printable import plain
    from cs_systems.report import diagnoses
    from cs_systems.report.tables.formats import text_width

    begin = ""
    if format in diagnoses.IN:
        begin = diagnoses.text(NO_ANSWER if answer is None else answer, format, terminal_width(output), opening)
        heading = [sentence for sentence in heading if sentence != opening]
    elif format == "csv" and opening:
        print(plain(opening), file=sys.stderr)
    if format == "terminal":
        width = text_width(terminal_width(output))
        fill = partial(_filled, width=width)
        first, *rest = map(plain, heading)
        # In a pipe the first line is not wrapped, so that a program can find the file name in it.
        lines = [first, *map(fill, rest)] if terminal_width(output) is None else _joined([first, *rest], width)
        return [begin + "\n".join(lines) + "\n", *(table_text(*section, format, output) for section in sections)]
    if format == "json":
        return [begin, *(document.note(line) for line in heading), *(table_text(*each, format) for each in sections)]
    (table, rows, notes), *others = sections
    return [
        begin + table_text(replace(table, notes=(*heading, *table.notes)), rows, notes, format, output),
        *(table_text(*section, format, output) for section in others),
    ]


def answer_text(
    args: Any,
    heading: Sequence[str],
    sections: Sequence[Section],
    answer: Answer | None = None,
    opening: str | None = None,
) -> list[str]:
    """Return `document_text`; on a terminal, the short answer unless options ask for more."""
    if not is_short(args):
        return document_text(args.format, heading, sections, args.output, answer, opening)
    shown = shortened(sections)
    text = document_text(args.format, heading, shown, args.output, answer, opening)
    if args.format == "json":
        return [*text, document.more(_cut(sections, shown))]
    text[-1] += closing(sections, shown, answer, args.output)
    return text
