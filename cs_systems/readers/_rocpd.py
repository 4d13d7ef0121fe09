"""Reader of rocpd: the SQLite database (.db) that AMD's rocprofv3 writes by default since ROCm 7.

Each process has its own tables; their names end with an identifier of the process. A region is a call, or a range of
roctx with its text in the region's event. An event's `stack_id` is the correlation id that the JSON calls internal.

Source: version 3 of the schema (rocpd_tables.sql, marker_views.sql) and generateRocpd.cpp of rocprofiler-sdk. Copies
and roctx ranges are read as these define them; no recording with them was available for a test.
"""

from __future__ import annotations

import json
import sqlite3 as sql
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from cs_systems.config import ConfigError
from cs_systems.core.collector import without_collector
from cs_systems.readers import _sqlite as sqlite
from cs_systems.readers._processes import chosen_process
from cs_systems.readers._rocprof import MARKERS, NO_RANGES, RECORD, Recording
from cs_systems.readers.forms.trace import Trace

# table → columns to read
REQUIRED = {
    "kernel_dispatch": (
        "pid", "agent_id", "kernel_id", "queue_id", "stream_id", "start", "end", "grid_size_x", "grid_size_y",
        "grid_size_z", "workgroup_size_x", "workgroup_size_y", "workgroup_size_z", "group_segment_size", "event_id",
    ),
    "memory_copy": ("pid", "start", "end", "src_agent_id", "dst_agent_id", "stream_id", "size", "event_id"),
    "region": ("pid", "tid", "start", "end", "name_id", "event_id"),
    "event": ("id", "category_id", "stack_id", "parent_stack_id", "extdata"),
    "string": ("id", "string"),
    "info_agent": ("id", "pid", "type", "type_index", "name", "product_name"),
    "info_kernel_symbol": ("id", "pid", "kernel_name", "display_name"),
    "info_process": ("id", "nid", "pid"),
    "info_node": ("id", "hostname"),
}  # fmt: skip
KERNELS, VERSION = "rocpd_kernel_dispatch", "3"
MOST_ROWS = 10_000_000  # limit of kernels, copies and regions: about 4 GB of memory
JSON_INSTEAD = "record again with rocprofv3 --runtime-trace --output-format json"


@without_collector()
def read(path: Path, process: int | None = None) -> Trace:
    """Return the contents of a database.

    Args:
        path: The database.
        process: The pid of the process to read; without it, the one with the most kernels.

    Raises:
        ConfigError: The database is damaged, of another version, too large, or has too little in it for any table.
    """
    try:
        with closing(sqlite.connect(path)) as database:
            return _read(database, path, process)
    except MemoryError:
        raise sqlite.too_large(path) from None
    except (sql.DatabaseError, OverflowError, UnicodeDecodeError) as error:
        raise sqlite.damaged(path, "database of rocprofv3", error, "record again") from None


def _read(database: sql.Connection, path: Path, wanted: int | None) -> Trace:
    columns = sqlite.columns(database)
    ends = [name.removeprefix(KERNELS) for name in columns if name.startswith(KERNELS)]
    if not ends:
        raise ConfigError(f"{path} is a database of rocmProfileData, which cs-systems cannot read; {RECORD}")
    for end in ends:
        _refuse(database, path, columns, end)
    # Count by the process's number in the tables, which is unique even if pids are not.
    owners: dict[int, list[tuple[int, str, int]]] = {}  # pid → (kernels, end of its tables, number)
    for end in ends:
        query = f"SELECT pid, id, (SELECT count(*) FROM {KERNELS}{end} WHERE pid = p.id) FROM rocpd_info_process{end} p"
        for pid, number, count in database.execute(query):
            if isinstance(pid, int):
                owners.setdefault(pid, []).append((count, end, number))
    if twice := next((pid for pid, found in owners.items() if len(found) > 1), None):
        raise ConfigError(
            f"{path} holds two processes with the same pid, {twice}, which happens where "
            "several machines are merged; give the database of one machine"
        )
    counts = {pid: found[0][0] for pid, found in owners.items()}
    if any(counts.values()):
        counts = {pid: count for pid, count in counts.items() if count}
    pid, note = chosen_process(path, counts, "kernel", wanted)
    if pid not in owners:
        raise ConfigError(f"{path} holds no process; {RECORD} while kernels run on the GPU")
    ((_, end, number),) = owners[pid]
    return _recording(database, end, number).trace(path, [note] if note else [])


def _refuse(database: sql.Connection, path: Path, columns: Mapping[str, list[str]], end: str) -> None:
    """Raise ConfigError if the tables with this suffix are of another version, or have too many rows."""
    named = f"rocpd_metadata{end}"
    if {"tag", "value"} <= {*columns.get(named, ())}:
        tags = dict(database.execute(f"SELECT tag, value FROM {named}"))
        if (version := str(tags.get("schema_version", VERSION))) != VERSION:
            raise ConfigError(
                f"{path} has version {version} of rocpd's schema, but only version {VERSION} can be read; "
                f"{JSON_INSTEAD}"
            )
    for table, needed in REQUIRED.items():
        if lacking := [name for name in needed if name not in columns.get(f"rocpd_{table}{end}", ())]:
            columns_lacking = f"the column{'s' * (len(lacking) > 1)} {', '.join(lacking)}"
            raise ConfigError(f"{path} lacks {columns_lacking} in table rocpd_{table}{end}; {JSON_INSTEAD}")
    tables = ("kernel_dispatch", "memory_copy", "region")
    rows = sum(database.execute(f"SELECT count(*) FROM rocpd_{table}{end}").fetchone()[0] for table in tables)
    if rows > MOST_ROWS:
        raise ConfigError(
            f"{path} holds {rows:,} kernels, copies and regions, but at most {MOST_ROWS:,} are read; record fewer steps"
        )


def _recording(database: sql.Connection, end: str, number: int) -> Recording:
    made = Recording()

    def rows(query: str) -> sql.Cursor:
        """Return the rows of a query, in which `{…}` names a table and `?` is the process's number."""
        names = {table: f"rocpd_{table}{end}" for table in REQUIRED}
        return database.execute(query.format(**names), (number,))

    def add_symbol(row: Any) -> None:
        kernel, *names = row
        made.symbols[kernel] = next(filter(None, names), "")

    def add_kernel(row: Any) -> None:
        kernel, agent, stream, queue, correlation, shared, begin, finish, *sides = row
        sizes = tuple(sides[:3]), tuple(sides[3:]), shared
        made.add_kernel(kernel, (begin, finish), agent, queue if stream is None else stream, correlation, *sizes)

    def add_copy(row: Any) -> None:
        begin, finish, source, target, stream, size, correlation = row
        made.add_copy((begin, finish), (source, target), stream or 0, size, correlation)

    def add_region(row: Any) -> None:
        begin, finish, thread, name, kind, about, correlation, ancestor = row
        if kind in MARKERS:
            text = str(json.loads(about)["message"]) if name.startswith("roctx") else name
            if not {name, text} & {*NO_RANGES}:
                made.add_range(text, (begin, finish), thread)
        elif str(kind).endswith(("_API", "_API_EXT")):
            made.add_call(str(name), (begin, finish), thread, correlation, ancestor)
        else:
            made.unread += 1

    hosts = "SELECT hostname FROM {info_process} p JOIN {info_node} n ON n.id = p.nid WHERE p.id = ?"
    made.host = next((host for (host,) in rows(hosts) if isinstance(host, str)), None)
    gpus = "SELECT id, type_index, product_name, name FROM {info_agent} WHERE type = 'GPU' AND pid = ?"
    made.take(lambda row: made.add_gpu(*row), rows(gpus))
    made.take(add_symbol, rows("SELECT id, display_name, kernel_name FROM {info_kernel_symbol} WHERE pid = ?"))
    sides = ", ".join(f"{what}_size_{side}" for what in ("grid", "workgroup") for side in "xyz")
    made.take(
        add_kernel,
        rows(
            f"SELECT kernel_id, agent_id, stream_id, queue_id, stack_id, group_segment_size, start, end, {sides} "
            "FROM {kernel_dispatch} k LEFT JOIN {event} e ON e.id = k.event_id WHERE k.pid = ?"
        ),
    )
    made.take(
        add_copy,
        rows(
            "SELECT start, end, src_agent_id, dst_agent_id, stream_id, size, stack_id FROM {memory_copy} c "
            "LEFT JOIN {event} e ON e.id = c.event_id WHERE c.pid = ?"
        ),
    )
    made.take(
        add_region,
        rows(
            "SELECT start, end, tid, name.string, kind.string, e.extdata, stack_id, parent_stack_id FROM {region} r "
            "LEFT JOIN {string} name ON name.id = r.name_id LEFT JOIN {event} e ON e.id = r.event_id "
            "LEFT JOIN {string} kind ON kind.id = e.category_id WHERE r.pid = ?"
        ),
    )
    return made
