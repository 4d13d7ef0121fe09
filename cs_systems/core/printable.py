"""Sanitizing of outside text for display.

Names, paths and reasons must not move a terminal's cursor or break a table row.
"""

from __future__ import annotations

import re
import shlex

# A spreadsheet evaluates a cell that begins with one of these, unless it is a number.
FORMULA = re.compile(r"[=@]|[+-](?![\d.,]+(e[+-]?\d+)?%?$|inf$|nan$)", re.IGNORECASE)


def plain(text: str) -> str:
    """Return the text as one line of printable characters, for a table cell, a caption or a note."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def visible(text: str) -> str:
    """Return the text with its lines and spaces kept and other non-printable characters escaped as in Python."""
    return "".join(c if c.isprintable() or c == "\n" else _escaped(c) for c in text)


def command_line(*words: object) -> str:
    """Return a command line to copy into a shell, with words quoted where needed."""
    return " ".join(_quoted(str(word)) for word in words)


def text_cell(text: str) -> str:
    """Return the text as a CSV cell, with an apostrophe before anything that a spreadsheet takes for a formula."""
    shown = plain(text)
    return f"'{shown}" if FORMULA.match(shown) else shown


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()


def _quoted(word: str) -> str:
    if word.isprintable():
        return shlex.quote(word)
    inside = "".join(c if c.isprintable() else _escaped(c) for c in word.replace("\\", "\\\\").replace("'", "\\'"))
    return f"$'{inside}'"
