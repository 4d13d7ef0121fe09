"""Kineto: the Chrome trace (.json, .json.gz) that `torch.profiler` exports. Floor 0.

The events are decoded one by one from a window on the file, and only what the tables need is kept, so that a trace of
many hundred megabytes does not have to fit into memory.
Format: "Trace Event Format", of which Kineto writes complete ("X") events with times in µs.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import IO, Any

import numpy as np

from cs_systems.analysis.stalls import stalls
from cs_systems.analysis.trace import (
    NO_KERNELS,
    UNKNOWN,
    Call,
    Categorical,
    Copy,
    Function,
    Kernels,
    Op,
    Range,
    Ranges,
    Recording,
    without_collector,
)
from cs_systems.config import ConfigError
from cs_systems.filekind import GZIP_MAGIC

LONGEST_S = 1e9  # from the first event: what lies further off is no time of the recording
WINDOW = 1 << 22  # characters decoded at a time
_BETWEEN = re.compile(r"[\s,]*")
_EVENTS = re.compile(r'"traceEvents"\s*:\s*\[')
Event = dict[str, Any]


@without_collector()
def read(path: Path, process: int | None = None) -> Recording:
    """The recording in a trace. `process`: which one, by its pid, where there are several."""
    with _open(path) as file:
        try:
            header, events = _parse(file, path)
            reader = _Reader(path)
            for event in events:
                reader.take(event)
            devices = {int(d["id"]): str(d.get("name", "")) for d in header.get("deviceProperties", ()) if "id" in d}
            return reader.recording(devices, process)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ConfigError(f"{path} is truncated ({error}): copy it again, or record again") from None
        except OverflowError:
            raise ConfigError(
                f"{path} is damaged: the number of a thread, device or stream is none: record again"
            ) from None
        except UnicodeDecodeError:
            raise ConfigError(
                f"{path} is not text, so no trace of torch.profiler: gunzip an export of nsys first"
            ) from None


def _open(path: Path) -> IO[str]:
    with path.open("rb") as file:
        compressed = file.read(2) == GZIP_MAGIC
    return gzip.open(path, "rt", encoding="utf-8") if compressed else path.open(encoding="utf-8")


def _parse(file: IO[str], path: Path) -> tuple[Event, Iterator[Event]]:
    """(what stands before the events, the events). A bare array of events is a trace too."""
    text = file.read(WINDOW)
    if text.lstrip().startswith("["):
        return {}, _events(file, text.lstrip()[1:], path)
    while not (found := _EVENTS.search(text)):
        more = file.read(WINDOW)
        if not more:
            raise ConfigError(f"{path} holds no traceEvents: export it with torch.profiler's export_chrome_trace")
        text += more
    try:
        header = json.loads(text[: found.end()] + "]}")
    except ValueError as error:
        raise ConfigError(f"{path} does not begin as a Chrome trace: {error}") from None
    return header, _events(file, text[found.end() :], path)


def _events(file: IO[str], text: str, path: Path) -> Iterator[Event]:
    decode: Callable[[str, int], tuple[Any, int]] = json.JSONDecoder(strict=False).raw_decode
    at, number = 0, 0
    while True:
        at = _BETWEEN.match(text, at).end()  # type: ignore[union-attr]
        if text.startswith("]", at):
            return
        try:
            event, at = decode(text, at)
        except json.JSONDecodeError as error:
            more = file.read(WINDOW)
            if not more:
                what = (
                    f"ends inside event {number}"
                    if error.pos >= len(text) - 1 or at >= len(text)
                    else f"breaks at event {number}"
                )
                raise ConfigError(
                    f"{path} is truncated or damaged: it {what}; let the profiler finish writing, or record again"
                ) from None
            text, at = text[at:] + more, 0
            continue
        number += 1
        if isinstance(event, dict):
            yield event


@dataclass
class _Process:
    """What the host did in one process."""

    launches: dict[int, tuple[float, float, int]] = field(default_factory=dict)  # correlation → (start, end, thread)
    ranges: list[Range] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)


class _Reader:
    """Keeps what is needed of each event; kernels meet their launches when all events were seen."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.origin_us: float | None = None
        self.processes: dict[int, _Process] = defaultdict(_Process)
        self.kernels: list[tuple[Function, float, float, int, int, bool, int]] = []  # the last is the correlation
        self.copies: list[tuple[Copy, int]] = []  # with the correlation
        self.functions: dict[Function, Function] = {}
        self.overheads: list[tuple[float, float]] = []
        self.launched = False
        self.endless: list[str] = []
        self.damaged = 0
        self.keep: dict[str, Callable[[Event, float, float], None]] = {
            "kernel": self._kernel,
            "gpu_memcpy": self._copy,
            "gpu_memset": self._copy,
            "cuda_runtime": self._call,
            "cuda_driver": self._call,
            "cpu_op": self._op,
            "user_annotation": self._range,
            "overhead": lambda event, start, end: self.overheads.append((start, end)),
        }

    def take(self, event: Event) -> None:
        keep = self.keep.get(str(event.get("cat")))
        phase = event.get("ph")
        if keep is None or phase not in ("X", "B"):
            return
        if phase == "B" or "dur" not in event:  # Kineto writes a range as one event when it ends
            self.endless.append(str(event.get("name")))
            return
        try:
            if self.origin_us is None:
                self.origin_us = float(event["ts"])
            start = (event["ts"] - self.origin_us) * 1e-6
            end = start + event["dur"] * 1e-6
            if not -LONGEST_S < start <= end < LONGEST_S:
                raise ValueError
            keep(event, start, end)
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
            self.damaged += 1

    def _kernel(self, event: Event, start: float, end: float) -> None:
        args = event["args"]
        grid, block = (tuple(map(int, args[name])) if args.get(name) else None for name in ("grid", "block"))
        function = Function(
            str(event["name"]),
            grid,  # type: ignore[arg-type]
            block,  # type: ignore[arg-type]
            args.get("registers per thread"),
            args.get("shared memory"),
        )
        one = self.functions.setdefault(function, function)
        in_graph = bool(args.get("graph node id"))
        where = int(args["device"]), int(args["stream"])
        self.kernels.append((one, start, end, *where, in_graph, int(args.get("correlation", UNKNOWN))))

    def _copy(self, event: Event, start: float, end: float) -> None:
        args = event["args"]
        kind = event["cat"].removeprefix("gpu_")
        copy = Copy(kind, start, end, int(args["device"]), int(args["stream"]), args.get("bytes"))
        self.copies.append((copy, args.get("correlation", UNKNOWN)))

    def _call(self, event: Event, start: float, end: float) -> None:
        name, thread, process = str(event["name"]), int(event["tid"]), self.processes[int(event["pid"])]
        self.launched = self.launched or "Launch" in name
        if correlation := event.get("args", {}).get("correlation"):
            # Triton and cuBLAS launch through the driver, inside no runtime call; else the outer call comes first.
            process.launches.setdefault(int(correlation), (start, end, thread))
        if stalls(name):
            process.calls.append(Call(name, start, end, thread))

    def _range(self, event: Event, start: float, end: float) -> None:
        self.processes[int(event["pid"])].ranges.append(Range(str(event["name"]), start, end, int(event["tid"])))

    def _op(self, event: Event, start: float, end: float) -> None:
        args = event.get("args", {})
        if "Sequence number" in args:
            numbers = int(args["Sequence number"]), int(args.get("Fwd thread id", 0))
            op = Op(str(event["name"]), start, end, int(event["tid"]), *numbers)
            self.processes[int(event["pid"])].ops.append(op)

    def recording(self, devices: dict[int, str], wanted: int | None) -> Recording:
        self._refuse()
        process = self.processes[self._process(wanted)]
        limitations = []
        if self.endless:
            limitations.append(
                f"{len(self.endless)} event(s) never end ({self.endless[0]!r} …) and are left out: "
                "let the profiler run on until they are closed"
            )
        if self.damaged:
            limitations.append(f"{self.damaged} event(s) lack a time or a number that such events have: left out")
        kernels, copies = self.kernels, self.copies
        if sum(bool(one.launches) for one in self.processes.values()) > 1:
            kernels = [row for row in kernels if row[-1] in process.launches]
            copies = [row for row in copies if row[-1] in process.launches]
            if left_out := len(self.kernels) - len(kernels):
                limitations.append(f"{left_out} kernels were launched by another process, or by none that is known")
        return Recording(
            source=str(self.path),
            profiler="kineto",
            devices=devices,
            kernels=_kernels(kernels, process.launches),
            copies=[copy for copy, _ in copies],
            calls=process.calls,
            ranges=_ranges(process.ranges),
            overheads=self.overheads,
            ops=process.ops or None,
            limitations=tuple(limitations),
        )

    def _refuse(self) -> None:
        """What no table can be made of. Ranges without kernels are a recording of the host, if nothing was launched."""
        ranges = any(process.ranges for process in self.processes.values())
        record = "record with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], on a machine with a GPU"
        mark = "mark step, forward, backward … with torch.profiler.record_function"
        if not self.kernels and not ranges and not self.endless:
            raise ConfigError(f"{self.path} holds no kernel and no range: {record}, and {mark}")
        if not self.kernels and self.launched:
            raise ConfigError(f"{self.path} holds no kernel, although some were launched: {record}")
        if not ranges:
            never = f" that ends ({self.endless[0]!r} never does)" if self.endless else ""
            raise ConfigError(f"{self.path} holds no range{never}: {mark}")

    def _process(self, wanted: int | None) -> int:
        """The pid whose events are read: of several that launched kernels, or without any have ranges, the wanted."""
        found = Counter({pid: len(self.kernels) for pid, process in self.processes.items() if process.launches})
        if not self.kernels or not found:
            found = Counter({pid: len(process.ranges) for pid, process in self.processes.items() if process.ranges})
        elif len(found) > 1:
            owners = [[pid for pid in found if kernel[-1] in self.processes[pid].launches] for kernel in self.kernels]
            if any(len(of_kernel) > 1 for of_kernel in owners):
                raise ConfigError(
                    f"{self.path} holds the processes {', '.join(map(str, sorted(found)))}, and as they number their "
                    "launches alike, whose a kernel is cannot be told: analyse the trace of each process by itself"
                )
            found = Counter(pid for of_kernel in owners for pid in of_kernel)
        if wanted is None and len(found) == 1:
            return next(iter(found))
        if wanted is not None and wanted in found:
            return wanted
        what = "kernel" if self.kernels else "range"
        listed = ", ".join(f"{pid} ({count} {what}s)" for pid, count in sorted(found.items()))
        reason = f"{len(found)} processes" if wanted is None else f"no {what} of process {wanted}"
        raise ConfigError(f"{self.path} holds {reason}: choose one with --process: {listed}")


def _kernels(
    rows: Sequence[tuple[Function, float, float, int, int, bool, int]], launches: dict[int, tuple[float, float, int]]
) -> Kernels:
    if not rows:
        return NO_KERNELS
    rows = sorted(rows, key=itemgetter(1))
    unknown = (math.nan, math.nan, UNKNOWN)
    function, start, end, device, stream, in_graph, correlation = zip(*rows, strict=True)
    launched, returned, thread = zip(*(launches.get(n, unknown) for n in correlation), strict=True)
    return Kernels(
        function=Categorical.of(function),
        start_s=np.array(start),
        end_s=np.array(end),
        device=np.array(device, np.int64),
        stream=np.array(stream, np.int64),
        thread=np.array(thread, np.int64),
        launch_start_s=np.array(launched),
        launch_end_s=np.array(returned),
        in_graph=np.array(in_graph),
    )


def _ranges(rows: Sequence[Range]) -> Ranges:
    name, start, end, thread = zip(*rows, strict=True) if rows else ((),) * 4
    return Ranges(
        Categorical.of(name), np.array(start, np.float64), np.array(end, np.float64), np.array(thread, np.int64)
    )
