"""Reader of SQLite exports of Nsight Systems: tables to a `Trace`.

The file is opened read-only and treated as untrusted. Tables and columns differ between versions, and an export omits
empty tables: missing data is a limitation, and an error only where no table can be made.

Source: "SQLite Schema Reference" in the user guide of Nsight Systems.
"""

from __future__ import annotations

import sqlite3
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from cs_systems.config import ConfigError
from cs_systems.core.units import counted
from cs_systems.readers import _sqlite as sqlite
from cs_systems.readers._lost_kernels import explains, launches_kernel, lost_launches
from cs_systems.readers._processes import chosen_process, ranges_elsewhere
from cs_systems.readers._stalls import stalls
from cs_systems.readers.forms.columns import NO_RANGES, UNKNOWN, Categorical, Floats, Ints, Ranges, distinct
from cs_systems.readers.forms.jobs import Job
from cs_systems.readers.forms.trace import NO_KERNELS, WHOLE_GRAPH, Allocations, Call, Copy, Function, Kernels, Trace

KERNELS, RUNTIME, NVTX = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS"
COPIES = {"memcpy": "CUPTI_ACTIVITY_KIND_MEMCPY", "memset": "CUPTI_ACTIVITY_KIND_MEMSET"}
MEMORY = "CUDA_GPU_MEMORY_USAGE_EVENTS"  # recorded with --cuda-memory-usage=true
FREED, ON_THE_HOST = 1, "0, 1"  # ENUM_CUDA_DEV_MEM_EVENT_OPER; ENUM_CUDA_MEM_KIND: pageable, pinned
GRAPHS = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"  # recorded with --cuda-graph-trace=graph, nsys's default
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
}
MOST_ROWS = 40_000_000  # limit for these tables: about 6 GB of memory
PUSH_POP, START_END = 59, 60
NODES = "--cuda-graph-trace=node"
LATEST = np.iinfo(np.int64).max
PROCESS_MASK = ~0xFFFFFF  # applied to a globalTid, gives the globalPid
CHUNK = 1 << 18  # rows converted to text at a time
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
                f"{path} cannot be read as an export of {READABLE} ({error}); export the report with an nsys of these "
                "years, to a local disk"
            ) from None
        except MemoryError:
            raise sqlite.too_large(path) from None
        except (sqlite3.DatabaseError, OverflowError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is a damaged export ({error}); export it again from the .nsys-rep") from None


def processes(path: Path) -> list[int]:
    """Return the pids of the processes that ran kernels, by the number of their first device."""
    query = f"SELECT globalPid >> 24 & 16777215 AS pid, min(deviceId) FROM {KERNELS} GROUP BY 1 ORDER BY 2, 1"
    try:
        with closing(sqlite.connect(path)) as database:
            return [pid for pid, _ in database.execute(query) if isinstance(pid, int)]
    except (sqlite3.DatabaseError, UnicodeDecodeError):  # missing, damaged or without kernels: reading it reports which
        return []


class _Reader:
    """Reader of one open export; it collects what the file lacks in `limitations`."""

    def __init__(self, database: sqlite3.Connection, path: Path, process: int | None) -> None:
        self.database = database
        self.path = path
        self.limitations: list[str] = []
        self.columns = sqlite.columns(database)
        self._refuse()
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
                    f"{READABLE} have; export the report with an nsys of these years"
                )
        if (rows := sum(map(self._rows_of, present))) > MOST_ROWS:
            raise ConfigError(
                f"{self.path} holds {rows:,} kernels, calls and ranges, but at most {MOST_ROWS:,} are read; record "
                "fewer steps, with nsys profile --capture-range=cudaProfilerApi, and torch.cuda.profiler.start() and "
                "stop() around them"
            )
        kernels, ranges = self._has(KERNELS) or self._has(GRAPHS), self._has(NVTX)
        if not kernels and (not ranges or any(map(self._has, (RUNTIME, *COPIES.values())))):
            if not {"StringIds", "META_DATA_EXPORT", *REQUIRED} & self.columns.keys():
                raise ConfigError(
                    f"{self.path} is an SQLite file without tables of a profiler; give an export of nsys (.sqlite) or "
                    "a database of rocprofv3 (.db)"
                )
            raise ConfigError(
                f"{self.path} holds no kernel; record with nsys profile --trace=cuda,nvtx while kernels run on the "
                "GPU, and stop other profilers (ncu, DCGM)"
            )

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
        """Return whole numbers of the process's rows in file order, a column for each expression; NULL is UNKNOWN."""
        return _joined(self._chunks(table, *expressions, where=where), len(expressions))

    def _chunks(self, table: str, *expressions: str, where: str = "1") -> Iterator[list[Ints]]:
        """Yield what `_read` returns in chunks of rows, so that a large table need not fit into memory.

        Python's sqlite3 takes over a microsecond per row. Here SQLite joins each column into one text, and numpy
        parses it, which takes half the time and creates no object for each number.
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
        table = next((table for table in (KERNELS, GRAPHS) if self._has(table)), NVTX)
        if table == NVTX:
            what, owner = "range", f"ifnull(globalTid, 0) & {PROCESS_MASK}"
        elif "globalPid" not in self.columns[table]:
            self.limitations.append("this version of nsys does not record a kernel's process; one process is assumed")
            return None
        # Counting by process needs a sort, so skip it where there is a single process.
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
        pid, note = chosen_process(self.path, counts, what, wanted, can_merge=self._has(KERNELS))
        self.limitations += [note] if note else []
        return int(pids[pid])

    def trace(self) -> Trace:
        kernels = self._kernels()
        ranges = self._ranges()
        copies = [copy for kind, table in COPIES.items() for copy in self._copies(kind, table)]
        return Trace(
            source=str(self.path),
            profiler="nsys",
            devices=self._devices(),
            kernels=kernels,
            copies=copies,
            calls=self._calls(),
            ranges=ranges,
            overheads=self._overheads(),
            ops=None,
            limitations=tuple(self.limitations),
            allocations=self._allocations(),
            lost_launches=self._lost_launches(kernels),
            job=self._job(),
        )

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

    def _devices(self) -> dict[int, str]:
        """Return the names of the GPUs by CUDA device number, which CUDA_VISIBLE_DEVICES can change."""
        by_id = self._texts("TARGET_INFO_GPU", "name")
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
        """Return the globalPid of the process to take ranges from: the only one with ranges if this one has none."""
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
        numbers: dict[tuple[int, ...], int] = {}
        columns = _joined((_numbered(chunk, numbers) for read in found for chunk in read()), 7)
        order = np.argsort(columns[0], kind="stable")
        order = order[(columns[1] >= columns[0])[order]]
        if damaged := len(columns[0]) - len(order):
            self.limitations.append(f"{damaged} kernels that have no end, or end before they start, are left out")
        for i, column in enumerate(columns):  # one at a time, so that only one column is in memory twice
            columns[i] = column[order]
        start, end, device, stream, correlation, graph, codes = columns
        functions = [self._function(*row) for row in numbers]
        thread, launched, returned = self._launches(correlation)
        return Kernels(
            Categorical(functions, codes), _s(start), _s(end), device, stream, thread, launched, returned, graph > 0
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

    def _launches(self, correlation: Ints) -> tuple[Ints, Floats, Floats]:
        """Return (thread, start in s, end in s) of the call with each kernel's correlationId."""
        found = self._calls_of(correlation)
        if found is None:
            self.limitations.append(
                "no CUDA call was recorded, so no kernel has a phase; record with nsys profile --trace=cuda,nvtx"
            )
            nowhere = np.full(len(correlation), np.nan)
            return np.full(len(correlation), UNKNOWN), nowhere, nowhere
        return found

    def _calls_of(self, correlation: Ints) -> tuple[Ints, Floats, Floats] | None:
        """Return (thread, start in s, end in s) of the call with each correlationId; None if no call was recorded."""
        if not self._has(RUNTIME):
            return None
        wanted, which = np.unique(correlation, return_inverse=True)
        begins = np.full(len(wanted), LATEST)
        thread, end = np.full(len(wanted), UNKNOWN), np.full(len(wanted), UNKNOWN)
        any_call = False
        fields = ("correlationId", "globalTid", "start", "end")
        for call, of_thread, starts, ends in self._chunks(RUNTIME, *fields, where="correlationId >= 0"):
            any_call = True
            at = np.searchsorted(wanted, call)
            at[at == len(wanted)] = 0
            # A call and one inside it can share a correlationId; take the outer one, which begins first.
            mine = np.flatnonzero((wanted[at] == call) & (starts < begins[at])) if len(wanted) else at[:0]
            mine = mine[np.argsort(-starts[mine], kind="stable")]  # for repeated indices, the last assignment wins
            begins[at[mine]], thread[at[mine]], end[at[mine]] = starts[mine], of_thread[mine], ends[mine]
        if not any_call:
            return None
        found = begins < LATEST
        launched, returned = np.where(found, _s(begins), np.nan), np.where(found, _s(end), np.nan)
        return thread[which], launched[which], returned[which]

    def _function(self, name: int, *shape: int) -> Function:
        *sizes, registers, shared = (None if value == UNKNOWN else value for value in shape)
        known = [size for size in sizes if size is not None]
        grid, block = ((*known[:3],), (*known[3:],)) if len(known) == 6 else (None, None)
        return Function(self.names.get(name, f"kernel {name}"), grid, block, registers, shared)  # type: ignore[arg-type]

    def _copies(self, kind: str, table: str) -> Iterator[Copy]:
        if self._has(table):
            fields = (self._column(table, name) for name in ("deviceId", "streamId", "bytes"))
            start, end, *rest = self._read(table, "start", "end", *fields)
            if damaged := int((end < start).sum()):
                self.limitations.append(f"{damaged} {kind}s that have no end, or end before they start, are left out")
            whole = end >= start
            rest = [column[whole] for column in rest]
            for begin, stop, device, stream, size in _rows(_s(start[whole]), _s(end[whole]), *rest):
                yield Copy(kind, begin, stop, max(device, 0), max(stream, 0), None if size == UNKNOWN else size)

    def _calls(self) -> list[Call]:
        if not self._has(RUNTIME):
            return []
        return self._calls_named([number for number, name in self.names.items() if stalls(name)])

    def _calls_named(self, names: Sequence[int]) -> list[Call]:
        fields = ("nameId", "start", "end", "globalTid")
        name, start, end, thread = self._read(RUNTIME, *fields, where=f"nameId IN ({', '.join(map(str, names))})")
        return [Call(self.names[number], *row) for number, *row in _rows(name, _s(start), _s(end), thread)]

    def _lost_launches(self, kernels: Kernels) -> Floats:
        launches, others = ([n for n, name in self.names.items() if of(name)] for of in (launches_kernel, explains))
        if not launches or not self._has(RUNTIME):
            return np.empty(0)
        # A call that failed launched nothing.
        done = f"ifnull({self._column(RUNTIME, 'returnValue')}, 0) = 0"
        where = f"nameId IN ({', '.join(map(str, launches))}) AND {done}"
        correlation, start, end, thread = self._read(RUNTIME, "correlationId", "start", "end", "globalTid", where=where)
        of_device = [table for table in (KERNELS, *COPIES.values()) if self._has(table)]
        ran = [self._read(table, self._column(table, "correlationId"))[0] for table in of_device]
        has_run = np.isin(correlation, np.concatenate([np.empty(0, np.int64), *ran]))
        return lost_launches(kernels, _s(start), _s(end), thread, has_run, self._calls_named(others))

    def _allocations(self) -> Allocations | None:
        if MEMORY not in self.columns:
            return None
        fields = ("start", "bytes", "memoryOperationType", "address", self._column(MEMORY, "correlationId"))
        columns = self._read(MEMORY, *fields, where=f"memKind NOT IN ({ON_THE_HOST})")
        order = np.argsort(columns[0], kind="stable")
        start, size, operation, address, correlation = (column[order] for column in columns)
        calls = self._calls_of(correlation) if len(start) else None  # read only if needed: calls are many
        thread = np.full(len(start), UNKNOWN) if calls is None else calls[0]
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
        if NVTX not in self.columns:
            return NO_RANGES
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
        if not ended.any() and not self._has(KERNELS) and not self._has(GRAPHS):
            remedy = "; record with nsys profile --trace=cuda,nvtx while kernels run on the GPU"
            never = f" that ends ({endless[0]!r} never ends); record until the step has ended" if endless else ""
            raise ConfigError(f"{self.path} holds no kernel and no NVTX range{never or remedy}")
        return Ranges(named, _s(start), _s(end), thread).take(ended)

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

    Few functions run many times, so their numbers take a tenth of the memory.
    """
    *columns, function = *columns[:6], columns[6:]
    first, codes = distinct(*function)
    rows = _rows(*(column[first] for column in function))
    of_chunk = np.array([numbers.setdefault(row, len(numbers)) for row in rows], np.int64)
    return [*columns, of_chunk[codes]]


def _graph_name(graph: Any) -> Any:
    """Return a negative number for the name of a graph, because ids of texts in the export are not negative."""
    return -2 - graph


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
