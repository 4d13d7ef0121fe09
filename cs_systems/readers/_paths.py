"""Check of the path given to a reader; for a folder, the error message lists its files and their cells."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cs_systems.config import ConfigError, describe
from cs_systems.core.formats import refuse_other

if TYPE_CHECKING:
    from cs_systems.record import RunRecord


def check_file(path: Path, what: str, suffixes: tuple[str, ...], command: str | None = None) -> None:
    """Raise ConfigError unless the path is a plain, non-empty file; for a folder, the message names the files in it."""
    give = f"a {what} file"
    if path.is_dir():
        inside = sorted(file for file in path.iterdir() if file.name.endswith(suffixes))
        if command and not inside:
            refuse_other(path, command)
        raise ConfigError(f"{path} is a folder; give {_choice(path, inside) if inside else give}")
    if not path.is_file():
        raise ConfigError(f"{path} {'is not a plain file' if path.exists() else 'does not exist'}; give {give}")
    if not path.stat().st_size:
        raise ConfigError(f"{path} is empty: the {what} was never written; check the disk space and record again")


def _choice(folder: Path, files: Sequence[Path]) -> str:
    """Return "one of" and the files, one per line, each with its cell if the records next to it are readable."""
    cells = cells_of(folder)
    return "one of\n" + "\n".join(f"  {file}{f' ({cells[file.name]})' if file.name in cells else ''}" for file in files)


def cells_of(folder: Path) -> dict[str, str]:
    """Return a map from a file's name to the description of the cell that wrote it."""
    from cs_systems.record import recorded_files

    return {name: _described(record) for name, record in recorded_files(folder).items()}


def _described(record: RunRecord) -> str:
    return describe(record.run_config) + (f" · repeat {record.repeat}" if record.repeat else "")
