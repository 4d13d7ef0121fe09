"""Where a command's text goes: to the terminal, as wide as that is, or into a file."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from cs_systems.config import ConfigError

TableFormat = Literal["terminal", "markdown", "latex", "typst", "csv"]
Format = Literal["terminal", "markdown", "latex", "typst", "csv", "html"]


def terminal_width(output: Path | None = None) -> int | None:
    """Columns of the terminal that shows the text, which may be coloured then; None where a pipe or a file takes it."""
    return shutil.get_terminal_size().columns if output is None and sys.stdout.isatty() else None


def deliver(text: str, format: Format, output: Path | None) -> None:
    """Write the text into `output` and say so, or to standard output without one."""
    if output is None:
        sys.stdout.write(text)
        return
    with writing(output):
        output.write_text(text, encoding="utf-8")
    print(f"{format}: {output}", file=sys.stderr)


def deliver_tables(texts: Sequence[str], format: Format, output: Path | None) -> None:
    """As `deliver`, one table after the other. A file of CSV holds one: the next go to FILE-2.csv, FILE-3.csv, …"""
    if output is None or format != "csv":
        deliver("\n".join(texts), format, output)
    else:
        for number, text in enumerate(texts, 1):
            deliver(text, format, output if number == 1 else output.with_stem(f"{output.stem}-{number}"))


def prove_writable(output: Path | None, figure: Path | None = None) -> None:
    """Raise ConfigError for a file that cannot be written, before hours are spent on what it should hold."""
    if figure:
        from cs_systems.report.plot import check_ending

        check_ending(figure)
    for file in filter(None, (output, figure)):
        there = file.exists()
        with writing(file):
            file.open("ab").close()
            if not there:
                file.unlink()


@contextmanager
def writing(file: Path) -> Iterator[None]:
    """Makes the file's folder where it is missing; what cannot be written is malformed input."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        why = f"{error.strerror} ({error.filename})" if error.filename else str(error)
        raise ConfigError(f"cannot write {file}: {why}: name a file in a folder that you may write to") from error
