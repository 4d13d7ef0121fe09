"""Nsight Systems: the file that `nsys export -t sqlite` writes, or a .nsys-rep where nsys can export it. Floor 0.

The file is opened read-only and trusted in nothing. Versions differ in which tables and columns there are, and an
export leaves out tables without rows: what is missing is a limitation, and an error only where no table can be made.
Schema: "SQLite Schema Reference" in the user guide of Nsight Systems.
"""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any

from cs_systems.analysis.stalls import stalls
from cs_systems.analysis.trace import Call, Copy, Function, Kernel, Range, Recording
from cs_systems.config import ConfigError

KERNELS, RUNTIME, NVTX = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS"
COPIES = {"memcpy": "CUPTI_ACTIVITY_KIND_MEMCPY", "memset": "CUPTI_ACTIVITY_KIND_MEMSET"}
GRAPHS = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
PUSH_POP, START_END = 59, 60
PROCESS_MASK = ~0xFFFFFF  # of a globalTid: leaves the globalPid
EXPORT = ("nsys", "export", "-t", "sqlite", "--lazy=false", "--force-overwrite=true")
# The columns of a kernel that make its Function, in its order.
_FUNCTION = ("demangledName", "gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ", "registersPerThread")
_SHARED = ("staticSharedMemory", "dynamicSharedMemory")


def read(path: Path, process: int | None = None) -> Recording:
    """The recording in an SQLite export. `process`: which one, by its pid, where there are several."""
    with closing(_open(path)) as database:
        try:
            return _Reader(database, path, process).recording()
        except sqlite3.OperationalError as error:
            raise ConfigError(
                f"{path} lacks what the exports of nsys 2022.4 and newer have ({error}): export it with such a version"
            ) from None
        except sqlite3.DatabaseError as error:
            raise ConfigError(f"{path} is a damaged export ({error}): export it again from the .nsys-rep") from None


@contextmanager
def exported(report: Path) -> Iterator[Path]:
    """The SQLite export of a .nsys-rep, in a folder that is gone afterwards."""
    if shutil.which(EXPORT[0]) is None:
        raise ConfigError(
            f"{report} has to be exported, and nsys is not on the PATH: put it there, or run where it is "
            f"{' '.join(EXPORT)} {report.name}, and analyse the .sqlite"
        )
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "export.sqlite"
        done = subprocess.run([*EXPORT, "-o", target, report.resolve()], capture_output=True, text=True)
        if done.returncode or not target.is_file():
            said = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
            raise ConfigError(
                f"nsys cannot export {report}: {said}; an nsys as new as the one that recorded it is needed"
            )
        yield target


def _open(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)
    database.text_factory = lambda raw: raw.decode("utf-8", "replace")
    database.execute("PRAGMA trusted_schema=OFF")
    database.execute("PRAGMA temp_store=MEMORY")
    return database


class _Reader:
    """One pass over an open export; it gathers what the file does not tell in `limitations`."""

    def __init__(self, database: sqlite3.Connection, path: Path, process: int | None) -> None:
        self.database = database
        self.path = path
        self.limitations: list[str] = []
        # A view could hide any computation: tables alone are read.
        tables = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        self.columns = {
            name: [column[1] for column in database.execute(f'PRAGMA table_info("{name}")')]
            for (name,) in tables
            if name.isidentifier()
        }
        self._require(KERNELS, "no kernel", "record with --trace=cuda,nvtx, and within the part that uses the GPU")
        self._require(NVTX, "no NVTX range", "record with --trace=cuda,nvtx, and mark step, forward, backward …")
        self.process = self._process(process)
        self.names = dict(database.execute("SELECT id, value FROM StringIds")) if "StringIds" in self.columns else {}

    def _require(self, table: str, lacks: str, remedy: str) -> None:
        if not self._rows(table):
            foreign = "" if {"StringIds", "META_DATA_EXPORT"} & self.columns.keys() else " (is it an export of nsys?)"
            raise ConfigError(f"{self.path} holds {lacks}{foreign}: {remedy}")

    def _rows(self, table: str) -> int:
        if table not in self.columns:
            return 0
        return int(self.database.execute(f"SELECT count(*) FROM {table}").fetchone()[0])

    def _column(self, table: str, name: str, alias: str = "") -> str:
        """The column, or NULL where this version of nsys has none."""
        return (f"{alias}.{name}" if alias else name) if name in self.columns.get(table, ()) else "NULL"

    def _process(self, wanted: int | None) -> int | None:
        """The globalPid whose events are read; None where the export names none."""
        if "globalPid" not in self.columns[KERNELS]:
            self.limitations.append("this version of nsys does not name the process of a kernel: one is assumed")
            return None
        found: dict[int | None, int] = dict(
            self.database.execute(f"SELECT globalPid, count(*) FROM {KERNELS} GROUP BY globalPid")
        )
        pids = {(number or 0) >> 24 & 0xFFFFFF: number for number in found}
        if wanted is None and len(pids) == 1:
            return next(iter(pids.values()))
        if wanted in pids:
            return pids[wanted]
        listed = ", ".join(f"{pid} ({found[number]} kernels)" for pid, number in sorted(pids.items()))
        reason = f"{len(pids)} processes" if wanted is None else f"no kernel of process {wanted}"
        raise ConfigError(f"{self.path} holds {reason}: choose one with --process: {listed}")

    def recording(self) -> Recording:
        kernels = self._kernels()
        ranges = self._ranges()
        if whole := self._rows(GRAPHS):
            self.limitations.append(
                f"{whole} launches of CUDA graphs were recorded as a whole and their kernels are missing: "
                "record with --cuda-graph-trace=node"
            )
        gpus = "TARGET_INFO_GPU"
        devices = self.database.execute(f"SELECT id, name FROM {gpus}") if self._rows(gpus) else ()
        return Recording(
            source=str(self.path),
            profiler="nsys",
            devices=dict(devices),
            kernels=kernels,
            copies=[copy for kind, table in COPIES.items() for copy in self._copies(kind, table)],
            calls=self._calls(),
            ranges=ranges,
            overheads=self._overheads(),
            ops=None,
            limitations=tuple(self.limitations),
        )

    def _of_process(self, table: str, alias: str = "") -> str:
        """A condition that selects the process by whichever column the table has."""
        prefix = f"{alias}." if alias else ""
        if self.process is None:
            return "1"
        if "globalPid" in self.columns[table]:
            return f"{prefix}globalPid IS {self.process}"
        return f"({prefix}globalTid & {PROCESS_MASK}) = {self.process}" if "globalTid" in self.columns[table] else "1"

    def _kernels(self) -> list[Kernel]:
        """In order of their start. A row has the columns of the Function, those of the Kernel, and the rowid."""
        kernels: list[Kernel] = []
        functions: dict[tuple[int | None, ...], Function] = {}
        last = None
        for row in self._launched():
            if row[-1] == last:  # a call and the one inside it can carry one correlationId: the outer comes first
                continue
            last = row[-1]
            function = functions.get(key := row[:9])
            if function is None:
                function = functions[key] = self._function(*key)
            kernels.append(Kernel(function, *row[9:-1]))
        kernels.sort(key=itemgetter(1))
        return kernels

    def _launched(self) -> Iterator[tuple[Any, ...]]:
        """Kernels, each with its launch: the call with its correlationId in its process."""
        function = [self._column(KERNELS, name, "k") for name in _FUNCTION]
        shared = " + ".join(self._column(KERNELS, name, "k") for name in _SHARED)
        device, stream, correlation = (
            self._column(KERNELS, name, "k") for name in ("deviceId", "streamId", "correlationId")
        )
        pid = (self.process or 0) >> 24 & 0xFFFFFF
        kernel = ["k.start * 1e-9", "k.end * 1e-9", device, stream, str(pid), correlation]
        launch = [
            "r.globalTid",
            "r.start * 1e-9",
            "r.end * 1e-9",
            f"{self._column(KERNELS, 'graphNodeId', 'k')} IS NOT NULL",
        ]
        launches = "(SELECT NULL AS correlationId, NULL AS globalTid, NULL AS start, NULL AS end)"
        if self._rows(RUNTIME):
            launches = f"(SELECT correlationId, globalTid, start, end FROM {RUNTIME} WHERE {self._of_process(RUNTIME)})"
        else:
            self.limitations.append(
                "no CUDA call was recorded, so no kernel is tied to a phase: record with --trace=cuda,nvtx"
            )
        return self.database.execute(
            f"SELECT {', '.join([*function, shared, *kernel, *launch, 'k.rowid'])} FROM {KERNELS} k "
            f"LEFT JOIN {launches} r ON r.correlationId = {correlation} WHERE {self._of_process(KERNELS, 'k')}"
        )

    def _function(self, name: int | None, *shape: int | None) -> Function:
        *sizes, registers, shared = shape
        known = [size for size in sizes if size is not None]
        grid, block = ((*known[:3],), (*known[3:],)) if len(known) == 6 else (None, None)
        return Function(self.names.get(name, f"kernel {name}"), grid, block, registers, shared)  # type: ignore[arg-type]

    def _copies(self, kind: str, table: str) -> Iterator[Copy]:
        if not self._rows(table):
            return
        fields = ", ".join(self._column(table, name) for name in ("deviceId", "streamId", "bytes"))
        rows = self.database.execute(f"SELECT start, end, {fields} FROM {table} WHERE {self._of_process(table)}")
        for start, end, device, stream, size in rows:
            yield Copy(kind, start * 1e-9, end * 1e-9, device or 0, stream or 0, size)

    def _calls(self) -> list[Call]:
        if not self._rows(RUNTIME):
            return []
        wanted = ", ".join(str(number) for number, name in self.names.items() if stalls(name))
        rows = self.database.execute(
            f"SELECT nameId, start, end, globalTid, globalTid >> 24 & 0xFFFFFF FROM {RUNTIME} "
            f"WHERE nameId IN ({wanted}) AND {self._of_process(RUNTIME)} ORDER BY start"
        )
        return [Call(self.names[name], start * 1e-9, end * 1e-9, *of) for name, start, end, *of in rows]

    def _ranges(self) -> list[Range]:
        fields = ", ".join(self._column(NVTX, name) for name in ("text", "textId"))
        rows = self.database.execute(
            f"SELECT start, end, globalTid, globalTid >> 24 & 0xFFFFFF, {fields} FROM {NVTX} "
            f"WHERE eventType IN ({PUSH_POP}, {START_END}) AND {self._of_process(NVTX)} ORDER BY start"
        )
        ranges, endless = [], []
        for start, end, thread, pid, text, text_id in rows:
            name = text if text is not None else self.names.get(text_id, f"range {text_id}")
            if end is None:
                endless.append(name)
            else:
                ranges.append(Range(name, start * 1e-9, end * 1e-9, thread, pid))
        if endless:
            self.limitations.append(never_end(endless))
        if not ranges:
            never = f" that ends ({endless[0]!r} never does): let the recording go on past the step" if endless else ""
            raise ConfigError(f"{self.path} holds no NVTX range{never or ': mark step, forward, backward …'}")
        return ranges

    def _overheads(self) -> list[tuple[float, float]]:
        table = "PROFILER_OVERHEAD"
        if not {"start", "end"} <= {*self.columns.get(table, ())}:
            return []
        rows = self.database.execute(
            f"SELECT start, end FROM {table} WHERE end IS NOT NULL AND {self._of_process(table)}"
        )
        return [(start * 1e-9, end * 1e-9) for start, end in rows]


def never_end(names: list[str]) -> str:
    listed = ", ".join(repr(name) for name in dict.fromkeys(names[:3]))
    return (
        f"{len(names)} range(s) never end ({listed}{' …' if len(names) > 3 else ''}) and are left out: "
        "let the recording go on until they are closed"
    )
