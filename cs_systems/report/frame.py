"""Records as one long pandas DataFrame: `frame(records)`, or `load(path)` for a run's folder.

One row is one (record, phase). Phase `step` is the whole step by the wall clock, or by the device's clock where the
device was held until the step was submitted (`held`). A record without a timing (oom, unavailable, timeout, killed,
error, a loss that is NaN or infinite) is one row with phase None, so that it appears in every table with its status and
reason. Columns hold base units, given by their names; unknown is null (NaN, NA or None), never 0.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from cs_systems.config import ConfigError
from cs_systems.core.units import counted
from cs_systems.record import DONE, OR_AGAIN, RunRecord, as_records, of_line, records_path
from cs_systems.report.frame_cells import CELL_COLUMNS, Cell, clear_unused_fields
from cs_systems.report.frame_phases import PHASE_COLUMNS, STEP, phase_rows
from cs_systems.report.series import typed

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["CELL_COLUMNS", "CLEAN", "PHASE_COLUMNS", "STEP", "by_kind", "frame", "load", "without_retried"]

# At a prompt, pandas shows the first and the last columns that fit; these answer most questions.
_FIRST = ("phase", "median_s", "p10_s", "p90_s")
_LAST = ("peak_allocated_bytes", "mfu", "status")
CLEAN = "none"  # profiler field of clean records: their times are valid timings


def load(path: str | os.PathLike[str]) -> pd.DataFrame:
    """Load the frame of the records under `path`, without failed attempts that a resumed sweep has since replaced.

    Warns if lines were skipped because they are not records; `read_records` returns a message for each.
    """
    from cs_systems.report.reading import sound_records

    records, complaints = sound_records(path)
    if complaints:
        file, lines = records_path(path), counted(len(complaints), "line")
        remedy = "repeat the run to measure what is missing, then delete the lines that read_records(path)[1] lists"
        text = f"{file}: {lines} skipped, first: {of_line(complaints[0], file)}; {remedy}"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    return frame(without_retried(records))


def without_retried(records: Sequence[RunRecord]) -> list[RunRecord]:
    """Drop each failed record (error, timeout, killed) that a later record of the same cell replaces."""
    last = {(r.key, r.repeat): i for i, r in enumerate(records)}
    return [r for i, r in enumerate(records) if r.status in DONE or last[r.key, r.repeat] == i]


def by_kind(records: Iterable[RunRecord]) -> dict[str, list[RunRecord]]:
    """Group records that may share a table: one workload, and all clean or all under one profiler, those last.

    The keys are names: `train_step`, `train_step under nsys`.
    """
    clean: dict[str, list[RunRecord]] = {}
    profiled: dict[str, list[RunRecord]] = {}
    for record in records:
        workload, profiler = record.config["workload"], record.config.get("profiler", CLEAN)
        kinds, name = (clean, workload) if profiler == CLEAN else (profiled, f"{workload} under {profiler}")
        kinds.setdefault(name, []).append(record)
    return {**clean, **profiled}


def frame(records: RunRecord | Iterable[RunRecord]) -> pd.DataFrame:
    """Return the long DataFrame of `records`, with CELL_COLUMNS and PHASE_COLUMNS; the times come first.

    Raises ConfigError for a malformed record, and for anything that is not a record.
    """
    import pandas as pd

    cells: list[Cell] = []
    rows: list[tuple[Any, ...]] = []
    owners: list[int] = []
    records = as_records(records)
    for index, record in enumerate(records):
        with _naming(index, record):
            cells.append(Cell(index, record))
    clear_unused_fields(cells)
    for index, (record, cell) in enumerate(zip(records, cells, strict=True)):
        with _naming(index, record):
            peak = cell.results["ceiling_flops_per_s"]
            measured = [tuple(map(row.get, PHASE_COLUMNS)) for row in phase_rows(record, peak)]
        rows += measured
        owners += [index] * len(measured)
    of_cells = [cell.row() for cell in cells]
    identity = typed({name: [c.get(name) for c in of_cells] for name in CELL_COLUMNS}, CELL_COLUMNS, records)
    columns = zip(*rows, strict=True) if rows else ([] for _ in PHASE_COLUMNS)
    phases = typed(
        dict(zip(PHASE_COLUMNS, map(list, columns), strict=True)), PHASE_COLUMNS, [records[n] for n in owners]
    )
    whole = pd.concat([identity.take(owners).reset_index(drop=True), phases], axis=1)
    return whole[[*_FIRST, *(name for name in whole.columns if name not in {*_FIRST, *_LAST}), *_LAST]]


@contextmanager
def _naming(index: int, record: RunRecord) -> Iterator[None]:
    """Convert an error caused by a record's missing fields into one that names the record."""
    try:
        yield
    except ConfigError as error:
        # the remedy after ";" applies before a cell is measured, so it is left out
        problem = str(error).partition("; ")[0]
        text = (
            f"record {index + 1} (key {record.key}) cannot be shown: {problem}; read it with the version that wrote "
            "it, or delete its line of records.jsonl"
        )
        raise ConfigError(text) from error
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__
        raise ConfigError(
            f"record {index + 1} (key {record.key}) is malformed: {reason}; delete its line of records.jsonl, "
            f"{OR_AGAIN}"
        ) from error
