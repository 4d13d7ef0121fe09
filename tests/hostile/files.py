"""Hostile and damaged files, made by each test; none is stored."""

from __future__ import annotations

import gzip
import json
import pickle
import sqlite3
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CANARY = "owned"
# Names with markup or commands for terminals, HTML, spreadsheets, LaTeX, Typst and Markdown.
NAMES = (
    "<script>alert(1)</script>", "\x1b]0;title\x07\x1b[2J", "=cmd|' /C calc'!A1", "@SUM(1)", "\\input{/etc/passwd}",
    "#read(\"/etc/passwd\")", "$x^2$ `code` | cell |", "\u202egnp.exe", "line\r\nbreak\ttab\0nul",
)  # fmt: skip


def small_trace(name: str = "gemm", range_name: str = "forward") -> dict[str, Any]:
    """Return a trace of torch.profiler with one kernel in one step."""

    def event(cat: str, label: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
        return {"ph": "X", "cat": cat, "name": label, "pid": 7, "tid": 1, "ts": ts, "dur": dur, "args": args}

    where = {"device": 0, "stream": 7, "correlation": 1, "grid": [1, 1, 1], "block": [32, 1, 1]}
    return {
        "deviceProperties": [{"id": 0, "name": name}],
        "traceEvents": [
            event("user_annotation", "step", 0, 100),
            event("user_annotation", range_name, 1, 90),
            event("cuda_runtime", "cudaLaunchKernel", 10, 5, correlation=1),
            event("kernel", name, 20, 30, **where),
        ],
    }


def small_snapshot(name: str = "train") -> dict[str, Any]:
    """Return a snapshot with one allocation that is never freed."""
    frames = [{"filename": f"{name}.py", "line": 3, "name": name}]
    block = {"size": 512, "requested_size": 500, "state": "active_allocated", "address": 4096, "frames": frames}
    segment = {"address": 4096, "total_size": 512, "device": 0, "segment_type": "small", "blocks": [block]}
    event = {"action": "alloc", "addr": 4096, "size": 500, "time_us": 5, "frames": frames}
    marks = [{"name": name, "stage": stage, "time_us": at, "device": 0} for stage, at in (("START", 1), ("END", 9))]
    return {"segments": [segment], "device_traces": [[event]], "external_annotations": marks}


def small_failure() -> dict[str, Any]:
    """Return a snapshot in which a request fails while an allocation has a text of the program."""
    made = small_snapshot()
    frames = made["device_traces"][0][0]["frames"]
    failed = {"action": "oom", "size": 1 << 30, "device_free": 1 << 20, "time_us": 6, "frames": frames}
    mapped = {"action": "segment_map", "addr": 8192, "size": 512, "time_us": 7, "frames": []}
    made["device_traces"][0][0]["user_metadata"] = "weights"
    made["device_traces"][0] += [failed, mapped]
    return made


def small_scopes() -> list[dict[str, Any]]:
    """Return a profile of Proton with one kernel in one scope."""

    def node(name: str, metrics: dict[str, Any], *children: dict[str, Any]) -> dict[str, Any]:
        return {"children": [*children], "frame": {"name": name, "type": "function"}, "metrics": metrics}

    where = {"count": 1, "device_id": "0", "device_type": "CUDA"}
    kernel = node("gemm", {"time (ns)": 5, "flops8": 4, "bytes": 4, **where})
    metadata = node("__proton_launch_metadata", {}, node("sum", {"count": 1}))
    device = {"CUDA": {"0": {"arch": "90", "num_sms": 132, "clock_rate": 1980000}}}
    return [node("ROOT", {"count": 0}, node("step", {}, kernel, metadata)), device]


def small_export(path: Path, *statements: str) -> Path:
    """Write an export of nsys with one kernel in one step, and run `statements` on it."""
    path.unlink(missing_ok=True)
    database = sqlite3.connect(path)
    database.executescript(
        """
        CREATE TABLE StringIds (id, value);
        INSERT INTO StringIds VALUES (1, 'step'), (2, 'gemm'), (3, 'cudaLaunchKernel_v7000');
        CREATE TABLE NVTX_EVENTS (start, end, eventType, globalTid, text, textId);
        INSERT INTO NVTX_EVENTS VALUES (0, 1000, 59, 117440513, NULL, 1);
        CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start, end, globalTid, correlationId, nameId);
        INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (100, 110, 117440513, 1, 3);
        CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start, end, deviceId, streamId, correlationId, globalPid,
            demangledName);
        INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (200, 300, 0, 7, 1, 117440512, 2);
        """
    )
    for statement in statements:
        database.execute(statement)
    database.commit()
    database.close()
    return path


RUNTIME = "CUPTI_ACTIVITY_KIND_RUNTIME"
KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT"
HOSTILE_SQL = {
    "an endless view for a table": ("DROP TABLE NVTX_EVENTS", f"CREATE VIEW NVTX_EVENTS AS {ENDLESS} i FROM n"),
    "an endless query for a number": (
        f"INSERT INTO StringIds VALUES ('3) OR ({ENDLESS} count(*) FROM n) --', 'cudaDeviceSynchronize')",
    ),
    "a computed column of a gigabyte": (
        "DROP TABLE StringIds",
        "CREATE TABLE StringIds (id, value GENERATED ALWAYS AS (hex(zeroblob(500000000))) STORED)"
        if sqlite3.sqlite_version_info < (3, 31)
        else "CREATE TABLE StringIds (id, value AS (hex(zeroblob(400000000))))",
        "INSERT INTO StringIds (id) VALUES (1)",
    ),
    "a trigger": (f"CREATE TRIGGER t AFTER INSERT ON {KERNELS} BEGIN DELETE FROM {KERNELS}; END",),
    "a text for a time": (f"UPDATE {KERNELS} SET start = 'now'",),
    "a blob for a name": ("UPDATE StringIds SET value = x'ff00fe'",),
    "a fraction among processes": (
        f"INSERT INTO {KERNELS} SELECT start, end, 0, 7, 1, 117440512.5, 2 FROM {KERNELS}",
        f"INSERT INTO {KERNELS} SELECT start, end, 0, 7, 1, 134217728, 2 FROM {KERNELS}",
    ),
    "the least number": (f"UPDATE {KERNELS} SET start = -9223372036854775808, end = 9223372036854775807",),
    "memory of the least number": (
        "CREATE TABLE CUDA_GPU_MEMORY_USAGE_EVENTS (start, bytes, memoryOperationType, address, memKind)",
        "INSERT INTO CUDA_GPU_MEMORY_USAGE_EVENTS VALUES (1, -9223372036854775808, 0, 5, 2), (2, 0, 1, 5, 2)",
    ),
}


def _text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


_COMMAND = f"touch {CANARY}"
_SYSTEM = _text("os") + _text("system") + b"\x93"
CALLING = {  # opcode → a pickle that uses it to create a file or to request an object
    "GLOBAL": b"\x80\x02cos\nsystem\n.",
    "STACK_GLOBAL": b"\x80\x04" + _SYSTEM + b".",
    "REDUCE": b"\x80\x04" + _SYSTEM + _text(_COMMAND) + b"\x85R.",
    "REDUCE of protocol 0": f"cos\nsystem\n(S'{_COMMAND}'\ntR.".encode(),
    "INST": f"(S'{_COMMAND}'\nios\nsystem\n.".encode(),
    "OBJ": b"\x80\x04(" + _SYSTEM + _text(_COMMAND) + b"o.",
    "NEWOBJ": b"\x80\x04" + _text("subprocess") + _text("Popen") + b"\x93" + _text(_COMMAND) + b"\x85\x81.",
    "NEWOBJ_EX": b"\x80\x04" + _text("subprocess") + _text("Popen") + b"\x93" + _text(_COMMAND) + b"\x85}\x92.",
    "BUILD": b"\x80\x04" + _text("types") + _text("SimpleNamespace") + b"\x93)R}" + _text("a") + b"K\x01sb.",
    "EXT1": b"\x80\x02\x82\x01.",
    "EXT2": b"\x80\x02\x83\x01\x01.",
    "EXT4": b"\x80\x02\x84\x01\x01\x01\x01.",
    "PERSID": b"(Pan id\n.",
    "BINPERSID": b"\x80\x04" + _text("an id") + b"Q.",
}


def endless_list(levels: int = 60) -> Any:
    """Return a nested list that is small in memory and endless when printed."""
    nested: Any = [0]
    for _ in range(levels):
        nested = [nested] * 10
    return nested


def _segment(**changed: Any) -> bytes:
    return pickle.dumps({"segments": [{"address": 4096, "total_size": 512, "blocks": []} | changed]})


def pickle_bombs() -> dict[str, bytes]:
    """Return small pickles that ask for much memory or time, by name."""
    shared_blocks = [{"size": 512, "state": "inactive"}] * 200_000
    return {
        "a memo of 2³⁰ entries": b"\x80\x04Nr\xff\xff\xff\x3f.",
        "bytes of 2⁴⁰": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b"x.",
        "a text of 3 GiB": b"\x80\x04\x8d" + struct.pack("<Q", 3 << 30) + b"x.",
        "a frame of 2⁴⁰": b"\x80\x04\x95" + struct.pack("<Q", 1 << 40) + b"x.",
        "a number of 2³¹ bytes": b"\x80\x04\x8b" + struct.pack("<i", (1 << 31) - 1) + b"x.",
        "many sets": b"\x80\x04(" + b"\x8f" * 4_000_000 + b"t.",
        "deep lists": b"\x80\x04" + b"]" * 500_000 + b"a" * 499_999 + b".",
        "an endless address": _segment(address=endless_list()),
        "an endless text": _segment(segment_type=endless_list()),
        "an endless state": _segment(blocks=[{"size": 512, "state": endless_list()}]),
        "an endless persistent id": pickle.dumps(endless_list())[:-1] + b"Q.",
        "blocks of many segments": pickle.dumps(
            {"segments": [{"address": n, "total_size": 512, "blocks": shared_blocks} for n in range(20_000)]}
        ),
        "an event many times": pickle.dumps(
            {"device_traces": [[{"action": "alloc", "addr": 1, "size": 1}] * 1_000_000]}
        ),
        "zipped lists": gzip.compress(b"\x80\x04]" + b"](" * (1 << 25)),
    }


def _events(text: str, times: int) -> Iterator[bytes]:
    yield b'{"traceEvents": ['
    for _ in range(times):
        yield text.encode()


KERNEL = json.dumps(small_trace()["traceEvents"][-1]) + ",\n"
TRACE_BOMBS = {  # name → pieces of the text, gzipped
    "one long text": lambda: [b'{"x": "', *[b"a" * (1 << 24)] * 8],
    "one long event": lambda: [b'{"traceEvents": [{"x": "', *[b"a" * (1 << 24)] * 8],
    "white space": lambda: _events(" " * (1 << 24), 8),
    "millions of kernels": lambda: _events(KERNEL * 20_000, 50),
    "deep lists": lambda: _events("[" * 1_000_000, 1),
    "deep objects": lambda: _events('{"a":' * 1_000_000, 1),
    "deep before the events": lambda: [b'{"a":' + b"[" * 1_000_000 + b'"traceEvents": ['],
}


def trace_bomb(path: Path, name: str) -> Path:
    with gzip.open(path, "wb", compresslevel=1) as file:
        for piece in TRACE_BOMBS[name]():
            file.write(piece)
    return path
