"""A folder where a file was to be given: which files are in it, and of which cell each is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cs_systems.config import ConfigError, describe
from cs_systems.record import read_records


def choice(folder: Path, files: Sequence[Path]) -> str:
    """One of them a line, each with its cell where the records beside it tell: files are named by the cell's key."""
    cells = _cells(folder)
    return "one of\n" + "\n".join(f"  {file}{cells.get(file.name, '')}" for file in files)


def _cells(folder: Path) -> dict[str, str]:
    """Name of a file → what is said of the cell that left it, in parentheses."""
    try:
        records, _ = read_records(folder)
        told = {r.key: describe(r.run_config) + (f" · repeat {r.repeat}" if r.repeat else "") for r in records}
    except (FileNotFoundError, ConfigError):  # the file can be read all the same
        return {}
    return {name: f" ({told[r.key]})" for r in records for name in r.artifacts.values()}
