"""Kineto: the Chrome trace (.json, .json.gz) that `torch.profiler` exports. Floor 0.

The events are decoded one by one from a window on the file, and only what the tables need is kept, so that a trace of
many hundred megabytes does not have to fit into memory.
Format: "Trace Event Format", of which Kineto writes complete ("X") events with times in µs.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from cs_systems.analysis.stalls import stalls
from cs_systems.analysis.trace import Call, Copy, Function, Kernel, Op, Range, Recording
from cs_systems.config import ConfigError

WINDOW = 1 << 22  # characters decoded at a time
GZIP_MAGIC = b"\x1f\x8b"
_BETWEEN = re.compile(r"[\s,]*")
_EVENTS = re.compile(r'"traceEvents"\s*:\s*\[')
Event = dict[str, Any]


def read(path: Path, process: int | None = None) -> Recording:
    """The recording in a trace. `process`: must be the one that the trace is of, where it is given."""
    with _open(path) as file:
        try:
            header, events = _parse(file, path)
            reader = _Reader(path)
            for event in events:
                reader.take(event)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ConfigError(f"{path} is truncated ({error}): copy it again, or record again") from None
        except UnicodeDecodeError:
            raise ConfigError(f"{path} is not text: it is no trace of torch.profiler") from None
    devices = {int(d["id"]): str(d.get("name", "")) for d in header.get("deviceProperties", ()) if "id" in d}
    return reader.recording(devices, process)


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


class _Reader:
    """Keeps what is needed of each event; kernels meet their launches when all events were seen."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.origin_us: float | None = None
        self.kernels: list[tuple[Function, float, float, int, int, int | None, bool]] = []
        self.launches: dict[int, tuple[int, float, float]] = {}
        self.copies: list[Copy] = []
        self.calls: list[Call] = []
        self.ranges: list[Range] = []
        self.ops: list[Op] = []
        self.overheads: list[tuple[float, float]] = []
        self.endless: list[str] = []
        self.pids: set[int] = set()
        self.damaged = 0
        self.functions: dict[tuple[Any, ...], Function] = {}
        self.keep: dict[str, Callable[[Event, float, float], None]] = {
            "kernel": self._kernel,
            "gpu_memcpy": self._copy,
            "gpu_memset": self._copy,
            "cuda_runtime": self._call,
            "cuda_driver": self._call,
            "cpu_op": self._op,
            "user_annotation": self._range,
            "overhead": self._overhead,
        }

    def take(self, event: Event) -> None:
        keep = self.keep.get(event.get("cat", ""))
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
            keep(event, start, start + event["dur"] * 1e-6)
        except (KeyError, TypeError, ValueError):
            self.damaged += 1

    def _kernel(self, event: Event, start: float, end: float) -> None:
        args = event["args"]
        grid, block = args.get("grid"), args.get("block")
        key = (
            event["name"],
            *(grid or ()),
            *(block or ()),
            args.get("registers per thread"),
            args.get("shared memory"),
        )
        function = self.functions.get(key)
        if function is None:
            function = self.functions[key] = Function(
                str(event["name"]),
                tuple(grid) if grid else None,
                tuple(block) if block else None,
                args.get("registers per thread"),
                args.get("shared memory"),
            )
        in_graph = bool(args.get("graph node id"))
        self.kernels.append((function, start, end, args["device"], args["stream"], args.get("correlation"), in_graph))

    def _copy(self, event: Event, start: float, end: float) -> None:
        args = event["args"]
        kind = event["cat"].removeprefix("gpu_")
        self.copies.append(Copy(kind, start, end, args["device"], args["stream"], args.get("bytes")))

    def _call(self, event: Event, start: float, end: float) -> None:
        thread, pid = event["tid"], event["pid"]
        correlation = event.get("args", {}).get("correlation")
        if correlation:
            # Triton and cuBLAS launch through the driver, inside no runtime call; else the outer call comes first.
            self.launches.setdefault(correlation, (thread, start, end))
        self.pids.add(pid)
        if stalls(event["name"]):
            self.calls.append(Call(event["name"], start, end, thread, pid))

    def _range(self, event: Event, start: float, end: float) -> None:
        self.pids.add(event["pid"])
        self.ranges.append(Range(str(event["name"]), start, end, event["tid"], event["pid"]))

    def _op(self, event: Event, start: float, end: float) -> None:
        args = event.get("args", {})
        if "Sequence number" in args:
            forward_thread = args.get("Fwd thread id", 0)
            self.ops.append(Op(event["name"], start, end, event["tid"], args["Sequence number"], forward_thread))

    def _overhead(self, event: Event, start: float, end: float) -> None:
        self.overheads.append((start, end))

    def recording(self, devices: dict[int, str], process: int | None) -> Recording:
        self._check(process)
        pid = next(iter(self.pids), 0)
        unknown: tuple[int | None, float | None, float | None] = (None, None, None)
        kernels = [
            Kernel(
                function, start, end, device, stream, pid, number, *self.launches.get(number or 0, unknown), in_graph
            )
            for function, start, end, device, stream, number, in_graph in self.kernels
        ]
        kernels.sort(key=lambda kernel: kernel.start_s)
        limitations = []
        if self.endless:
            limitations.append(
                f"{len(self.endless)} event(s) never end ({self.endless[0]!r} …) and are left out: "
                "let the profiler run on until they are closed"
            )
        if self.damaged:
            limitations.append(f"{self.damaged} event(s) lack a time or a number that such events have: left out")
        return Recording(
            source=str(self.path),
            profiler="kineto",
            devices=devices,
            kernels=kernels,
            copies=self.copies,
            calls=self.calls,
            ranges=self.ranges,
            overheads=self.overheads,
            ops=self.ops or None,
            limitations=tuple(limitations),
        )

    def _check(self, process: int | None) -> None:
        if not self.kernels:
            raise ConfigError(
                f"{self.path} holds no kernel: record with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], "
                "on a machine with a GPU"
            )
        if len(self.pids) > 1 or (process is not None and process not in self.pids):
            raise ConfigError(
                f"{self.path} holds the processes {', '.join(map(str, sorted(self.pids)))}, and a trace does not say "
                "whose a kernel is: analyse the trace of each process by itself"
            )
        if not self.ranges:
            never = f" that ends ({self.endless[0]!r} never does)" if self.endless else ""
            raise ConfigError(
                f"{self.path} holds no range{never}: mark step, forward, backward … with torch.profiler.record_function"
            )
