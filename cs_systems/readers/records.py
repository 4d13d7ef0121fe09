"""Format of the records of a run, one per line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cs_systems.core.formats import Format


def _matches(head: bytes, path: Path) -> bool:
    from cs_systems.record import BEGINS, RECORDS_FILE

    return bool(BEGINS.match(head)) or (path / RECORDS_FILE).is_file()


def _read(path: Path) -> Any:
    from cs_systems.record import read_records

    return read_records(path)


FORMAT = Format(
    title="records of runs",
    matches=_matches,
    suffixes=(".jsonl",),
    command="report",
    holds="results of a run",
    read=_read,
    record="`cs-systems time --out FOLDER`, and every other command that measures",
)
