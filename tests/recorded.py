"""Fixtures: real traces of three training steps on one H200, and small traces in the profilers' formats."""

from __future__ import annotations

import gzip
import json
import pickle
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from cs_systems.analysis.attribution.profile import Profile, profile
from cs_systems.readers import read
from cs_systems.readers.forms.trace import Trace

DATA = Path(__file__).parent / "data"
MAIN, AUTOGRAD = (7 << 24) + 1, (7 << 24) + 2  # globalTid of two threads of process 7
Event = dict[str, Any]


@pytest.fixture(scope="session")
def nsys_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("nsys") / "nsys_h200_step.sqlite"
    path.write_bytes(gzip.decompress((DATA / "nsys_h200_step.sqlite.gz").read_bytes()))
    return path


@pytest.fixture(scope="session")
def kineto_path() -> Path:
    return DATA / "kineto_h200_step.json.gz"


@pytest.fixture(scope="session")
def kineto_events(kineto_path: Path) -> list[Event]:
    events: list[Event] = json.loads(gzip.decompress(kineto_path.read_bytes()))["traceEvents"]
    return events


@pytest.fixture(scope="session")
def nsys_trace(nsys_path: Path) -> Trace:
    return read(nsys_path)


@pytest.fixture(scope="session")
def kineto_trace(kineto_path: Path) -> Trace:
    return read(kineto_path)


@pytest.fixture(scope="session")
def nsys_profile(nsys_trace: Trace) -> Profile:
    return profile(nsys_trace)


@pytest.fixture(scope="session")
def kineto_profile(kineto_trace: Trace) -> Profile:
    return profile(kineto_trace)


@pytest.fixture
def export(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes an export of nsys.

    Its arguments are ranges (name, start, end, thread), launches (start, end, thread, correlation), kernels (name,
    start, end, correlation) and other calls (name, start, end, thread), with times in ns.
    """

    def write(
        ranges: Iterable[Sequence[Any]] = (("step", 0, 1000, MAIN),),
        launches: Iterable[Sequence[Any]] = ((100, 110, MAIN, 1),),
        kernels: Iterable[Sequence[Any]] = (("gemm", 200, 300, 1),),
        calls: Iterable[Sequence[Any]] = (),
        copies: Iterable[Sequence[Any]] = (),
        name: str = "made.sqlite",
    ) -> Path:
        strings: dict[str, int] = {}

        def text(value: str) -> int:
            return strings.setdefault(value, len(strings) + 1)

        path = tmp_path / name
        path.unlink(missing_ok=True)
        database = sqlite3.connect(path)
        database.executescript(SCHEMA)
        for label, start, end, thread in ranges:
            database.execute("INSERT INTO NVTX_EVENTS VALUES (?, ?, 59, ?, NULL, ?)", (start, end, thread, text(label)))
        runtime = "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, ?)"
        for start, end, thread, correlation in launches:
            database.execute(runtime, (start, end, thread, correlation, text("cudaLaunchKernel_v7000")))
        for label, start, end, thread in calls:
            database.execute(runtime, (start, end, thread, 0, text(label)))
        for label, start, end, correlation, *rest in kernels:
            pid, graph = [*rest, 7, None][:2] if rest else (7, None)
            rows = "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES"
            database.execute(
                f"{rows} (?, ?, 0, 7, ?, ?, ?, 32, 8, 4, 2, 128, 1, 1, 100, 24, ?)",
                (start, end, correlation, pid << 24, text(label), graph),
            )
        for start, end in copies:
            database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (?, ?, 0, 7, ?, 64)", (start, end, 7 << 24))
        database.executemany(
            "INSERT INTO StringIds VALUES (?, ?)", [(number, value) for value, number in strings.items()]
        )
        database.commit()
        database.close()
        return path

    return write


SCHEMA = """
CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT);
CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, eventType INTEGER, globalTid INTEGER, text TEXT, textId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME
    (start INTEGER, end INTEGER, globalTid INTEGER, correlationId INTEGER, nameId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL
    (start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER, correlationId INTEGER, globalPid INTEGER,
     demangledName INTEGER, registersPerThread INTEGER, gridX INTEGER, gridY INTEGER, gridZ INTEGER, blockX INTEGER,
     blockY INTEGER, blockZ INTEGER, staticSharedMemory INTEGER, dynamicSharedMemory INTEGER, graphNodeId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY
    (start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER, globalPid INTEGER, bytes INTEGER);
"""


@pytest.fixture
def change(nsys_path: Path, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that copies the real export and runs SQL statements on the copy."""

    def changed(*statements: str) -> Path:
        path = tmp_path / "changed.sqlite"
        path.write_bytes(nsys_path.read_bytes())
        database = sqlite3.connect(path)
        for statement in statements:
            database.execute(statement)
        database.commit()
        database.close()
        return path

    return changed


@pytest.fixture
def write_trace(tmp_path: Path) -> Callable[[Sequence[Event]], Path]:
    """Return a function that writes events as a Chrome trace."""

    def write(events: Sequence[Event]) -> Path:
        path = tmp_path / "trace.json"
        path.write_text(json.dumps({"deviceProperties": [{"id": 0, "name": "H200"}], "traceEvents": events}))
        return path

    return write


BLOCKS_NORMS = 2  # norms in a block of the traced model, which ends without a norm


@pytest.fixture(scope="session")
def with_blocks(kineto_events: list[Event]) -> list[Event]:
    """Return the real Kineto events with an added range around each block's forward.

    A block begins with every second norm of a forward and lasts to the next block's, or to the end of the layers.
    """
    forwards = [e for e in kineto_events if e.get("cat") == "user_annotation" and e["name"] == "forward"]
    added = []
    for forward in forwards:
        end = forward["ts"] + forward["dur"]
        ops = [e for e in kineto_events if e.get("cat") == "cpu_op" and forward["ts"] <= e["ts"] < end]
        starts = sorted(e["ts"] for e in ops if e["name"] == "aten::rms_norm")[::BLOCKS_NORMS]
        head = max(e["ts"] for e in ops if e["name"] == "aten::linear")
        for number, (start, stop) in enumerate(zip(starts, [*starts[1:], head], strict=True)):
            where = {"ts": start - 0.5, "dur": stop - start - 1.0}
            added.append(forward | where | {"name": f"block {number}"})
    return [*kineto_events, *added]


@pytest.fixture(scope="session")
def snapshot_path() -> Path:
    return DATA / "snapshot_h200_step.pickle.gz"


@pytest.fixture(scope="session")
def snapshot_data(snapshot_path: Path) -> Event:
    """Return the real snapshot, read with plain pickle because the file is trusted."""
    data: Event = pickle.loads(gzip.decompress(snapshot_path.read_bytes()))
    return data


@pytest.fixture
def write_snapshot(tmp_path: Path) -> Callable[..., Path]:
    def write(data: object, name: str = "made.pickle") -> Path:
        path = tmp_path / name
        path.write_bytes(pickle.dumps(data))
        return path

    return write
