"""A table of a recording for a person, as wide as the terminal."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence

from cs_systems.record import Row
from cs_systems.report.profile_tables import says_something

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


def _within(name: str, room: int) -> str:
    """The name with its middle left out where it is too long: what tells kernels apart is at either end."""
    if len(name) <= room:
        return name
    return f"{name[: room // 2]}…{name[-(room - room // 2 - 1) :]}"
