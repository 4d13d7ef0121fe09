"""Tables of records in a JSON document: the cells with every column, and each table among their results."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from cs_systems.config import describe, one_of
from cs_systems.core.tables import Row, Table, declared
from cs_systems.record import RunRecord
from cs_systems.report.frame import CELL_COLUMNS, PHASE_COLUMNS, STEP, by_kind, frame, without_retried
from cs_systems.report.frame_cells import FIELD_COLUMNS
from cs_systems.report.tables import document


def tables(records: Sequence[RunRecord], names: Sequence[str]) -> str:
    """Return the pieces of these tables. Raises ConfigError for a name that no record has."""
    records = without_retried(records)
    known = [document.CELLS, *_rows(records)]
    return "".join(_table(records, one_of("table", name, known)) for name in names)


def measured(records: Sequence[RunRecord], names: Iterable[str] = ()) -> str:
    """Return the pieces of a command that measured: diagnoses, origin, cells, then these tables if they have rows."""
    from cs_systems.analysis.diagnosis import diagnose
    from cs_systems.report import origins
    from cs_systems.report.tables.records import render

    known = _rows(without_retried(records))
    shown = [name for name in names if name in known]
    begin = [document.answer(diagnose(records)), *map(document.note, origins.lines(records)), render(records, "json")]
    return "".join([*begin, tables(records, shown), more(records, shown)])


def more(records: Sequence[RunRecord], shown: Collection[str] = ()) -> str:
    """Return the piece that ends a short answer: the tables of these records that are not shown, with their rows."""
    records = without_retried(records)
    left = {name: len(rows) for name, rows in _rows(records).items() if name not in shown}
    return document.more({document.CELLS: len(records), **left})


def _table(records: Sequence[RunRecord], name: str) -> str:
    if name == document.CELLS:
        return "".join(_cells(kind, own) for kind, own in by_kind(records).items())
    rows = _rows(records)[name]
    return document.table(_declared(name, rows[0]), rows)


def _rows(records: Sequence[RunRecord]) -> dict[str, list[Row]]:
    """Return the rows of all records by table of results; each begins with its cell and the fields that differ."""
    found: dict[str, list[Row]] = {}
    varying = [
        (name, each) for name, each in FIELD_COLUMNS.items() if len({str(each.of(r.config)) for r in records}) > 1
    ]
    for record in records:
        fields = {name: each.of(record.config) for name, each in varying}
        cell = {"cell": describe(record.run_config), "repeat": record.repeat, **fields}
        for name, rows in record.results.items():
            found.setdefault(name, []).extend({**cell, **row} for row in rows)
    return {name: rows for name, rows in found.items() if rows}


def _declared(name: str, row: Row) -> Table:
    """Return the declaration of a table of results; a record and a job may have tables of the same name."""
    fitting = [table for table in declared(name) if table.fits(row)]
    return fitting[0] if fitting else Table(name, dict, name)


def _cells(kind: str, records: Sequence[RunRecord]) -> str:
    """Return the piece of the cells of one kind: a row for each, with every known column."""
    from cs_systems.report.tables.columns import make, phases_of
    from cs_systems.report.tables.table import Table as Shown

    whole = frame(records)
    rows = whole[whole["phase"].isna() | (whole["phase"] == STEP)].reset_index(drop=True)
    beside = [f"{phase}.median_s" for phase in phases_of(whole) if phase != STEP]
    columns = [one for one in make([*CELL_COLUMNS, *PHASE_COLUMNS, *beside], rows, whole) if not one.is_empty]
    return document.cells([Shown(kind, tuple(columns), (), tuple(rows["status"]))])
