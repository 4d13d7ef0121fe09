"""An answer as the first lines of an output, for a terminal, for Markdown and for a page."""

from __future__ import annotations

import textwrap

from cs_systems.analysis.diagnosis import Answer
from cs_systems.core.printable import plain
from cs_systems.report.tables.formats import paragraph, text_width

IN = ("terminal", "markdown")  # formats with room for sentences; a page has its own list


def sentences(answer: Answer, doubt: str | None = None) -> list[str]:
    """Return the sentences of an answer; empty if there was nothing to judge.

    doubt: a sentence about all numbers, which comes first.
    """
    return [plain(sentence) for sentence in ([doubt] if doubt else []) + answer.sentences]


def text(answer: Answer, format: str = "terminal", width: int | None = None, doubt: str | None = None) -> str:
    """Return the sentences as a numbered list, if there are several, with an empty line after it.

    width: columns of the terminal; None means the width of a file or a pipe. doubt: a sentence about all numbers, which
    comes first.
    """
    first = f"{_line('', doubt, format, width)}\n\n" if doubt else ""
    found = answer.sentences
    if not found:
        return first
    is_list = len(answer.diagnoses) > 0
    lines = [_line(f"{n}. " if is_list else "", each, format, width) for n, each in enumerate(found, 1)]
    return first + "\n".join(lines) + "\n\n"


def _line(begin: str, sentence: str, format: str, width: int | None) -> str:
    whole = begin + paragraph(plain(sentence), format).rstrip()
    if format != "terminal":
        return whole
    return textwrap.fill(whole, text_width(width), subsequent_indent=" " * len(begin), break_on_hyphens=False)
