"""The tables of a recording for a person, as wide as the terminal."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence

from cs_systems.record import Row
from cs_systems.report.profile_tables import says_something

Part = tuple[str, list[Row], dict[str, str], list[str]]  # caption, rows, columns with their headings, notes
BESIDE_NAME = 52  # columns of a terminal that the rest of the kernels' table takes


def table_text(
    caption: str, rows: Sequence[Row], titles: Mapping[str, str], notes: Sequence[str], format: str = "terminal"
) -> str:
    """One table in a format of `report.rows.render_rows`; CSV has every column, the others those of `titles`."""
    from cs_systems.report.rows import render_rows

    if format == "csv":
        return render_rows(rows, "csv")
    if not rows:
        rows, titles = [{"": "nothing to show"}], {"": ""}
    seen = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if seen else None
    shown = {c: title for c, title in titles.items() if says_something(c, rows)}
    readable = [{column: row[column] for column in shown} for row in rows]
    if "kernel" in shown:
        from cs_systems.analysis.families import short_name

        room = max(24, (width or 80) - BESIDE_NAME) if format == "terminal" else 200
        readable = [row | {"kernel": _within(short_name(row["kernel"]), room)} for row in readable]
    return render_rows(readable, format, caption, notes, shown, width, color=seen)


def document_text(format: str, heading: Sequence[str], parts: Sequence[Part]) -> list[str]:
    """The tables under the heading: as lines of its own on a terminal, else as notes, which every format escapes."""
    from cs_systems.report.columns import plain
    from cs_systems.report.formats import DEFAULT_WIDTH

    if format == "terminal":
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else DEFAULT_WIDTH
        lines = [plain(heading[0]), *(textwrap.fill(plain(line), width) for line in heading[1:])]
        return ["\n".join(lines) + "\n", *(table_text(*part, format=format) for part in parts)]
    first, *rest = parts
    return [
        table_text(*first[:3], [*heading, *first[3]], format=format),
        *(table_text(*part, format=format) for part in rest),
    ]


def _within(name: str, room: int) -> str:
    """The name with its middle left out where it is too long: what tells kernels apart is at either end."""
    if len(name) <= room:
        return name
    return f"{name[: room // 2]}…{name[-(room - room // 2 - 1) :]}"
