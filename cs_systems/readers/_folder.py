"""List of a folder's files and their cells, for a message where a file was expected."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cs_systems.config import describe
from cs_systems.record import RunRecord, recorded_files


def choice(folder: Path, files: Sequence[Path]) -> str:
    """Return "one of" and the files, one a line, each with its cell if the records beside it are readable.

    Files are named by the cell's key.
    """
    cells = cells_of(folder)
    return "one of\n" + "\n".join(f"  {file}{_parenthesized(cells.get(file.name))}" for file in files)


def _parenthesized(cell: str | None) -> str:
    return f" ({cell})" if cell else ""


def cells_of(folder: Path) -> dict[str, str]:
    """Return a map from a file's name to the description of the cell that wrote it."""
    return {name: _described(record) for name, record in recorded_files(folder).items()}


def _described(record: RunRecord) -> str:
    return describe(record.run_config) + (f" · repeat {record.repeat}" if record.repeat else "")
