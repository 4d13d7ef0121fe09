"""List of a folder's files and their cells, for a message where a file was expected."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cs_systems.config import ConfigError, describe
from cs_systems.record import read_records


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
    try:
        records, _ = read_records(folder)
        descriptions = {r.key: describe(r.run_config) + (f" · repeat {r.repeat}" if r.repeat else "") for r in records}
    except (FileNotFoundError, ConfigError):  # the file is readable without its records
        return {}
    return {name: descriptions[r.key] for r in records for name in r.artifacts.values()}
