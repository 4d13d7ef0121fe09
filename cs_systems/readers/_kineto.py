"""Reader of Kineto's traces, which `torch.profiler` exports as Chrome traces (.json, .json.gz): events to a `Trace`.

The reader keeps only the events that the tables need, so that a trace of many hundred megabytes need not fit into
memory. Kineto writes complete ("X") events with times in µs.
"""

from __future__ import annotations

import functools
import gzip
import re
import zlib
from array import array
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET

from cs_systems.config import ConfigError
from cs_systems.core.collector import without_collector
from cs_systems.core.formats import Unpacked
from cs_systems.core.units import counted
from cs_systems.core.validation import shown
from cs_systems.readers._called_modules import PREFIX, called_modules
from cs_systems.readers._calls import Launches, NumberRows
from cs_systems.readers._chrome_trace import NOTHING, Arguments, Batch, Event, Text, events, header, plain
from cs_systems.readers._copy_names import copy_name
from cs_systems.readers._lost_kernels import launches_kernel, lost_launches
from cs_systems.readers._operators import OperatorReader, wrapped
from cs_systems.readers._processes import chosen_process, listed, ranges_elsewhere
from cs_systems.readers._stalls import Kind, kind
from cs_systems.readers.forms import jobs
from cs_systems.readers.forms.columns import UNKNOWN, Categorical, Floats, Ints, Range, Ranges
from cs_systems.readers.forms.modules import HEADER, Modules, unpacked
from cs_systems.readers.forms.trace import (
    INVALID,
    Calls,
    Copies,
    Function,
    Kernels,
    Trace,
    Waits,
    outermost_calls,
)

LONG_FUNCTION_S = 0.5e-3  # shorter calls of Python functions are not kept, because there are millions
LONGEST_S = 1e9  # seconds from the first event; later times are damaged
LATEST_US = 1e17  # in the profiler's clock: 3,000 years
MOST_KEPT = 10_000_000  # limit of events kept for the tables: about 3.5 GB of memory with the tables
FORECAST = 2  # multiple of MOST_KEPT up to which the forecast is accepted while the file is read
FORECAST_FROM = 1 << 25  # bytes to read before the forecast is used
_OPERATOR = re.compile(r"^\w+::|Backward\d*$|^detach_?$")  # name of an operator, in contrast to a range
RECORD = "record with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], on a machine with a GPU"
NOT_RECORDED = (
    "holds no kernel, although some were launched, so the GPU's profiling interface recorded none; stop other "
    "profilers (nsys, ncu, DCGM), look for CUPTI errors in the program's output, and record again"
)
# categories of calls that launch work: of CUDA, ROCm, Intel, and unknown devices
_CALLS = tuple(
    f"{device}_{level}" for device in ("cuda", "hip", "xpu", "privateuse1") for level in ("runtime", "driver")
)
# category that is counted but not read → its description, and the remedy
_UNREAD = {
    "mtia_ccp_events": "events of an MTIA accelerator, which are not read",
    "hpu_op": "events of a Gaudi accelerator, which are not read",
    "cuda_profiler_range": "counters of kernels in place of their times; record without profiler_metrics in "
    "_ExperimentalConfig",
}

COPY_KINDS = ("memcpy", "memset")
CORRELATION = 6  # index of the column with the correlation, of kernels and of copies
_NO_ARGUMENTS = Arguments()
Keep = Callable[[Event, float, float], None]


@without_collector()  # its scans of millions of objects without cycles take a third of the time
def read(path: Path, process: int | None = None) -> Trace:
    """Return the contents of a trace.

    Args:
        path: The trace, gzipped or not.
        process: The pid of the process to read; required where the trace holds several.

    Raises:
        ConfigError: The trace is damaged, too large, or has too little in it for any table.
    """
    with closing(Unpacked(path)) as file:
        try:
            text = Text(file, path)
            before = header(text)
            (devices, multiprocessors), modules = _devices(before), unpacked(before.get(HEADER))
            reader = _collected(file, text, path)
            if text.arrays > 1:
                reader.limitations.append(f"it has traceEvents {text.arrays} times; the events of all are read")
            job = jobs.job(before, reader.origin_us)
            trace = reader.trace(devices, process, modules)
            pids = tuple(found) if len(found := reader.launching()) > 1 else ()
            return replace(trace, job=job, multiprocessors=multiprocessors, processes=pids)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ConfigError(f"{path} is truncated or damaged ({error}); copy it again, or record it again") from None
        except OverflowError:
            raise ConfigError(
                f"{path} is damaged: the number of a thread, device or stream is out of range; record again"
            ) from None
        except RecursionError:
            raise ConfigError(f"{path} is damaged: values are nested hundreds of levels deep; record again") from None
        except UnicodeDecodeError:
            raise ConfigError(
                f"{path} has bytes that are not text in UTF-8; record again without with_stack, or if it is a gzipped "
                "file of nsys or rocprofv3, gunzip it"
            ) from None


@without_collector()
def processes(path: Path) -> list[int]:
    """Return the pids of the processes that launched kernels, for a file into which a tool merged several ranks."""
    try:
        with closing(Unpacked(path)) as file:
            text = Text(file, path)
            header(text)
            return _collected(file, text, path).launching()
    # reading the file will report the error
    except (ConfigError, EOFError, ValueError, OverflowError, RecursionError, OSError):
        return []


def _collected(file: Unpacked, text: Text, path: Path) -> _Reader:
    """Return the events of a trace after its header."""
    reader = _Reader(path)
    for batch in events(text):
        reader.take(batch)
        reader.refuse_too_many(file)
    return reader


def stated_job(path: Path) -> jobs.Job:
    """Return the identity that the header states."""
    with closing(Unpacked(path)) as file:
        return jobs.job(header(Text(file, path)))


def _devices(before: dict[str, Any]) -> tuple[dict[int, str], dict[int, int]]:
    """Return names and numbers of multiprocessors by device number, as far as `deviceProperties` has them."""
    properties = before.get("deviceProperties")
    known = [one for one in properties if isinstance(one, dict)] if isinstance(properties, list) else []
    known = [one for one in known if type(one.get("id")) is int]
    names = {one["id"]: str(one["name"]) for one in known if one.get("name")}
    return names, {one["id"]: one["numSms"] for one in known if type(one.get("numSms")) is int and one["numSms"] > 0}


@dataclass
class _Process:
    """Host events of one process."""

    # Calls: number of the name, start and end in s, thread, correlation.
    calls: NumberRows = field(default_factory=lambda: NumberRows("qddqq"))
    call_names: dict[str, int] = field(default_factory=dict)
    shapes: dict[int, int] = field(
        default_factory=dict
    )  # correlation → function with its sizes, for calls that record them
    ranges: list[Range] = field(default_factory=list)
    operators: OperatorReader = field(default_factory=OperatorReader)
    modules: list[Range] = field(default_factory=list)  # calls of modules, from Python's stacks
    functions: list[Range] = field(default_factory=list)  # long calls of Python functions, from the same source
    # Calls of collectives by thread: (start, end, message of the range)
    collectives: dict[int, list[tuple[float, float, jobs.Message]]] = field(default_factory=lambda: defaultdict(list))

    @functools.cached_property
    def launches(self) -> Launches:
        """Calls by their correlation, after the last event."""
        name, *columns, correlation = self.calls.columns()
        return Launches(Calls(Categorical([*self.call_names], name), *columns), correlation)


class _Reader:
    """Collector of the needed fields of each event; it matches kernels with their launches after the last event."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.origin_us: float | None = None
        self.processes: dict[int, _Process] = defaultdict(_Process)
        # Kernels: number of the function, start and end in s, device, stream, 1 in a CUDA graph, correlation.
        self.kernels = NumberRows("qddqqqq")
        self.messages: dict[tuple[float, int, int], jobs.Message] = {}  # by (start, device, stream) of the kernel
        # Copies: number of the kind, start and end in s, device, stream, bytes, correlation, number of the name.
        self.copies = NumberRows("qddqqqqq")
        self.copy_names: dict[str, int] = {}
        # waits: correlation, start in s, stream, device, correlation of the call that recorded the event, waiting
        # stream
        self.waits = NumberRows("qdqqqq")
        self.functions: list[Function] = []
        self.written: dict[tuple[Any, ...], int] = {}  # name, and sizes as the file writes them → index in `functions`
        # equal names and threads share one object, which saves two thirds of the memory for millions of events
        self.names: dict[str, str] = {}
        self.threads: dict[int, int] = {}
        self.overheads: list[tuple[float, float]] = []
        self.endless: list[str] = []
        self.damaged: Counter[str] = Counter()  # by category
        self.first_damaged: dict[str, str] = {}  # by category
        self.unread: Counter[str] = Counter()  # by category
        self.limitations: list[str] = []
        self.keep: dict[str, Keep] = {
            "kernel": self._kernel,
            "gpu_memcpy": self._copy,
            "gpu_memset": self._copy,
            **dict.fromkeys(_CALLS, self._call),
            "cuda_sync": self._wait,
            **dict.fromkeys(_UNREAD, lambda event, start, end: self.unread.update([event.cat])),
            "cpu_op": self._cpu_op,
            "user_annotation": self._range,
            "python_function": self._module,
            # The categories of PyTorch before 1.12.
            "Kernel": self._kernel,
            "Memcpy": self._copy,
            "Memset": self._copy,
            "Runtime": self._call,
            "Operator": self._operator,
            "overhead": lambda event, start, end: self.overheads.append((start, end)),
        }

    def take(self, batch: Batch) -> None:
        """Keep the fields of a batch that the tables need. Operators are kept as columns, unless one is irregular."""
        operators = [event for event in batch.events if event.cat == "cpu_op"]
        skipped = "cpu_op" if operators and self._take_operators(operators) else None
        for number, event in enumerate(batch.events):
            category = event.cat
            if category != skipped and type(category) is str and (keep := self.keep.get(category)):
                self._take(event, keep, batch, number)
        for rows in (self.kernels, self.copies, self.waits, *(one.calls for one in self.processes.values())):
            rows.settle()

    def _take_operators(self, events: list[Event]) -> bool:
        """Keep the operators and return True if all are valid and of one process.

        Otherwise keep none and return False.
        """
        phase, _, name, pid, tid, ts, dur, args = zip(*map(msgspec.structs.astuple, events), strict=True)
        try:
            if self.origin_us is None or {*phase} != {"X"} or len({*pid}) > 1 or type(pid[0]) is not int:
                return False
            with np.errstate(invalid="ignore"):
                start_s = (np.array(array("d", ts)) - self.origin_us) * 1e-6
                end_s = start_s + np.array(array("d", dur)) * 1e-6
            if not ((start_s > -LONGEST_S) & (start_s <= end_s) & (end_s < LONGEST_S)).all():
                return False
            return self.processes[pid[0]].operators.extend(name, start_s, end_s, array("q", tid), args)
        except (AttributeError, OverflowError, TypeError, ValueError):
            return False

    def _take(self, event: Event, keep: Keep, batch: Batch, number: int) -> None:
        phase, category = event.ph, event.cat
        if phase != "X" and phase != "B":
            return
        if phase == "B" or event.dur is UNSET:  # Kineto writes a range as one event, when the range ends
            self.endless.append(str(None if event.name is UNSET else event.name))
            return
        try:
            if self.origin_us is None:
                self.origin_us = _clock(event.ts)
            start = (event.ts - self.origin_us) * 1e-6
            end = start + event.dur * 1e-6
            if not -LONGEST_S < start <= end < LONGEST_S:
                raise ValueError
            keep(event, start, end)
        except (AttributeError, OverflowError, TypeError, ValueError):
            if not self.damaged[category]:
                self.first_damaged[category] = _described(batch.written(number))
            self.damaged[category] += 1

    def refuse_too_many(self, file: Unpacked) -> None:
        """Raise ConfigError if the events to keep exceed, or clearly will exceed, the limit."""
        owned = (
            len(p.calls) + len(p.ranges) + len(p.modules) + len(p.functions) + p.operators.weight + 4
            for p in self.processes.values()
        )
        kept = sum(owned) + len(self.kernels) + len(self.copies) + len(self.overheads) + len(self.endless)
        expected = kept / file.share if file.count > FORECAST_FROM else kept
        if kept > MOST_KEPT or expected > FORECAST * MOST_KEPT:
            how_many = f"over {MOST_KEPT:,}" if kept > MOST_KEPT else f"about {expected:,.0f}"
            raise ConfigError(
                f"{self.path} holds {how_many} kernels, calls, operators and ranges, but at most {MOST_KEPT:,} are "
                "read; record fewer steps, with torch.profiler.schedule(wait=1, warmup=1, active=3)"
            )

    def _kernel(self, event: Event, start: float, end: float) -> None:
        args = _arguments(event)
        function = self._function(_text(event.name), args)
        # Kineto also writes device and stream as process and thread; some programs that cut traces keep only these
        device = event.pid if args.device is UNSET else args.device
        where = int(device), int(event.tid if args.stream is UNSET else args.stream)
        if args.collective is not NOTHING and (message := jobs.message(args.plain())):
            self.messages[start, *where] = message
        self.kernels.add((function, start, end, *where, bool(args.node), _correlation(args)))

    def _function(self, name: str, sizes: Arguments) -> int:
        """Return the index of a kernel's name with its launch sizes, which are recorded at the kernel on CUDA."""
        numbers = _whole(sizes.registers), _whole(sizes.shared)
        key = name, b"|".join((sizes.grid, sizes.block)), *numbers
        if (known := self.written.get(key)) is None:
            sides = plain(sizes.grid), plain(sizes.block)
            grid, block = (tuple(map(int, side)) if side else None for side in sides)
            self.functions.append(Function(name, grid, block, *numbers))  # type: ignore[arg-type]
            known = self.written[key] = len(self.functions) - 1
        return known

    def _name(self, event: Event) -> str:
        name = _text(event.name)
        return self.names.setdefault(name, name)

    def _thread(self, event: Event) -> int:
        thread = int(event.tid)
        return self.threads.setdefault(thread, thread)

    def _copy(self, event: Event, start: float, end: float) -> None:
        args = _arguments(event)
        name = "" if event.name is UNSET else str(event.name)
        size = _whole(args.bytes)
        self.copies.add(
            (
                COPY_KINDS.index(event.cat.lower().removeprefix("gpu_")),
                start,
                end,
                int(args.device),
                int(args.stream),
                UNKNOWN if size is None else size,
                _correlation(args),
                self.copy_names.setdefault(name, len(self.copy_names)),
            )
        )

    def _call(self, event: Event, start: float, end: float) -> None:
        name, process = _text(event.name), self._process_of(event)
        args = _NO_ARGUMENTS if event.args is UNSET else _arguments(event)
        number = (args.correlation and _correlation(args)) or UNKNOWN
        if args.grid is not NOTHING and kind(name) != Kind.GRAPH_LAUNCH:
            process.shapes[number] = self._function("", args)
        names = process.call_names
        process.calls.add((names.setdefault(name, len(names)), start, end, int(event.tid), number))

    def _wait(self, event: Event, start: float, end: float) -> None:
        """Keep the profiler's data on a wait (`enable_cuda_sync_events` of _ExperimentalConfig)."""
        args, name = _arguments(event), _text(event.name)
        stream = _stream(args.stream)
        awaited = _stream(args.awaited) if "Event" in name else stream
        waiting = stream if "Wait" in name else UNKNOWN
        self.waits.add((_correlation(args), start, awaited, int(args.device), _number(args.record), waiting))

    def _range(self, event: Event, start: float, end: float) -> None:
        name, thread, process = self._name(event), self._thread(event), self._process_of(event)
        process.ranges.append(Range(name, start, end, thread))
        if name.startswith("nccl:") and (message := jobs.called(name, _args(event).plain())):
            process.collectives[thread].append((start, end, message))

    def _module(self, event: Event, start: float, end: float) -> None:
        if (name := _text(event.name)).startswith(PREFIX):
            self._process_of(event).modules.append(Range(name, start, end, int(event.tid)))
        elif end - start >= LONG_FUNCTION_S and (not name.startswith("<") or name.startswith("<built-in")):
            self._process_of(event).functions.append(Range(self._name(event), start, end, self._thread(event)))

    def _cpu_op(self, event: Event, start: float, end: float) -> None:
        # `ProfilerStep#2`, `Optimizer.step#SGD.step` in files of PyTorch 1.12
        is_range = "#" in _text(event.name) and _args(event).sequence is UNSET
        (self._range if is_range else self._op)(event, start, end)

    def _operator(self, event: Event, start: float, end: float) -> None:
        """Keep an event of an old file, where operators and the user's ranges share one category."""
        is_op = _args(event).sequence is not UNSET or _OPERATOR.search(_text(event.name))
        (self._op if is_op else self._range)(event, start, end)

    def _op(self, event: Event, start: float, end: float) -> None:
        name, thread, process = self._name(event), self._thread(event), self._process_of(event)
        process.operators.add(name, start, end, thread, _args(event))

    def _process_of(self, event: Event) -> _Process:
        return self.processes[int(event.pid)]

    def trace(self, devices: dict[int, str], wanted: int | None, modules: Modules | None) -> Trace:
        self._refuse()
        pid = self._process(wanted)
        process = self.processes[pid]
        limitations, numbered = self.limitations, process.operators.numbered()
        launches = process.launches
        if not process.ranges and self.kernels:
            others = {n: len(one.ranges) for n, one in self.processes.items() if one.ranges and not one.launches}
            limitations += [ranges_elsewhere(others, pid)] if others else []
            if len(others) == 1:
                (marks,) = (self.processes[n] for n in others)
                numbered = numbered or marks.operators.numbered()
                process = replace(process, ranges=marks.ranges, operators=process.operators or marks.operators)
                process.modules = process.modules or marks.modules
                process.functions = process.functions or marks.functions
        ranges = process.ranges
        if modules is None and (called := called_modules(process.modules)):
            ranges, modules = [*ranges, *called[0]], called[1]
        limitations += [f"it holds {count:,} {_UNREAD[category]}" for category, count in self.unread.items()]
        if self.endless:
            limitations.append(
                f"left out: {counted(len(self.endless), 'event')} without an end ({self.endless[0]!r} …); "
                "keep the profiler running until they end"
            )
        if self.damaged:
            limitations.append(
                f"left out: {counted(self.damaged.total(), 'event')} without a valid time or number; "
                f"the first is {next(iter(self.first_damaged.values()))}"
            )
        if not self.kernels and self.launched:
            limitations.append(f"it {NOT_RECORDED}")
        kernels, copies = self.kernels.columns(), self.copies.columns()
        ran = np.concatenate([kernels[CORRELATION], copies[CORRELATION]])
        if sum(bool(one.launches) for one in self.processes.values()) > 1:
            kernels, copies = (
                [column[launches.has(rows[CORRELATION])] for column in rows] for rows in (kernels, copies)
            )
            if left_out := len(self.kernels) - len(kernels[0]):
                limitations.append(f"{left_out} kernels are left out: another or an unknown process launched them")
        graphs = launches.named(lambda name: kind(name) == Kind.GRAPH_LAUNCH)
        # Launches of CUDA graphs without a kernel.
        if empty := int((graphs & ~launches.among(kernels[CORRELATION])).sum()):
            limitations.append(
                f"{empty} of {graphs.sum()} launches of CUDA graphs have no recorded kernel; record with a "
                "newer PyTorch, whose profiler records the kernels of graphs"
            )
        columns = self._kernels_of(kernels, process, launches.numbers[graphs])
        trace = Trace(
            source=str(self.path),
            profiler="kineto",
            devices=devices,
            kernels=columns,
            copies=self._copies_of(copies, launches),
            calls=launches.calls,
            ranges=Ranges.of(ranges),
            overheads=self.overheads,
            ops=numbered,
            limitations=tuple(limitations),
            modules=modules,
            operators=process.operators.read(),
            knows_operators=True,
            messages=_messages_around(columns, process) | self._messages_of(columns),
            lacks_kernels=empty > 0,
            lost_launches=_lost_launches(launches, columns, ran),
            waits=self._waits_of(launches),
            functions=Ranges.of(process.functions),
        )
        return outermost_calls(trace)

    @property
    def launched(self) -> bool:
        """Return whether a call launched something."""
        return any("Launch" in name for process in self.processes.values() for name in process.call_names)

    def _kernels_of(self, columns: list[Any], process: _Process, graphs: Ints) -> Kernels:
        """Return the kernels, with fields from their launch: their sizes on ROCm, and in old files the graph."""
        function, start_s, end_s, device, stream, in_graph, correlation = columns
        functions = self.functions
        if process.shapes:
            numbers = {one: number for number, one in enumerate(functions)}
            function = function.copy()
            for at in np.flatnonzero(np.array([one.grid is None for one in functions])[function]).tolist():
                if (sizes := process.shapes.get(int(correlation[at]))) is not None:
                    whole = functions[sizes]._replace(name=functions[function[at]].name)
                    function[at] = numbers.setdefault(whole, len(numbers))
            functions = [*numbers]
        return Kernels.launched(
            Categorical(functions, function),
            start_s,
            end_s,
            device,
            stream,
            (in_graph != 0) | np.isin(correlation, graphs),
            process.launches.of(correlation, start_s),
            process.launches.calls,
        )

    def _copies_of(self, columns: list[Any], launches: Launches) -> Copies:
        kinds, start_s, end_s, device, stream, size, correlation, name = columns
        names = Categorical([copy_name(one) for one in self.copy_names], name)
        call = launches.of(correlation, start_s)
        copies = Copies(Categorical(COPY_KINDS, kinds), start_s, end_s, device, stream, size, call, names)
        return copies.take(np.argsort(start_s, kind="stable"))

    def _waits_of(self, launches: Launches) -> Waits:
        correlation, start_s, stream, device, record, waiting = self.waits.columns()
        call = launches.of(correlation, start_s)
        waits = Waits(call, stream, device, launches.of(record, start_s), waiting)
        return waits.take(call != UNKNOWN)

    def _messages_of(self, kernels: Kernels) -> dict[int, jobs.Message]:
        """Return the messages by the index of their kernel."""
        if not self.messages:
            return {}
        keys = zip(kernels.start_s.tolist(), kernels.device.tolist(), kernels.stream.tolist(), strict=True)
        return {i: self.messages[key] for i, key in enumerate(keys) if key in self.messages}

    def _refuse(self) -> None:
        """Raise ConfigError if no table can be made of the events.

        Ranges or operators without kernels are a valid trace of the host.
        """
        ranges = any(process.ranges for process in self.processes.values())
        operators = any(process.operators for process in self.processes.values())
        for what, category, found in (
            ("kernel", "kernel", self.kernels),
            ("range", "user_annotation", self.kernels or ranges),
        ):
            if not found and (count := self.damaged[category]):
                raise ConfigError(
                    f"{self.path} is damaged: no {what} has a valid time and valid numbers of its thread or device "
                    f"({counted(count, what)}, the first {self.first_damaged[category]}); record again"
                )
        if operators:
            return
        if not self.kernels and (count := self.unread["cuda_profiler_range"]):
            raise ConfigError(f"{self.path} holds no kernel, but {count:,} {_UNREAD['cuda_profiler_range']}")
        if not self.kernels and self.launched:
            raise ConfigError(f"{self.path} {NOT_RECORDED}")
        if not self.kernels and not ranges and not self.endless:
            raise ConfigError(
                f"{self.path} holds no kernel and no range; {RECORD}, and mark step, forward, backward … with "
                "torch.profiler.record_function"
            )
        if not self.kernels and not ranges:
            raise ConfigError(
                f"{self.path} holds no kernel and no range that ends ({self.endless[0]!r} never ends); record "
                "again, and stop the profiler only after the ranges have ended"
            )

    def launching(self) -> list[int]:
        """Return the pids of the processes that launched kernels, in order."""
        kernels = self.kernels.columns()[CORRELATION]
        found = (pid for pid, process in self.processes.items() if process.launches)
        return sorted(pid for pid in found if self.processes[pid].launches.has(kernels).any())

    def _process(self, wanted: int | None) -> int:
        """Return the pid of the process to read: `wanted`, or the one with the most kernels, with a limitation.

        Processes that launched kernels qualify, or those with ranges if none launched any.

        Raises:
            ConfigError: The wanted process does not qualify, or the process of a kernel is unknown.
        """
        kernels = self.kernels.columns()[CORRELATION]
        found = Counter({pid: len(kernels) for pid, process in self.processes.items() if process.launches})
        what = "kernel"
        if not len(kernels) or not found:
            what, counts = "range", {pid: len(process.ranges) for pid, process in self.processes.items()}
            if not any(counts.values()):
                what, counts = "operator", {pid: len(process.operators) for pid, process in self.processes.items()}
            found = Counter({pid: count for pid, count in counts.items() if count})
        elif len(found) > 1:
            numbers, owners = np.unique(
                np.concatenate([self.processes[pid].launches.numbers for pid in found]), return_counts=True
            )
            if np.isin(kernels, numbers[owners > 1]).any():
                raise ConfigError(
                    f"{self.path} holds the processes {listed(map(str, sorted(found)))} with the same correlation ids, "
                    "so the process of a kernel is unknown; analyze a separate trace of each process"
                )
            counts = {pid: int(self.processes[pid].launches.has(kernels).sum()) for pid in found}
            found = Counter({pid: count for pid, count in counts.items() if count})
        pid, note = chosen_process(self.path, found, what, wanted)
        self.limitations += [note] if note else []
        return pid


def _messages_around(kernels: Kernels, process: _Process) -> dict[int, jobs.Message]:
    """Return the messages in the ranges around the launches of collectives, by the index of the kernel."""
    found: dict[int, jobs.Message] = {}
    if not process.collectives:
        return found
    which = np.flatnonzero(kernels.function.codes_where(lambda function: jobs.COLLECTIVE.search(function.name)))
    calls = {thread: sorted(rows, key=itemgetter(0)) for thread, rows in process.collectives.items()}
    launches = zip(which.tolist(), kernels.thread[which].tolist(), kernels.launch_start_s[which].tolist(), strict=True)
    for index, thread, launched in launches:
        rows = calls.get(thread, [])
        if (begun := bisect_right(rows, launched, key=itemgetter(0))) and launched <= rows[begun - 1][1]:
            found[index] = rows[begun - 1][2]
    return found


def _args(event: Event) -> Arguments:
    return event.args if isinstance(event.args, Arguments) else _NO_ARGUMENTS


def _arguments(event: Event) -> Arguments:
    """Return an event's arguments; raise TypeError if it has none."""
    if isinstance(event.args, Arguments):
        return event.args
    raise TypeError


def _text(name: Any) -> str:
    """Return an event's name as text; raise ValueError if it has none."""
    if name is UNSET:
        raise ValueError
    return str(name)


def _correlation(args: Arguments) -> int:
    return _number(args.correlation)


def _number(value: Any) -> int:
    """Return an identifying number wrapped to a signed 64-bit integer; UNKNOWN if there is none."""
    number = UNKNOWN if value is UNSET else int(value)
    return number if -(1 << 63) <= number < 1 << 63 else wrapped(number)


def _stream(value: Any) -> int:
    """Return a stream's number; UNKNOWN for CUPTI's number for no stream."""
    number = _number(value)
    return UNKNOWN if number in (INVALID, UNKNOWN) else number


def _clock(time_us: Any) -> float:
    """Return the time of the first event, the origin of all others; raise ValueError if it is not a valid time."""
    if not -LATEST_US < time_us < LATEST_US:
        raise ValueError
    return float(time_us)


def _lost_launches(launches: Launches, kernels: Kernels, ran: Ints) -> Floats:
    """Return the starts of the lost launches; `ran` are the correlations of all kernels and copies."""
    launching = launches.named(launches_kernel)
    return lost_launches(kernels, launches.calls, launches.first[launching], launches.among(ran)[launching])


def _whole(value: Any) -> int | None:
    return value if type(value) is int and abs(value) < 1 << 63 else None


def _described(event: dict[str, Any]) -> str:
    """Return a description of an unusable event, for a message."""
    fields = ", ".join(f"{name} {shown(event[name])}" for name in ("name", "ts", "dur", "args") if name in event)
    return f"a {event['cat']} with {fields or 'no field'}"
