"""Reader of SQLite exports of Nsight Systems, into a `Trace`.

The file is opened read-only and treated as untrusted. Tables and columns differ between versions, and an export omits
empty tables: missing data is a limitation, and an error only if no table can be made.

Source: "SQLite Schema Reference" in the user guide of Nsight Systems.
"""

from __future__ import annotations

import functools
import sqlite3
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from cs_systems.config import ConfigError
from cs_systems.core.printable import within
from cs_systems.core.units import counted, human
from cs_systems.readers import _sqlite as sqlite
from cs_systems.readers._calls import Launches
from cs_systems.readers._lost_kernels import launches_kernel, lost_launches
from cs_systems.readers._processes import chosen_process, ranges_elsewhere
from cs_systems.readers._stalls import Kind, kind, unversioned
from cs_systems.readers.forms.columns import (
    NO_RANGES,
    UNKNOWN,
    Categorical,
    Floats,
    Ints,
    Ranges,
    distinct,
    joined,
    latest,
    taken,
)
from cs_systems.readers.forms.jobs import Job
from cs_systems.readers.forms.trace import (
    INVALID,
    NO_CALLS,
    NO_COPIES,
    NO_KERNELS,
    NO_WAITS,
    UNIFIED,
    WHOLE_GRAPH,
    Allocations,
    Calls,
    Copies,
    Function,
    Kernels,
    Trace,
    Waits,
    outermost_calls,
)

KERNELS, RUNTIME, NVTX = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS"
COPIES = {"memcpy": "CUPTI_ACTIVITY_KIND_MEMCPY", "memset": "CUPTI_ACTIVITY_KIND_MEMSET"}
WAITS, EVENTS = "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", "CUPTI_ACTIVITY_KIND_CUDA_EVENT"
OF_EVENT, OF_STREAM_FOR_EVENT, OF_CONTEXT = 1, 2, 4  # ENUM_CUPTI_SYNC_TYPE; 3 waits for a stream
# ENUM_CUDA_MEMCPY_OPER → direction; the last three are of unified (managed) memory.
DIRECTIONS = ("", *map("to".join, ("HD", "DH", "HA", "AH", "AA", "AD", "DA", "DD", "HH", "PP", "HD", "DH", "DD")))
FIRST_UNIFIED = 11
HOST_MEMORY = ("pageable", "pinned")  # the first numbers of ENUM_CUDA_MEM_KIND
MEMORY = "CUDA_GPU_MEMORY_USAGE_EVENTS"  # recorded with --cuda-memory-usage=true
FREED, ON_THE_HOST = 1, "0, 1"  # ENUM_CUDA_DEV_MEM_EVENT_OPER; ENUM_CUDA_MEM_KIND: pageable, pinned
GRAPHS = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"  # recorded with --cuda-graph-trace=graph, nsys's default
# Calls of MPI, which older releases (2022.4) export as NVTX ranges.
MPI = tuple(f"MPI_{kind}_EVENTS" for kind in ("P2P", "COLLECTIVES", "START_WAIT", "OTHER"))
ABOUT = ("META_DATA_EXPORT", "EXPORT_META_DATA")  # versions of nsys and of the schema; the second until 2022
# Columns that a table must have; other columns may be missing.
REQUIRED = {
    KERNELS: ("start", "end"),
    GRAPHS: ("start", "end"),
    RUNTIME: ("start", "end", "globalTid", "correlationId", "nameId"),
    NVTX: ("start", "end", "eventType", "globalTid"),
    COPIES["memcpy"]: ("start", "end"),
    COPIES["memset"]: ("start", "end"),
    MEMORY: ("start", "bytes", "memKind", "memoryOperationType", "address"),
    **dict.fromkeys(MPI, ("start", "end", "globalTid", "textId")),
}
MOST_ROWS = 40_000_000  # limit for these tables: about 6 GB of memory
PUSH_POP, START_END = 59, 60
NODES = "--cuda-graph-trace=node"
RECORD = "record with nsys profile --trace=cuda,nvtx"
MOST_NAMED, LONGEST = 3, 40  # calls of an export without kernels, and the characters of a name
PROCESS_MASK = ~0xFFFFFF  # a globalTid masked by this gives the globalPid
CHUNK = 1 << 18  # rows converted to text at a time
_none = np.empty(0, np.int64)
READABLE = "nsys 2021 to 2026"  # releases with readable exports
# The columns of a kernel's Function except shared memory.
_LAUNCH = ("demangledName", "gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ", "registersPerThread")
_SHARED = ("staticSharedMemory", "dynamicSharedMemory")


def read(path: Path, process: int | None = None) -> Trace:
    """Return the contents of an SQLite export.

    Args:
        path: The SQLite export.
        process: The pid of the process to read; required where the export holds several.

    Raises:
        ConfigError: The export is damaged, from too old a version, or has too little in it for any table.
    """
    with closing(sqlite.connect(path)) as database:
        try:
            return _Reader(database, path, process).trace()
        except sqlite3.OperationalError as error:
            raise ConfigError(
                f"{path} cannot be read as an export of {READABLE} ({error}); export the report with one of these "
                "releases, to a local disk"
            ) from None
        except MemoryError:
            raise sqlite.too_large(path) from None
        except (sqlite3.DatabaseError, OverflowError, UnicodeDecodeError) as error:
            raise sqlite.damaged(path, "export", error, "export it again from the .nsys-rep") from None


def processes(path: Path) -> list[int]:
    """Return the pids of the processes that ran kernels, by the number of their first device."""
    query = f"SELECT globalPid >> 24 & 16777215 AS pid, min(deviceId) FROM {KERNELS} GROUP BY 1 ORDER BY 2, 1"
    try:
        with closing(sqlite.connect(path)) as database:
            return [pid for pid, _ in database.execute(query) if isinstance(pid, int)]
    # missing, damaged or without kernels; reading the file will report it
    except (sqlite3.DatabaseError, UnicodeDecodeError):
        return []


class _Reader:
    """Reader of one open export; it collects missing data in `limitations`."""

    def __init__(self, database: sqlite3.Connection, path: Path, process: int | None) -> None:
        self.database = database
        self.path = path
        self.limitations: list[str] = []
        self.launching: tuple[int, ...] = ()
        self.columns = sqlite.columns(database)
        self._refuse()
        self.by_start = _none  # order by time of the table of calls
        self.ran: list[Ints] = []  # correlation ids of kernels and copies, also of damaged ones
        self.process = self._process(process)
        self.marking = self._marking_process()
        self.names = self._texts("StringIds", "value")

    @property
    def version(self) -> str:
        """Version of the nsys that exported the file, and of its schema, in parentheses; empty where not recorded."""
        for table in ABOUT:
            if {"name", "value"} <= {*self.columns.get(table, ())}:
                known = dict(self.database.execute(f"SELECT name, CAST(value AS TEXT) FROM {table}"))
                product, schema = known.get("EXPORT_PRODUCT_VERSION"), known.get("EXPORT_SCHEMA_VERSION")
                return f" (nsys {product}, schema {schema})" if product else ""
        return ""

    def _refuse(self) -> None:
        """Raise ConfigError if no table can be made of the export.

        Ranges without kernels are a valid trace of the host, if CUDA was not used.
        """
        present = [table for table in REQUIRED if self._has(table)]
        for table in present:
            if lacking := [name for name in REQUIRED[table] if name not in self.columns[table]]:
                raise ConfigError(
                    f"{self.path}: table {table}{self.version} lacks {', '.join(lacking)}, which exports of "
                    f"{READABLE} have; export the report with one of these releases"
                )
        if (rows := sum(map(self._rows_of, present))) > MOST_ROWS:
            raise ConfigError(
                f"{self.path} holds {rows:,} kernels, calls and ranges, but at most {MOST_ROWS:,} are read; record "
                "fewer steps, with nsys profile --capture-range=cudaProfilerApi, and torch.cuda.profiler.start() and "
                "stop() around them"
            )
        kernels, ranges = self._has(KERNELS) or self._has(GRAPHS), any(map(self._has, (NVTX, *MPI)))
        if not kernels and (not ranges or any(map(self._has, (RUNTIME, *COPIES.values())))):
            if not {"StringIds", "META_DATA_EXPORT", *REQUIRED} & self.columns.keys():
                raise ConfigError(
                    f"{self.path} is an SQLite file without tables of a profiler; give an export of nsys (.sqlite) or "
                    "a database of rocprofv3 (.db)"
                )
            raise ConfigError(f"{self.path} holds no kernel{self._instead()}")

    def _instead(self) -> str:
        """Return which calls an export without kernels holds, and how to record kernels."""
        if not self._has(RUNTIME):
            return f"; {RECORD} while kernels run on the GPU, and stop other profilers (ncu, DCGM)"
        names = self._texts("StringIds", "value")
        query = f"SELECT nameId, count(*), sum(end - start) FROM {RUNTIME} GROUP BY 1"
        launched, lasted_ns = 0, Counter[str]()
        for number, count, lasted in self.database.execute(query):
            name = unversioned(names.get(number, ""))
            launched += count if kind(name) in (Kind.LAUNCH, Kind.GRAPH_LAUNCH) else 0
            lasted_ns[name] += lasted or 0
        longest = [(name, lasted) for name, lasted in lasted_ns.most_common(MOST_NAMED) if lasted]
        named = [f"{human(lasted * 1e-9, 's')} in {within(name, LONGEST)}" for name, lasted in longest]
        time = f" (time of the CUDA calls: {', '.join(named)})" if named else ""
        if not launched:
            return f" and no launch{time}; {RECORD} while kernels run on the GPU"
        count = counted(launched, "launch", "launches")
        lost = "so probably the GPU's profiling interface recorded none; stop other profilers (ncu, DCGM)"
        return f", although it holds {count}{time}, {lost}, and {RECORD}"

    def _has(self, table: str) -> bool:
        return table in self.columns and bool(self.database.execute(f"SELECT 1 FROM {table} LIMIT 1").fetchall())

    def _rows_of(self, table: str) -> int:
        """Return an upper bound of a table's number of rows; the exact number where the bound exceeds the limit."""
        ((highest,),) = self.database.execute(f"SELECT max(rowid) FROM {table}")
        if highest > MOST_ROWS:
            ((highest,),) = self.database.execute(f"SELECT count(*) FROM {table}")
        return max(0, int(highest))

    def _texts(self, table: str, column: str) -> dict[int, str]:
        """Return the texts of a column by their id."""
        if not self._has(table):
            return {}
        number = "id" if "id" in self.columns[table] else "deviceId"  # TARGET_INFO_GPU before 2021.5
        kept = f"{column} IS NOT NULL AND typeof({number}) = 'integer'"
        query = f"SELECT {number}, CAST({column} AS TEXT) FROM {table} WHERE {kept}"
        return dict(self.database.execute(query))

    def _column(self, table: str, name: str) -> str:
        """Return the column's name, or NULL where this version of nsys lacks the column."""
        return name if name in self.columns.get(table, ()) else "NULL"

    def _read(self, table: str, *expressions: str, where: str = "1") -> list[Ints]:
        """Return whole numbers from the process's rows in file order, one column per expression; NULL is UNKNOWN."""
        return _joined(self._chunks(table, *expressions, where=where), len(expressions))

    def _chunks(self, table: str, *expressions: str, where: str = "1") -> Iterator[list[Ints]]:
        """Yield the result of `_read` in chunks of rows, so that a large table need not fit into memory.

        Python's sqlite3 takes over a microsecond per row. Here SQLite joins each column into one text, and numpy parses
        it, which takes half the time and creates no object for each number.
        """
        numbers = ", ".join(f"ifnull({e}, {UNKNOWN}) AS c{i}" for i, e in enumerate(expressions))
        texts = ", ".join(f"CAST(group_concat(c{i}) AS BLOB)" for i in range(len(expressions)))
        wanted = f"{self._of_process(table)} AND {where} AND rowid > ? ORDER BY rowid LIMIT {CHUNK}"
        query = f"SELECT count(*), max(rowid), {texts} FROM (SELECT rowid, {numbers} FROM {table} WHERE {wanted})"
        count, last = CHUNK, -(2**63)
        while count == CHUNK:
            count, last, *columns = self.database.execute(query, (last,)).fetchone()
            if count:
                yield [_numbers(text, count, table) for text in columns]

    def _process(self, wanted: int | None) -> int | None:
        """Return the globalPid of the process to read; None if the export has no globalPid.

        The process is `wanted`, or the one with the most kernels, with a limitation.

        Raises:
            ConfigError: The wanted process does not qualify.
        """
        what, owner = "kernel", "ifnull(globalPid, 0)"
        table = next((table for table in (KERNELS, GRAPHS, NVTX, *MPI) if self._has(table)), NVTX)
        if table in (NVTX, *MPI):
            what, owner = "range", f"ifnull(globalTid, 0) & {PROCESS_MASK}"
        elif "globalPid" not in self.columns[table]:
            self.limitations.append("this version of nsys does not record a kernel's process; one process is assumed")
            return None
        # counting by process needs a sort, which is skipped for a single process
        ((least, most),) = self.database.execute(f"SELECT min({owner}), max({owner}) FROM {table}")
        if not isinstance(least, int) or not isinstance(most, int):  # SQLite orders a text above every number
            raise sqlite3.DatabaseError(f"{table} has a text where a number belongs")
        if wanted is None and least == most:
            return least
        found = dict(
            self.database.execute(
                f"SELECT {owner}, count(*) FROM {table} GROUP BY 1 HAVING typeof({owner}) = 'integer'"
            )
        )
        pids = {number >> 24 & 0xFFFFFF: number for number in found}
        counts = {pid: found[number] for pid, number in pids.items()}
        self.launching = tuple(sorted(pids)) if what == "kernel" else ()
        pid, note = chosen_process(self.path, counts, what, wanted, can_merge=self._has(KERNELS))
        self.limitations += [note] if note else []
        return int(pids[pid])

    def trace(self) -> Trace:
        kernels = self._kernels()
        ranges = self._ranges()
        copies = self._copies()
        trace = Trace(
            source=str(self.path),
            profiler="nsys",
            devices=self._by_device("name"),
            kernels=kernels,
            copies=copies,
            calls=self.launches.calls,
            ranges=ranges,
            overheads=self._overheads(),
            ops=None,
            limitations=tuple(self.limitations),
            allocations=self._allocations(),
            lost_launches=self._lost_launches(kernels),
            job=self._job(),
            waits=self._waits(),
            multiprocessors={
                device: int(count) for device, count in self._by_device("smCount").items() if count != "0"
            },
        )
        return outermost_calls(trace)

    def _job(self) -> Job:
        """Return the host and the time of the recording; nsys records no rank."""

        def first(table: str, column: str, where: str = "1") -> Any:
            if column not in self.columns.get(table, ()):
                return None
            return (self.database.execute(f"SELECT {column} FROM {table} WHERE {where} LIMIT 1").fetchone() or [None])[
                0
            ]

        began_ns = first("TARGET_INFO_SESSION_START_TIME", "utcEpochNs")
        host = first("TARGET_INFO_SYSTEM_ENV", "value", "name = 'Hostname'")
        return Job(
            host=host if isinstance(host, str) else None,
            began_s=began_ns * 1e-9 if isinstance(began_ns, int) else None,
        )

    def _by_device(self, column: str) -> dict[int, str]:
        """Return a property of the GPUs by CUDA device number, which CUDA_VISIBLE_DEVICES can change."""
        if column not in self.columns.get("TARGET_INFO_GPU", ()):
            return {}
        by_id = self._texts("TARGET_INFO_GPU", column)
        if "cuDevice" not in self.columns.get("TARGET_INFO_GPU", ()):
            return by_id
        numbers = self.database.execute("SELECT id, cuDevice FROM TARGET_INFO_GPU WHERE typeof(cuDevice) = 'integer'")
        by_number = {number: by_id[gpu] for gpu, number in numbers if gpu in by_id}
        return by_number if len(by_number) == len(by_id) else by_id

    def _of_process(self, table: str) -> str:
        """Return an SQL condition that selects the process's rows by the column that this table has for it."""
        process = self.marking if table == NVTX else self.process
        if process is None:
            return "1"
        if "globalPid" in self.columns[table]:
            return f"ifnull(globalPid, 0) = {process}"
        return f"(globalTid & {PROCESS_MASK}) = {process}" if "globalTid" in self.columns[table] else "1"

    def _marking_process(self) -> int | None:
        """Return the globalPid of the process with the ranges.

        It is the process that is read; if that has no ranges, the only other process with ranges.
        """
        table = next((table for table in (KERNELS, GRAPHS) if self._has(table)), None)
        if self.process is None or table is None or "globalTid" not in self.columns.get(NVTX, ()):
            return self.process
        owner = f"ifnull(globalTid, 0) & {PROCESS_MASK}"
        ranges = f"FROM {NVTX} WHERE eventType IN ({PUSH_POP}, {START_END})"
        if self.database.execute(f"SELECT 1 {ranges} AND {owner} = {self.process} LIMIT 1").fetchone():
            return self.process
        launched = f"SELECT DISTINCT globalPid FROM {table} WHERE globalPid IS NOT NULL"
        counted = f"SELECT {owner}, count(*) {ranges} AND {owner} NOT IN ({launched}) GROUP BY 1"
        if not (others := dict(self.database.execute(counted))):
            return self.process
        pids = {number >> 24 & 0xFFFFFF: count for number, count in others.items()}
        self.limitations.append(ranges_elsewhere(pids, self.process >> 24 & 0xFFFFFF))
        return next(iter(others)) if len(others) == 1 else self.process

    def _kernels(self) -> Kernels:
        found = [read for table, read in ((KERNELS, self._single), (GRAPHS, self._whole_graphs)) if self._has(table)]
        if not found:
            return NO_KERNELS
        launches = self.launches  # read first, because reading needs more memory than the result takes
        numbers: dict[tuple[int, ...], int] = {}
        columns = _joined((_numbered(chunk, numbers) for read in found for chunk in read()), 7)
        self.ran.append(columns[4])
        order = np.argsort(columns[0], kind="stable")
        order = order[(columns[1] >= columns[0])[order]]
        if damaged := len(columns[0]) - len(order):
            self.limitations.append(f"{damaged} kernels that have no end, or end before they start, are left out")
        for i, column in enumerate(columns):  # one at a time, so that at most one column is in memory twice
            columns[i] = column[order]
        start, end, device, stream, correlation, graph, codes = columns
        functions = [self._function(*row) for row in numbers]
        if not launches:
            self.limitations.append(f"no CUDA call was recorded, so no kernel has a phase; {RECORD}")
        calls, start_s = launches.calls, _s(start)
        call = launches.of(correlation, start_s)
        return Kernels(
            Categorical(functions, codes),
            start_s,
            _s(end),
            device,
            stream,
            taken(calls.thread, call, UNKNOWN),
            taken(calls.start_s, call, np.nan),
            taken(calls.end_s, call, np.nan),
            graph > 0,
            call,
        )

    def _single(self) -> Iterator[list[Ints]]:
        """Yield the columns of the kernels: times, device and stream, correlation id, graph node, name and sizes."""
        optional = (self._column(KERNELS, name) for name in ("deviceId", "streamId", "correlationId", "graphNodeId"))
        launch = (self._column(KERNELS, name) for name in _LAUNCH)
        shared = " + ".join(self._column(KERNELS, name) for name in _SHARED)
        return self._chunks(KERNELS, "start", "end", *optional, *launch, shared)

    def _whole_graphs(self) -> Iterator[list[Ints]]:
        """Yield the same columns for the CUDA graphs that were recorded as a whole, each as one kernel."""
        optional = (self._column(GRAPHS, name) for name in ("deviceId", "streamId", "correlationId", "graphId"))
        *columns, graph = self._read(GRAPHS, "start", "end", *optional)
        self.limitations.append(
            f"{len(graph)} launches of CUDA graphs were recorded without their kernels and count as one kernel each; "
            f"record with {NODES}"
        )
        self.names |= {_graph_name(number): f"{WHOLE_GRAPH}{number}" for number in np.unique(graph).tolist()}
        sizes = [np.full(len(graph), UNKNOWN)] * (len(_LAUNCH) - 1 + len(_SHARED) - 1)
        yield [*columns, np.ones(len(graph), np.int64), _graph_name(graph), *sizes]

    @functools.cached_property
    def launches(self) -> Launches:
        """All calls in order of their start, and their launched activities by correlationId."""
        if not self._has(RUNTIME):
            return Launches(NO_CALLS, _none)
        columns = self._read(RUNTIME, "nameId", "start", "end", "globalTid", "correlationId")
        self.by_start = np.lexsort((-columns[2], columns[1]))  # a call comes before the calls inside it
        for i, column in enumerate(columns):  # one at a time, so that at most one column is in memory twice
            columns[i] = column[self.by_start]
        name, start, end, thread, correlation = columns
        used = np.unique(name)
        names = [self.names.get(number, f"call {number}") for number in used.tolist()]
        # of a call without an end, only the start is known
        times = _s(start), _s(np.maximum(start, end))
        calls = Calls(Categorical(names, used.searchsorted(name)), *times, thread)
        return Launches(calls, np.maximum(correlation, UNKNOWN))

    def _function(self, name: int, *shape: int) -> Function:
        *sizes, registers, shared = (None if value == UNKNOWN else value for value in shape)
        known = [size for size in sizes if size is not None]
        grid, block = ((*known[:3],), (*known[3:],)) if len(known) == 6 else (None, None)
        return Function(self.names.get(name, f"kernel {name}"), grid, block, registers, shared)  # type: ignore[arg-type]

    def _copies(self) -> Copies:
        found = [self._copies_of(kind, table) for kind, table in COPIES.items() if self._has(table)]
        if not found:
            return NO_COPIES
        columns = [np.concatenate(parts) for parts in zip(*found, strict=True)]
        kind, start, end, device, stream, size, correlation, *about = (
            column[np.argsort(columns[1], kind="stable")] for column in columns
        )
        first, codes = distinct(*about)
        names = Categorical([_copy_name(*row) for row in _rows(*(column[first] for column in about))], codes)
        start_s = _s(start)
        call = self.launches.of(correlation, start_s)
        places = np.maximum(device, 0), np.maximum(stream, 0)
        return Copies(Categorical([*COPIES], kind), start_s, _s(end), *places, size, call, names.in_order_of_use())

    def _copies_of(self, kind: str, table: str) -> list[Ints]:
        """Return the columns of one table's copies, with the number of their kind as the first."""
        fields = ("deviceId", "streamId", "bytes", "correlationId", "copyKind", "srcKind", "dstKind")
        start, end, *rest = self._read(table, "start", "end", *(self._column(table, name) for name in fields))
        self.ran.append(rest[3])
        whole = end >= start
        if damaged := int((~whole).sum()):
            self.limitations.append(f"{damaged} {kind}s that have no end, or end before they start, are left out")
        kinds = np.full(len(start), [*COPIES].index(kind))
        return [column[whole] for column in (kinds, start, end, *rest)]

    def _waits(self) -> Waits:
        """Return the causes of waits, from the table of synchronisations."""
        if not {"start", "correlationId", "syncType"} <= {*self.columns.get(WAITS, ())} or not self._has(WAITS):
            return NO_WAITS
        # An event is recorded many times; `eventSyncId`, since 2025, identifies one record.
        has = {*self.columns[WAITS]} & {*self.columns.get(EVENTS, ())}
        event = "eventSyncId" if "eventSyncId" in has else self._column(WAITS, "eventId")
        fields = ("correlationId", "syncType", self._column(WAITS, "deviceId"), self._column(WAITS, "streamId"), event)
        start, correlation, kind, device, stream, event_of = self._read(WAITS, "start", *fields)
        start_s = _s(start)
        of_event = (kind == OF_EVENT) | (kind == OF_STREAM_FOR_EVENT)
        stream[(stream == INVALID) | (kind == OF_EVENT) | (kind == OF_CONTEXT)] = UNKNOWN
        awaited, recorded = np.where(of_event, UNKNOWN, stream), np.full(len(start), UNKNOWN)
        if {event, "correlationId"} <= has and self._has(EVENTS):
            key, record, place = self._read(EVENTS, event, "correlationId", self._column(EVENTS, "streamId"))
            # the record of the event has no time, but its call has
            called = self.launches.of(record, np.full(len(record), np.inf))
            begun_s = taken(self.launches.calls.start_s, called, np.nan)
            known = np.flatnonzero((key != UNKNOWN) & (key != INVALID) & (called != UNKNOWN))
            known = known[np.lexsort((begun_s[known], key[known]))]
            which = latest(event_of, start_s, key[known], begun_s[known])
            # the event was recorded before the recording began
            which[taken(begun_s[known], which, np.inf) > start_s] = UNKNOWN
            recorded = np.where(of_event, taken(called[known], which, UNKNOWN), UNKNOWN)
            awaited = np.where(of_event, taken(place[known], which, UNKNOWN), awaited)
        waiting = np.where(kind == OF_STREAM_FOR_EVENT, stream, UNKNOWN)
        call = self.launches.of(correlation, start_s)
        return Waits(call, awaited, device, recorded, waiting).take(call != UNKNOWN)

    def _lost_launches(self, kernels: Kernels) -> Floats:
        launches = self.launches
        named = launches.calls.name.codes_where(launches_kernel)
        launch = np.flatnonzero(named & (launches.correlation != UNKNOWN))
        ran = launches.among(np.concatenate([_none, *self.ran]))
        has_run = ran[np.searchsorted(launches.numbers, launches.correlation[launch])]
        if has_run.all():
            return np.empty(0)
        # A call that failed launched nothing.
        (result,) = self._read(RUNTIME, self._column(RUNTIME, "returnValue"))
        done = np.isin(result[self.by_start][launch], (0, UNKNOWN))
        return lost_launches(kernels, launches.calls, launch[done], has_run[done])

    def _allocations(self) -> Allocations | None:
        if MEMORY not in self.columns:
            return None
        fields = ("start", "bytes", "memoryOperationType", "address", self._column(MEMORY, "correlationId"))
        columns = self._read(MEMORY, *fields, where=f"memKind NOT IN ({ON_THE_HOST})")
        order = np.argsort(columns[0], kind="stable")
        start, size, operation, address, correlation = (column[order] for column in columns)
        thread = taken(self.launches.calls.thread, self.launches.of(correlation, _s(start)), UNKNOWN)
        known: dict[int, int] = {}
        change = []
        for number, bytes, place in _rows(operation, size, address):
            if number == FREED:  # a free may omit its size: use the allocation's size
                change.append(-(known.pop(place, 0) if bytes <= 0 else bytes))
            else:
                known[place] = bytes
                change.append(bytes)
        return Allocations(_s(start), thread, np.array(change, np.int64))

    def _ranges(self) -> Ranges:
        """Return the ranges of the program, and the calls of MPI."""
        marked, endless = self._marked() if NVTX in self.columns else (NO_RANGES, [])
        calls = [self._mpi_calls(table) for table in MPI if self._has(table)]
        ranges = joined([marked, *calls])
        if not len(ranges) and not self._has(KERNELS) and not self._has(GRAPHS):
            remedy = f"; {RECORD} while kernels run on the GPU"
            never = f" that ends ({endless[0]!r} never ends); record until the step has ended" if endless else ""
            raise ConfigError(f"{self.path} holds no kernel and no NVTX range{never or remedy}")
        return ranges

    def _mpi_calls(self, table: str) -> Ranges:
        number, start, end, thread = self._read(table, "textId", "start", "end", "globalTid")
        used, codes = np.unique(number, return_inverse=True)
        names = [self.names.get(each, f"MPI call {each}") for each in used.tolist()]
        return Ranges(Categorical(names, codes), _s(start), _s(end), thread).take(end != UNKNOWN)

    def _marked(self) -> tuple[Ranges, list[str]]:
        """Return the ranges of NVTX, and the names of those without an end, which are left out."""
        text, text_id = (self._column(NVTX, name) for name in ("text", "textId"))
        ranges = f"eventType IN ({PUSH_POP}, {START_END})"
        start, end, thread = self._read(NVTX, "start", "end", "globalTid", where=ranges)
        wanted = f"{self._of_process(NVTX)} AND {ranges} ORDER BY rowid"
        query = f"SELECT ifnull({text}, {text_id}) FROM {NVTX} WHERE {wanted}"
        # A name is either the text itself or an id in StringIds.
        texts = (name for (name,) in self.database.execute(query))
        named = Categorical.of(n if isinstance(n, str) else self.names.get(n, f"range {n}") for n in texts)
        ended = end != UNKNOWN
        if endless := [name for name, ends in zip(named, ended.tolist(), strict=True) if not ends]:
            self.limitations.append(never_end(endless))
        return Ranges(named, _s(start), _s(end), thread).take(ended), endless

    def _overheads(self) -> list[tuple[float, float]]:
        table = "PROFILER_OVERHEAD"
        if not {"start", "end"} <= {*self.columns.get(table, ())} or not self._has(table):
            return []
        start, end = self._read(table, "start", "end", where="end IS NOT NULL")
        return list(_rows(_s(start), _s(end)))


def _joined(chunks: Iterable[list[Ints]], columns: int) -> list[Ints]:
    """Join the chunks into columns, one column at a time, so that only one is in memory twice."""
    parts: list[list[Ints]] = [[np.empty(0, np.int64)] for _ in range(columns)]
    for chunk in chunks:
        for part, column in zip(parts, chunk, strict=True):
            part.append(column)
    joined: list[Ints] = []
    for part in parts:
        joined.append(np.concatenate(part))
        part.clear()
    return joined


def _numbered(columns: Sequence[Ints], numbers: dict[tuple[int, ...], int]) -> list[Ints]:
    """Return a chunk of kernels with the columns of their functions replaced by one column of numbers.

    There are few functions with many calls, so their numbers take a tenth of the memory.
    """
    *columns, function = *columns[:6], columns[6:]
    first, codes = distinct(*function)
    rows = _rows(*(column[first] for column in function))
    of_chunk = np.array([numbers.setdefault(row, len(numbers)) for row in rows], np.int64)
    return [*columns, of_chunk[codes]]


def _graph_name(graph: Any) -> Any:
    """Return the name of a graph as a negative number, because ids of texts in the export are not negative."""
    return -2 - graph


def _copy_name(direction: int, *memory: int) -> str:
    """Return a copy's name from its direction and the kinds of memory at both sides."""
    host = [name for number, name in enumerate(HOST_MEMORY) if number in memory]
    sides = DIRECTIONS[direction] if 0 <= direction < len(DIRECTIONS) else ""
    return f"{sides} {UNIFIED}" if sides and direction >= FIRST_UNIFIED else " ".join(filter(None, (sides, *host[:1])))


def _numbers(text: bytes, count: int, table: str) -> Ints:
    with warnings.catch_warnings(action="error"):
        try:
            numbers = np.fromstring(text, np.int64, sep=",")
        except (DeprecationWarning, ValueError):
            numbers = np.empty(0, np.int64)
    if len(numbers) != count:
        raise sqlite3.DatabaseError(f"{table} has a text where a number belongs")
    return numbers


def _rows(*columns: Ints | Floats) -> Iterator[tuple[Any, ...]]:
    return zip(*(column.tolist() for column in columns), strict=True)


def _s(nanoseconds: Ints) -> Floats:
    return np.multiply(nanoseconds, 1e-9, dtype=np.float64)


def never_end(names: list[str]) -> str:
    listed = ", ".join(repr(name) for name in dict.fromkeys(names[:3]))
    return (
        f"left out: {counted(len(names), 'range')} without an end ({listed}{' …' if len(names) > 3 else ''}); "
        "record until they have ended"
    )
