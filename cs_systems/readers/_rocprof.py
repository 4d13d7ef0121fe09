"""Reader of AMD's rocprofv3 JSON (`--output-format json`), and the collector of records that `_rocpd` shares.

A kernel has the correlation id of the call that launched it; a nested call names the outer call as its ancestor. ROCm
counts a grid in threads, so it is divided by the workgroup here. Times are ns of one clock of host and device.

Source: `rocprofv3-schema.json`, generateJSON.cpp and tool.cpp of rocprofiler-sdk. Copies and roctx ranges are read as
these define them; no recording with them was available for a test.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cs_systems.config import ConfigError
from cs_systems.core.collector import without_collector
from cs_systems.core.formats import Unpacked
from cs_systems.core.units import counted
from cs_systems.core.validation import is_whole
from cs_systems.readers._lost_kernels import launches_kernel, lost_launches
from cs_systems.readers._processes import chosen_process
from cs_systems.readers._stalls import Kind, kind
from cs_systems.readers.forms.columns import UNKNOWN, Floats, Range, Ranges
from cs_systems.readers.forms.jobs import Job
from cs_systems.readers.forms.trace import (
    Call,
    Calls,
    Copies,
    Copy,
    Function,
    KernelRow,
    Kernels,
    Trace,
    outermost_calls,
)

KEY = "rocprofiler-sdk-tool"
LARGEST_BYTES = 1 << 29  # limit of the JSON's size; in memory it takes about six times as much
CHUNK = 1 << 22
RECORD = "record with rocprofv3 --runtime-trace --output-format json"
MARKERS = ("MARKER_CORE_API", "MARKER_CORE_RANGE_API")  # kinds of roctx calls that only mark a point in time
GPU = 2  # type of an agent
Times = tuple[Any, Any]  # unchecked begin and end in ns
NO_RANGES = ("roctxMarkA", "roctxGetThreadId")  # calls of these kinds that are not ranges


def read(path: Path, process: int | None = None) -> Trace:
    """Return the contents of a JSON result.

    Args:
        path: The result, gzipped or not.
        process: The pid of the process to read; without it, the one with the most kernels.

    Raises:
        ConfigError: The file is damaged, too large, or has too little in it for any table.
    """
    results = {}
    for tool in _tools(path):
        pid = _dict(tool.get("metadata")).get("pid")
        if is_whole(pid):
            results[pid] = tool
    counts = {
        pid: len(_list(_dict(tool.get("buffer_records")).get("kernel_dispatch"))) for pid, tool in results.items()
    }
    if not counts:
        raise ConfigError(f"{path} holds no process; {RECORD}")
    pid, note = chosen_process(path, counts, "kernel", process)
    return _Json(results[pid]).made.trace(path, [note] if note else [])


@dataclass
class Recording:
    """Records of one process. A record that lacks a field or a number is counted and left out."""

    host: str | None = None
    devices: dict[int, tuple[int, str]] = field(default_factory=dict)  # agent of a GPU → its number and name
    symbols: dict[int, str] = field(default_factory=dict)  # kernel's id → name
    counters: int = 0  # number of kernels with recorded counters
    kernels: list[KernelRow] = field(default_factory=list)  # rows with correlation ids in place of call indices
    copies: list[tuple[Copy, int]] = field(default_factory=list)  # with the correlation of the call
    ranges: list[Range] = field(default_factory=list)
    calls: dict[int, tuple[Call, int]] = field(default_factory=dict)  # correlation → call, ancestor
    left_out: int = 0
    unread: int = 0  # regions of other kinds than calls and markers
    _functions: dict[tuple[Any, ...], Function] = field(default_factory=dict)

    def take(self, add: Callable[..., None], rows: Iterable[Any]) -> None:
        """Add each record, and count the damaged ones."""
        for row in rows:
            try:
                add(row)
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
                self.left_out += 1

    def add_gpu(self, agent: Any, number: Any, *names: Any) -> None:
        self.devices[agent] = _whole(number), str(next(filter(None, names), f"GPU {number}"))

    def add_kernel(
        self, kernel: int, time_ns: Times, agent: int, stream: Any, correlation: Any, grid: Any, group: Any, shared: Any
    ) -> None:
        """Add a kernel; `grid` and `group` (the workgroup) are in threads, `shared` in bytes per workgroup."""
        key = kernel, grid, group, shared
        if (function := self._functions.get(key)) is None:
            blocks = tuple(-(-_whole(side) // _whole(threads)) for side, threads in zip(grid, group, strict=True))
            name = self.symbols.get(kernel) or f"kernel {kernel}"
            known = shared if is_whole(shared) else None
            function = self._functions[key] = Function(name, blocks, tuple(group), None, known)  # type: ignore[arg-type]
        number, _ = self.devices[agent]
        where = number, _whole(stream)
        self.kernels.append((function, *_seconds(time_ns), *where, False, _whole(correlation)))

    def add_copy(self, time_ns: Times, agents: tuple[Any, Any], stream: Any, size: Any, correlation: Any) -> None:
        """Add a copy to the GPU it comes from, else to the GPU it goes to; copies between hosts are left out."""
        if gpus := [self.devices[agent][0] for agent in agents if agent in self.devices]:
            known = size if is_whole(size) else None
            direction = "to".join("D" if agent in self.devices else "H" for agent in agents)
            copy = Copy("memcpy", *_seconds(time_ns), gpus[0], _whole(stream), known, None, direction)
            self.copies.append((copy, correlation if is_whole(correlation) else UNKNOWN))

    def add_call(self, name: str, time_ns: Times, thread: Any, correlation: Any, ancestor: Any) -> None:
        call = Call(name, *_seconds(time_ns), _whole(thread))
        self.calls[_whole(correlation)] = call, ancestor if is_whole(ancestor) else 0

    def add_range(self, name: str, time_ns: Times, thread: Any) -> None:
        self.ranges.append(Range(name, *_seconds(time_ns), _whole(thread)))

    def trace(self, path: Path, limitations: list[str]) -> Trace:
        """Return the trace. Raises ConfigError if no table can be made of it."""
        left_out = f"left out: {counted(self.left_out, 'record')} without a valid time or number"
        if not self.kernels and not self.ranges:
            if self.counters:
                what = f"counters of {counted(self.counters, 'kernel')} in place of their times"
                raise ConfigError(f"{path} holds {what}; {RECORD}, without --pmc")
            damage = f" ({left_out})" if self.left_out else ""
            raise ConfigError(f"{path} holds no kernel{damage}; {RECORD} while kernels run on the GPU")
        if self.kernels and not self.calls:
            limitations.append(f"no HIP call was recorded, so no kernel has a phase; {RECORD}")
        if self.left_out:
            limitations.append(left_out)
        if self.unread:
            limitations.append(f"left out: {counted(self.unread, 'region')} that are neither calls nor roctx ranges")
        calls, at = Calls.of(call for call, _ in self.calls.values()), self._launches()
        kernels = []
        for *row, _, number in self.kernels:
            launch = at.get(number, UNKNOWN)
            in_graph = launch != UNKNOWN and kind(calls.name[launch]) == Kind.GRAPH_LAUNCH
            kernels.append((*row, in_graph, launch))
        columns = Kernels.of(kernels, calls)  # type: ignore[arg-type]
        trace = Trace(
            source=str(path),
            profiler="rocprofv3",
            devices=dict(self.devices.values()),
            kernels=columns,
            copies=Copies.of(copy._replace(call=at.get(number)) for copy, number in self.copies),
            calls=calls,
            ranges=Ranges.of(self.ranges),
            overheads=[],
            ops=None,
            limitations=tuple(limitations),
            lost_launches=self._lost_launches(columns, calls),
            job=Job(host=self.host),
        )
        return outermost_calls(trace)

    def _lost_launches(self, kernels: Kernels, calls: Calls) -> Floats:
        ran = {row[-1] for row in self.kernels}
        launch = np.flatnonzero(calls.name.codes_where(launches_kernel))
        numbers = [*self.calls]
        has_run = np.array([numbers[at] in ran for at in launch.tolist()], bool)
        return lost_launches(kernels, calls, launch, has_run)

    def _launches(self) -> dict[int, int]:
        """Return for each call the index of the outermost recorded call around it.

        A library's call may enclose HIP's.
        """
        at = {number: index for index, number in enumerate(self.calls)}
        found = {}
        for number in self.calls:
            outer, seen = number, {number}
            while (ancestor := self.calls[outer][1]) in self.calls and ancestor not in seen:
                seen.add(ancestor)
                outer = ancestor
            found[number] = at[outer]
        return found


def _seconds(time_ns: Times) -> tuple[float, float]:
    begin, end = map(_whole, time_ns)
    if not 0 <= begin <= end:
        raise ValueError
    return begin * 1e-9, end * 1e-9


def _whole(value: Any) -> int:
    if not is_whole(value) or abs(value) >= 1 << 63:
        raise ValueError
    return value


@without_collector()
def _tools(path: Path) -> list[dict[str, Any]]:
    """Return the results in a file, one for each process."""
    parts = []
    with closing(Unpacked(path)) as file:
        try:
            while part := file.read(CHUNK):
                parts.append(part)
                if file.count > LARGEST_BYTES:
                    raise ConfigError(
                        f"{path} has over {LARGEST_BYTES >> 20} MiB of JSON, the most that is read; record fewer "
                        "steps, or with rocprofv3 --output-format rocpd"
                    )
            # Kernel names are the program's bytes, which need not be UTF-8.
            found = json.loads(b"".join(parts).decode("utf-8", "replace"), strict=False)[KEY]
        except ConfigError:
            raise
        except (EOFError, zlib.error, gzip.BadGzipFile, ValueError, RecursionError, KeyError, TypeError):
            raise ConfigError(
                f"{path} is a truncated or damaged result of rocprofv3; copy it again, or record it again"
            ) from None
    return [tool for tool in ([found] if isinstance(found, dict) else _list(found)) if isinstance(tool, dict)]


class _Json:
    """Reader of the JSON of one process."""

    def __init__(self, tool: Mapping[str, Any]) -> None:
        self.tool = tool
        self.records = _dict(tool.get("buffer_records"))
        strings = _dict(tool.get("strings"))
        self.messages: dict[int, str] = {}  # correlation of a marker → its text
        self.kinds = [
            (str(_dict(kind).get("kind")), _list(_dict(kind).get("operations")))
            for kind in _list(strings.get("buffer_records"))
        ]
        self.made = Recording(
            host=_text(_dict(_dict(tool.get("metadata")).get("node")).get("hostname")),
            counters=len(_list(_dict(tool.get("callback_records")).get("counter_collection"))),
        )
        for add, rows in (
            (self._agent, tool.get("agents")),
            (self._symbol, tool.get("kernel_symbols")),
            (self._message, strings.get("marker_api")),
            (self._kernel, self.records.get("kernel_dispatch")),
            (self._copy, self.records.get("memory_copy")),
            (self._marker, self.records.get("marker_api")),
            *(
                (self._call, rows)
                for name, rows in self.records.items()
                if name.endswith("_api") and name != "marker_api"
            ),
        ):
            self.made.take(add, _list(rows))

    def _agent(self, row: Any) -> None:
        if row["type"] == GPU:
            number = row.get("logical_node_type_id", len(self.made.devices))
            self.made.add_gpu(row["id"]["handle"], number, row.get("product_name"), row.get("name"))

    def _symbol(self, row: Any) -> None:
        names = (row.get(f"{form}kernel_name") for form in ("formatted_", "demangled_", ""))
        self.made.symbols[row["kernel_id"]] = str(next(filter(None, names), ""))

    def _message(self, row: Any) -> None:
        self.messages[row["key"]] = str(row["value"])

    def _kernel(self, row: Any) -> None:
        info = row["dispatch_info"]
        stream = row["stream_id"] if "stream_id" in row else info["queue_id"]  # ROCm before 7 records no stream
        grid, group = (tuple(info[f"{what}_size"][side] for side in "xyz") for what in ("grid", "workgroup"))
        sizes = grid, group, info.get("group_segment_size")
        launch = stream["handle"], row["correlation_id"]["internal"]
        self.made.add_kernel(info["kernel_id"], _times(row), info["agent_id"]["handle"], *launch, *sizes)

    def _copy(self, row: Any) -> None:
        agents = row["src_agent_id"]["handle"], row["dst_agent_id"]["handle"]
        stream = _dict(row.get("stream_id")).get("handle", 0)
        correlation = _dict(row.get("correlation_id")).get("internal")
        self.made.add_copy(_times(row), agents, stream, row.get("bytes"), correlation)

    def _call(self, row: Any) -> None:
        number = row["correlation_id"]
        name = str(self.kinds[row["kind"]][1][row["operation"]])
        self.made.add_call(name, _times(row), row["thread_id"], number["internal"], number.get("ancestor"))

    def _marker(self, row: Any) -> None:
        kind, operations = self.kinds[row["kind"]]
        if kind in MARKERS and operations[row["operation"]] not in NO_RANGES:
            self.made.add_range(self.messages[row["correlation_id"]["internal"]], _times(row), row["thread_id"])


def _times(row: Any) -> tuple[Any, Any]:
    return row["start_timestamp"], row["end_timestamp"]


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
