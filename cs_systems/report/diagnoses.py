"""Diagnoses as the first lines of an output: at most three sentences, for a terminal, for Markdown and for a page."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from cs_systems.analysis.diagnosis import MOST, NOTHING, Diagnosis
from cs_systems.core.printable import plain
from cs_systems.report.tables.formats import paragraph, text_width

IN = ("terminal", "markdown")  # formats with room for sentences; a page has its own list


def sentences(found: Sequence[Diagnosis] | None, doubt: str | None = None) -> list[str]:
    """Return the sentences of the largest gains, or that there are none; empty if there was nothing to judge.

    doubt: a sentence about all numbers, which comes first.
    """
    first = [plain(doubt)] if doubt else []
    if found is None:
        return first
    return first + ([plain(diagnosis.sentence) for diagnosis in found[:MOST]] or [NOTHING])


def text(
    found: Sequence[Diagnosis] | None, format: str = "terminal", width: int | None = None, doubt: str | None = None
) -> str:
    """Return the sentences as a numbered list with an empty line after it.

    width: columns of the terminal; None means the width of a file or a pipe. doubt: a sentence about all numbers, which
    comes first.
    """

    def line(begin: str, sentence: str) -> str:
        whole = begin + paragraph(sentence, format).rstrip()
        if format != "terminal":
            return whole
        return textwrap.fill(whole, text_width(width), subsequent_indent=" " * len(begin), break_on_hyphens=False)

    first = f"{line('', doubt)}\n\n" if doubt else ""
    if not found:
        return first + "".join(f"{sentence}\n\n" for sentence in sentences(found))
    return first + "\n".join(line(f"{n}. ", each) for n, each in enumerate(sentences(found), 1)) + "\n\n"
