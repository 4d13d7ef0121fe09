"""Format of the records of a run, one per line."""

from __future__ import annotations

from cs_systems.core.formats import Format
from cs_systems.record import BEGINS, RECORDS_FILE, read_records

FORMAT = Format(
    title="records of runs",
    matches=lambda head, path: BEGINS.match(head) or (path / RECORDS_FILE).is_file(),
    suffixes=(".jsonl",),
    command="report",
    holds="results of a run",
    read=read_records,
    record="`cs-systems time --out FOLDER`, and every other command that measures",
)
