"""Sanitizer of outside text for display.

Names, paths and reasons must not move a terminal's cursor or break a table row.
"""

from __future__ import annotations

import codecs
import json
import re
import shlex
from collections.abc import Sequence
from itertools import groupby, takewhile
from typing import IO

# A spreadsheet evaluates a cell that begins with one of these, unless it is a number.
FORMULA = re.compile(r"[=@]|[+-](?![\d.,]+(e[+-]?\d+)?%?$|inf$|nan$)", re.IGNORECASE)
INDENT = "· "  # indentation per level of a tree
LABEL_WIDTH = 9  # width of `report:  `, before a path or a command
LONGEST_NAME = 60  # longest name on a page, in characters; names of AMD's matrix products have 500

LEGIBLE = "cs_systems.legible"  # error handler of streams with an encoding that lacks characters, as ASCII does
# replacements of one character each, for columns of a table
_ASCII = {
    **dict.fromkeys("─━–—−·", "-"),
    **dict.fromkeys("│┃", "|"),
    **dict.fromkeys("┌┐└┘├┤┬┴┼╭╮╰╯", "+"),
    **dict.fromkeys("‘’", "'"),
    **dict.fromkeys("“”", '"'),
    **dict(zip("×µ⁰²³αβσθ", "xu023abst", strict=True)),
    **dict(zip("→≤≥≠∞°", ("->", "<=", ">=", "!=", "inf", "deg "), strict=True)),
}


def legible(error: UnicodeError) -> tuple[str, int]:
    """Replace the characters that an encoding lacks by similar ones of ASCII, and escape others as JSON does."""
    assert isinstance(error, UnicodeEncodeError)
    text, range_ = error.object, range(error.start, error.end)
    return "".join(
        _ellipsis(text, i) if text[i] == "…" else _ASCII.get(text[i]) or _json(text[i]) for i in range_
    ), error.end


def encodable(text: str, stream: IO[str]) -> str:
    """Return the text with characters that the stream's encoding lacks replaced by similar ones."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, LEGIBLE).decode(encoding)


def _ellipsis(text: str, index: int) -> str:
    """Return three dots before punctuation, else the single ellipsis character, for shortened text."""
    return "..." if text[index + 1 : index + 2] in [*",.;:)]'"] else "~"


def _json(character: str) -> str:
    return json.dumps(character)[1:-1]


codecs.register_error(LEGIBLE, legible)


def plain(text: str) -> str:
    """Return the text as one line of printable characters, for a table cell, a caption or a note."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def visible(text: str) -> str:
    """Return the text with its lines and spaces kept and other non-printable characters escaped as in Python."""
    return "".join(c if c.isprintable() or c == "\n" else _escaped(c) for c in text)


def command_line(*words: object) -> str:
    """Return a command line to copy into a shell, with words quoted where needed."""
    return " ".join(_quoted(str(word)) for word in words)


def labelled_command(label: str, words: Sequence[object], width: int) -> str:
    """Return a label and a command line, broken by backslashes before words that would end beyond the width.

    The lines can be copied into a shell. A word that is too long stays whole, and an option next to its value.
    """
    parts = list[str]()
    for word in map(str, words):
        if parts and parts[-1].startswith("--") and not word.startswith("--"):
            parts[-1] += f" {_quoted(word)}"
        else:
            parts.append(_quoted(word))
    lines = [f"{label:<{LABEL_WIDTH}}{parts[0]}"]
    for number, part in enumerate(parts[1:], 2):
        backslash = 2 * (number < len(parts))
        if len(lines[-1]) + 1 + len(part) + backslash <= width:
            lines[-1] += f" {part}"
        else:
            lines[-1] += " \\"
            lines.append(f"{' ' * (LABEL_WIDTH + 2)}{part}")
    return "\n".join(lines)


def text_cell(text: str) -> str:
    """Return the text as a CSV cell, with an apostrophe before anything that a spreadsheet takes for a formula."""
    shown = plain(text)
    return f"'{shown}" if FORMULA.match(shown) else shown


def shortened(names: Sequence[str], room: int) -> list[str]:
    """Shorten names to at most `room` characters; names that would look alike keep the part in which they differ.

    If that part is too long, each gets a number at its end.
    """
    texts = {name: within(name, room) for name in names}
    alike: dict[str, list[str]] = {}
    for name, text in texts.items():
        alike.setdefault(text, []).append(name)
    for group in (found for found in alike.values() if len(found) > 1):
        begin = _alike(group)
        end = _alike([name[begin:][::-1] for name in group])
        own = {name: name[begin : len(name) - end] for name in group}
        rest = room - max(map(len, own.values())) - 2
        if rest < 2:
            numbers = {name: f" ({number})" for number, name in enumerate(group, 1)}
            texts |= {name: within(name, room - len(number)) + number for name, number in numbers.items()}
            continue
        first, last = min(rest // 2, begin), min(rest - rest // 2, end)
        texts |= {name: f"{name[:first]}…{part}…{name[len(name) - last :]}" for name, part in own.items()}
    return [texts[name] for name in names]


def within(name: str, room: int) -> str:
    """Shorten a name that is too long in its middle, because both ends distinguish kernels."""
    if len(name) <= room:
        return name
    return f"{name[: room // 2]}…{name[-(room - room // 2 - 1) :]}"


def _alike(names: Sequence[str]) -> int:
    """Return the length of the names' common prefix."""
    return sum(1 for _ in takewhile(lambda characters: len({*characters}) == 1, zip(*names, strict=False)))


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()


def _quoted(word: str) -> str:
    if word.isprintable():
        return shlex.quote(word)
    inside = "".join(c if c.isprintable() else _escaped(c) for c in word.replace("\\", "\\\\").replace("'", "\\'"))
    return f"$'{inside}'"


def spans(names: Sequence[str]) -> str:
    """Join names, with ranges of consecutive blocks: `block 0 … block 3, block 5, lm_head`."""
    blocks = sorted(int(found[1]) for name in names if (found := re.fullmatch(r"block (\d+)", name)))
    runs = [[n for _, n in run] for _, run in groupby(enumerate(blocks), key=lambda pair: pair[1] - pair[0])]
    blocks_text = [f"block {run[0]}" + (f" … block {run[-1]}" if run[1:] else "") for run in runs]
    return ", ".join([*blocks_text, *(name for name in names if not re.fullmatch(r"block \d+", name))])
