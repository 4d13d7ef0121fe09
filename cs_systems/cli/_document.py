"""Output of a command with --format json: one document, however the command prints.

While the command runs, its tables and answers are collected as pieces. What it prints goes to standard error, because
standard output has the document alone; its sentences also become notes. The document is written when the command ends.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import IO, Annotated, Any

from tyro.conf import arg

from cs_systems.cli._options import Names, one_name
from cs_systems.core.printable import visible
from cs_systems.report.files import standard_output
from cs_systems.report.tables import document

PRINTED_FORMATS = ("terminal", "json")
PrintedFormat = Annotated[
    str, one_name("format", PRINTED_FORMATS), arg(help="json: one document, with the sentences on standard error")
]
MoreColumns = Annotated[
    Names, arg(help="columns of `report` to add to the table, such as mean std", help_behavior_hint="")
]


@dataclass
class _Document:
    """Pieces of the document of the command that runs."""

    pieces: list[str] = field(default_factory=list)
    is_short: bool = False  # whether it is cut to the length of a short answer
    is_elsewhere: bool = False  # whether it is in a file, or another process writes it


_current: ContextVar[_Document | None] = ContextVar("document", default=None)


@contextmanager
def printing(args: Any) -> Iterator[None]:
    """Run a command with these arguments; with --format json, write its document at the end, unless it failed."""
    if getattr(args, "format", None) != "json":
        reset = _current.set(None)  # a command may run others, which print text
        try:
            yield
        finally:
            _current.reset(reset)
        return
    made, said = _Document(), _Said(sys.stderr)
    reset = _current.set(made)
    try:
        with redirect_stdout(said):
            yield
    finally:
        _current.reset(reset)
    if made.is_elsewhere:
        return
    made.pieces += map(document.note, said.sentences)
    if made.is_short or not made.pieces:
        made.pieces.append(document.more({}))
    with standard_output():
        sys.stdout.write(document.document("".join(made.pieces)))


class _Said(io.StringIO):
    """Standard output of a command that writes a document: each text also goes to standard error."""

    def __init__(self, stream: IO[str]) -> None:
        super().__init__()
        self._stream, self.sentences = stream, list[str]()

    def write(self, text: str) -> int:
        self._stream.write(text)
        self._stream.flush()
        if sentence := " ".join(text.replace("\\\n", " ").split()):  # unwrapped; print writes the line break apart
            self.sentences.append(sentence)
        return len(text)


def is_wanted() -> bool:
    """Return whether the command that runs writes a document."""
    return _current.get() is not None


def add(pieces: str) -> bool:
    """Add pieces to the document, as part of a short answer; return False if the command writes text."""
    made = _current.get()
    if made is not None:
        made.pieces.append(pieces)
        made.is_short = True
    return made is not None


def add_whole(pieces: str) -> bool:
    """Add pieces that are a short answer, or whole, as they are; return False if no document is collected."""
    made = _current.get()
    if made is not None:
        made.pieces.append(pieces)
    return made is not None


def leave_elsewhere() -> None:
    """Write no document to standard output, because it is in a file, or because another process writes it."""
    if (made := _current.get()) is not None:
        made.is_elsewhere = True


def failed(message: str, status: int) -> int:
    """Print why the command failed on standard error, and as its document; return the exit status."""
    print(visible(f"cs-systems: {message}"), file=sys.stderr)
    add(document.failure(message, status))
    return status
