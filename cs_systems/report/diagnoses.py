"""Diagnoses as the first lines of an output: at most three sentences, for a terminal, for Markdown and for a page."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from cs_systems.core.printable import plain
from cs_systems.diagnosis import MOST, NOTHING, Diagnosis
from cs_systems.report.tables.formats import paragraph, text_width

IN = ("terminal", "markdown")  # formats with room for sentences; a page has its own list


def sentences(found: Sequence[Diagnosis] | None) -> list[str]:
    """Return the sentences of the largest gains, or that there are none; empty if there was nothing to judge."""
    if found is None:
        return []
    return [plain(diagnosis.sentence) for diagnosis in found[:MOST]] or [NOTHING]


def text(found: Sequence[Diagnosis] | None, format: str = "terminal", width: int | None = None) -> str:
    """Return the sentences as a numbered list with an empty line after it.

    width: columns of the terminal; None means the width of a file or a pipe.
    """
    if not found:
        return "".join(f"{sentence}\n\n" for sentence in sentences(found))
    lines = [f"{number}. {paragraph(each, format).rstrip()}" for number, each in enumerate(sentences(found), 1)]
    if format == "terminal":
        lines = [
            textwrap.fill(line, text_width(width), subsequent_indent="   ", break_on_hyphens=False) for line in lines
        ]
    return "\n".join(lines) + "\n\n"
