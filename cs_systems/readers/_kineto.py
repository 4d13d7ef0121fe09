"""Reader of Kineto's traces, which `torch.profiler` exports as Chrome traces (.json, .json.gz): events to a `Trace`.

The reader keeps only the events that the tables need, so that a trace of many hundred megabytes need not fit into
memory. Kineto writes complete ("X") events with times in µs.
"""

from __future__ import annotations

import gzip
import re
import zlib
from array import array
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET

from cs_systems.config import ConfigError
from cs_systems.core.formats import Unpacked
from cs_systems.core.units import counted
from cs_systems.core.validation import shown
from cs_systems.readers._called_modules import PREFIX, called_modules
from cs_systems.readers._chrome_trace import NOTHING, Arguments, Batch, Event, Text, events, header, plain
from cs_systems.readers._lost_kernels import explains, launches_kernel, lost_launches
from cs_systems.readers._operators import OperatorReader
from cs_systems.readers._processes import chosen_process, listed, ranges_elsewhere
from cs_systems.readers._stalls import stalls
from cs_systems.readers.forms import jobs
from cs_systems.readers.forms.columns import UNKNOWN, Floats, Range, Ranges
from cs_systems.readers.forms.modules import HEADER, Modules, unpacked
from cs_systems.readers.forms.trace import Call, Copy, Function, KernelRow, Kernels, Launch, Trace, without_collector

LONGEST_S = 1e9  # from the first event; a time beyond this is damaged
LATEST_US = 1e17  # in the profiler's clock: 3,000 years
MOST_KEPT = 10_000_000  # limit of events kept for the tables: about 3.5 GB of memory with the tables
FORECAST = 2  # multiple of MOST_KEPT that the forecast may reach while the file is read
FORECAST_FROM = 1 << 25  # bytes to read before the forecast is used
_OPERATOR = re.compile(r"^\w+::|Backward\d*$|^detach_?$")  # marks the name of an operator, as opposed to a range
RECORD = "record with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], on a machine with a GPU"
NOT_RECORDED = (
    "holds no kernel, although some were launched, so the GPU's profiling interface recorded none; stop other "
    "profilers (nsys, ncu, DCGM), look for CUPTI errors in the program's output, and record again"
)
# Categories of calls that launch work: of CUDA, ROCm, Intel, and devices that PyTorch does not know.
_CALLS = tuple(
    f"{device}_{level}" for device in ("cuda", "hip", "xpu", "privateuse1") for level in ("runtime", "driver")
)
# Category that is counted but not read → its meaning, and the remedy.
_UNREAD = {
    "mtia_ccp_events": "events of an MTIA accelerator, which are not read",
    "hpu_op": "events of a Gaudi accelerator, which are not read",
    "cuda_profiler_range": "counters of kernels in place of their times; record without profiler_metrics in "
    "_ExperimentalConfig",
}

_NO_ARGUMENTS = Arguments()
Keep = Callable[[Event, float, float], None]


@without_collector()
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
            devices, modules = _devices(before), unpacked(before.get(HEADER))
            reader = _Reader(path)
            for batch in events(text):
                reader.take(batch)
                reader.refuse_too_many(file)
            if text.arrays > 1:
                reader.limitations.append(f"it has traceEvents {text.arrays} times; the events of all are read")
            job = jobs.job(before, reader.origin_us)
            return replace(reader.trace(devices, process, modules), job=job)
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


def stated_job(path: Path) -> jobs.Job:
    """Return the identity that the header states."""
    with closing(Unpacked(path)) as file:
        return jobs.job(header(Text(file, path)))


def _devices(before: dict[str, Any]) -> dict[int, str]:
    """Return the device names by device number; empty if `deviceProperties` does not have the profiler's form."""
    properties = before.get("deviceProperties")
    known = [one for one in properties if isinstance(one, dict)] if isinstance(properties, list) else []
    return {one["id"]: str(one["name"]) for one in known if type(one.get("id")) is int and one.get("name")}


@dataclass
class _Process:
    """Host events of one process."""

    launches: dict[int, Launch] = field(default_factory=dict)  # by correlation
    reused: dict[int, list[Launch]] = field(default_factory=dict)  # further calls with a correlation, after the first
    graphs: set[int] = field(default_factory=set)  # correlations of launches of whole CUDA graphs
    launching: set[int] = field(default_factory=set)  # correlations of launches of one kernel
    captures: list[Call] = field(default_factory=list)  # calls that record CUDA graphs
    shapes: dict[int, Function] = field(default_factory=dict)  # correlation → sizes, where the call has them
    ranges: list[Range] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    operators: OperatorReader = field(default_factory=OperatorReader)
    modules: list[Range] = field(default_factory=list)  # calls of modules, from Python's stacks
    # Calls of collectives by thread: (start, end, message of the range)
    collectives: dict[int, list[tuple[float, float, jobs.Message]]] = field(default_factory=lambda: defaultdict(list))


class _Reader:
    """Collector of the needed fields of each event; it matches kernels with their launches after the last event."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.origin_us: float | None = None
        self.processes: dict[int, _Process] = defaultdict(_Process)
        self.kernels: list[KernelRow] = []
        self.messages: dict[tuple[float, int, int], jobs.Message] = {}  # by (start, device, stream) of the kernel
        self.copies: list[tuple[Copy, int]] = []  # with the correlation id
        self.functions: dict[tuple[Any, ...], Function] = {}  # by name, and sizes as the file writes them
        # Equal names and threads share one object: a third of the memory of millions of events.
        self.names: dict[str, str] = {}
        self.threads: dict[int, int] = {}
        self.overheads: list[tuple[float, float]] = []
        self.launched = False
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
        """Keep the fields of a batch that the tables need; operators are kept as columns, unless one is irregular."""
        operators = [event for event in batch.events if event.cat == "cpu_op"]
        skipped = "cpu_op" if operators and self._take_operators(operators) else None
        for number, event in enumerate(batch.events):
            category = event.cat
            if category != skipped and type(category) is str and (keep := self.keep.get(category)):
                self._take(event, keep, batch, number)

    def _take_operators(self, events: list[Event]) -> bool:
        """Keep the operators and return True if all are valid and of one process; else keep none and return False."""
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
            len(p.launches) + len(p.ranges) + len(p.modules) + len(p.calls) + p.operators.weight + 4
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
        # Kineto writes device and stream as process and thread, too; some programs that cut traces keep only these.
        device = event.pid if args.device is UNSET else args.device
        where = int(device), int(event.tid if args.stream is UNSET else args.stream)
        if args.collective is not NOTHING and (message := jobs.message(args.plain())):
            self.messages[start, *where] = message
        self.kernels.append((function, start, end, *where, bool(args.node), _correlation(args)))

    def _function(self, name: str, sizes: Arguments) -> Function:
        """Return a kernel's name with the sizes of its launch, which CUDA's profiler writes at the kernel."""
        numbers = _whole(sizes.registers), _whole(sizes.shared)
        key = name, b"|".join((sizes.grid, sizes.block)), *numbers
        if (known := self.functions.get(key)) is None:
            sides = plain(sizes.grid), plain(sizes.block)
            grid, block = (tuple(map(int, side)) if side else None for side in sides)
            known = self.functions[key] = Function(name, grid, block, *numbers)  # type: ignore[arg-type]
        return known

    def _name(self, event: Event) -> str:
        name = _text(event.name)
        return self.names.setdefault(name, name)

    def _thread(self, event: Event) -> int:
        thread = int(event.tid)
        return self.threads.setdefault(thread, thread)

    def _copy(self, event: Event, start: float, end: float) -> None:
        args = _arguments(event)
        kind = event.cat.lower().removeprefix("gpu_")
        copy = Copy(kind, start, end, int(args.device), int(args.stream), _whole(args.bytes))
        self.copies.append((copy, _correlation(args)))

    def _call(self, event: Event, start: float, end: float) -> None:
        name, thread, process = self._name(event), self._thread(event), self._process_of(event)
        self.launched = self.launched or "Launch" in name
        args = _NO_ARGUMENTS if event.args is UNSET else _arguments(event)
        if correlation := args.correlation:
            # Keep the outer call, which comes first. Triton and cuBLAS launch through the driver alone.
            call, number = (start, end, thread), int(correlation)
            first = process.launches.setdefault(number, call)
            if first is not call and (start >= first[1] or end <= first[0]):
                process.reused.setdefault(number, []).append(call)
            if launches_kernel(name):
                process.launching.add(number)
            if "GraphLaunch" in name:
                process.graphs.add(number)
            elif args.grid is not NOTHING:
                process.shapes[number] = self._function("", args)
        if stalls(name):
            process.calls.append(Call(name, start, end, thread))
        elif explains(name):
            process.captures.append(Call(name, start, end, thread))

    def _range(self, event: Event, start: float, end: float) -> None:
        name, thread, process = self._name(event), self._thread(event), self._process_of(event)
        process.ranges.append(Range(name, start, end, thread))
        if name.startswith("nccl:") and (message := jobs.called(name, _args(event).plain())):
            process.collectives[thread].append((start, end, message))

    def _module(self, event: Event, start: float, end: float) -> None:
        if (name := _text(event.name)).startswith(PREFIX):
            self._process_of(event).modules.append(Range(name, start, end, int(event.tid)))

    def _cpu_op(self, event: Event, start: float, end: float) -> None:
        # `ProfilerStep#2`, `Optimizer.step#SGD.step` in files of PyTorch 1.12
        is_range = "#" in _text(event.name) and _args(event).sequence is UNSET
        (self._range if is_range else self._op)(event, start, end)

    def _operator(self, event: Event, start: float, end: float) -> None:
        """Keep an event of an old file, in which operators and the user's ranges share one category."""
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
        if not process.ranges and self.kernels:
            others = {n: len(one.ranges) for n, one in self.processes.items() if one.ranges and not one.launches}
            limitations += [ranges_elsewhere(others, pid)] if others else []
            if len(others) == 1:
                (marks,) = (self.processes[n] for n in others)
                numbered = numbered or marks.operators.numbered()
                process = replace(process, ranges=marks.ranges, operators=process.operators or marks.operators)
                process.modules = process.modules or marks.modules
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
        kernels, copies = self.kernels, self.copies
        if sum(bool(one.launches) for one in self.processes.values()) > 1:
            kernels = [row for row in kernels if row[-1] in process.launches]
            copies = [row for row in copies if row[-1] in process.launches]
            if left_out := len(self.kernels) - len(kernels):
                limitations.append(f"{left_out} kernels are left out: another or an unknown process launched them")
        empty = 0  # launches of CUDA graphs
        if process.graphs or process.shapes:
            kernels = [_completed(row, process) for row in kernels]
            if empty := len(process.graphs - {row[-1] for row in kernels}):
                limitations.append(
                    f"{empty} of {len(process.graphs)} launches of CUDA graphs have no recorded kernel; record with a "
                    "newer PyTorch, whose profiler records the kernels of graphs"
                )
        if process.reused:
            kernels = _of_latest_calls(kernels, process)
        columns = Kernels.of(kernels, process.launches)
        return Trace(
            source=str(self.path),
            profiler="kineto",
            devices=devices,
            kernels=columns,
            copies=[copy for copy, _ in copies],
            calls=process.calls,
            ranges=Ranges.of(ranges),
            overheads=self.overheads,
            ops=numbered,
            limitations=tuple(limitations),
            modules=modules,
            operators=process.operators.read(),
            knows_operators=True,
            messages=_messages_around(columns, process) | self._messages_of(columns),
            lacks_kernels=empty > 0,
            lost_launches=self._lost_launches(process, columns),
        )

    def _lost_launches(self, process: _Process, kernels: Kernels) -> Floats:
        ran = {row[-1] for row in (*self.kernels, *self.copies)}
        if process.launching <= ran:
            return np.empty(0)
        start, end, thread = zip(*(process.launches[number] for number in process.launching), strict=True)
        has_run = np.array([number in ran for number in process.launching])
        others = [*process.calls, *process.captures]
        return lost_launches(kernels, np.array(start), np.array(end), np.array(thread), has_run, others)

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

    def _process(self, wanted: int | None) -> int:
        """Return the pid of the process to read: `wanted`, or the one with the most kernels, with a limitation.

        Processes that launched kernels qualify, or those with ranges if none launched any.

        Raises:
            ConfigError: The wanted process does not qualify, or the process of a kernel is unknown.
        """
        found = Counter({pid: len(self.kernels) for pid, process in self.processes.items() if process.launches})
        what = "kernel"
        if not self.kernels or not found:
            what, counts = "range", {pid: len(process.ranges) for pid, process in self.processes.items()}
            if not any(counts.values()):
                what, counts = "operator", {pid: len(process.operators) for pid, process in self.processes.items()}
            found = Counter({pid: count for pid, count in counts.items() if count})
        elif len(found) > 1:
            owner: dict[int, int] = {}
            alike = set[int]()
            for pid in found:
                launches = self.processes[pid].launches
                alike |= owner.keys() & launches.keys()
                owner.update(dict.fromkeys(launches, pid))
            if any(kernel[-1] in alike for kernel in self.kernels):
                raise ConfigError(
                    f"{self.path} holds the processes {listed(map(str, sorted(found)))} with the same correlation ids, "
                    "so the process of a kernel is unknown; analyze a separate trace of each process"
                )
            found = Counter(owner[kernel[-1]] for kernel in self.kernels if kernel[-1] in owner)
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
    return UNKNOWN if args.correlation is UNSET else int(args.correlation)


def _clock(time_us: Any) -> float:
    """Return the time of the first event, the origin of all others; raise ValueError if it is not a valid time."""
    if not -LATEST_US < time_us < LATEST_US:
        raise ValueError
    return float(time_us)


def _completed(row: KernelRow, process: _Process) -> KernelRow:
    """Return a kernel with fields from its launch: its sizes on ROCm, and in old files whether a graph ran it."""
    function, *times_and_place, in_graph, correlation = row
    if function.grid is None and correlation in process.shapes:
        function = process.shapes[correlation]._replace(name=function.name)
    return (function, *times_and_place, in_graph or correlation in process.graphs, correlation)  # type: ignore[return-value]


def _of_latest_calls(rows: Iterable[KernelRow], process: _Process) -> list[KernelRow]:
    """Return the kernels with unique correlation ids where several calls share one, because ROCm reuses ids.

    A kernel was launched by the latest call before it; of nested calls, by the outermost.
    """
    calls: dict[int, list[Launch]] = {}
    for correlation, others in process.reused.items():
        outermost = calls[correlation] = []
        for call in sorted([process.launches[correlation], *others], key=lambda call: (call[0], -call[1])):
            if not outermost or call[1] > outermost[-1][1]:
                outermost.append(call)
    apart = []
    for number, row in enumerate(rows):
        if of := calls.get(row[-1]):
            key = -2 - number
            process.launches[key] = of[max(0, bisect_right(of, row[1], key=itemgetter(0)) - 1)]
            row = (*row[:-1], key)
        apart.append(row)
    return apart


def _whole(value: Any) -> int | None:
    return value if type(value) is int and abs(value) < 1 << 63 else None


def _described(event: dict[str, Any]) -> str:
    """Return a description of an unusable event, for a message."""
    fields = ", ".join(f"{name} {shown(event[name])}" for name in ("name", "ts", "dur", "args") if name in event)
    return f"a {event['cat']} with {fields or 'no field'}"
