"""Answer as the first lines of an output, for a terminal, for Markdown and for a page."""

from __future__ import annotations

import textwrap

from cs_systems.analysis.diagnosis import Answer
from cs_systems.core.printable import plain
from cs_systems.report.tables import document
from cs_systems.report.tables.formats import paragraph, text_width

IN = ("terminal", "markdown", "json")  # formats with room for sentences; a page has its own list


def sentences(answer: Answer, opening: str | None = None) -> list[str]:
    """Return the sentences of an answer; empty if there was nothing to judge.

    opening: a sentence about all numbers, which comes first.
    """
    return [plain(sentence) for sentence in [*filter(None, [opening, answer.verdict]), *answer.causes, *answer.others]]


def text(answer: Answer, format: str = "terminal", width: int | None = None, opening: str | None = None) -> str:
    """Return the causes as a numbered list, then the other sentences, with an empty line after them.

    width: columns of the terminal; None means the width of a file or a pipe. opening: a sentence about all numbers,
    which comes first.
    """
    if format == "json":
        return (document.note(opening) if opening else "") + document.answer(answer)
    first = f"{line(opening, format, width)}\n\n" if opening else ""
    lines = [line(answer.verdict, format, width)] if answer.verdict else []
    lines += [line(each, format, width, f"{n}. ") for n, each in enumerate(answer.causes, 1)]
    lines += [line(each, format, width) for each in answer.others]
    return first + ("\n".join(lines) + "\n\n" if lines else "")


def again(answer: Answer, width: int | None = None) -> str:
    """Return the first cause and its remedy once more, for the end of a long output; "" without a cause."""
    if answer.verdict or not answer.causes:
        return ""
    return textwrap.fill(plain(_main_part(answer.causes[0])), text_width(width), break_on_hyphens=False) + "\n"


def _main_part(sentence: str) -> str:
    """Return a sentence up to its first semicolon outside of brackets, behind which the expected gain stands."""
    depth = 0
    for place, letter in enumerate(sentence):
        depth += (letter == "(") - (letter == ")")
        if not depth and sentence.startswith("; ", place):
            return sentence[:place]
    return sentence


def line(sentence: str, format: str, width: int | None, begin: str = "") -> str:
    """Return a sentence for this format, wrapped for a terminal; `begin` stands before its first line only."""
    whole = begin + paragraph(plain(sentence), format).rstrip()
    if format != "terminal":
        return whole
    return textwrap.fill(whole, text_width(width), subsequent_indent=" " * len(begin), break_on_hyphens=False)
