"""Common form of a trace, which every reader returns and every table is made from: a `Trace` of one process.

Times are seconds from an origin that the reader chooses, on one clock for host and device. A thread is identified by a
number that is unique in the trace. Large tables are stored as columns: arrays with one entry per row. An unrecorded
value is None in a row made from the columns, and UNKNOWN or NaN in a column.

The calls of the CUDA, HIP or XPU interface are in `Trace.calls`; `call` of a kernel, copy or wait is the index of its
call there. A reader first collects all calls, with `call` as an index into them; `outermost_calls` then keeps only the
outermost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from cs_systems.readers.forms.columns import (
    NO_RANGES,
    UNKNOWN,
    Bools,
    Categorical,
    Columns,
    Floats,
    Ints,
    Ranges,
    Spans,
    distinct,
    outermost,
    taken,
)
from cs_systems.readers.forms.jobs import Job, Message
from cs_systems.readers.forms.modules import Modules
from cs_systems.readers.forms.operators import Operators

UNIFIED = "unified"  # part of a copy's name: pages of managed memory that moved to where they were accessed
WHOLE_GRAPH = "CUDA graph "  # prefix of the name of a graph that was recorded as one kernel


class Function(NamedTuple):
    """Kernel name and launch configuration, shared by many launches."""

    name: str  # demangled, as the profiler wrote it
    grid: tuple[int, int, int] | None  # blocks
    block: tuple[int, int, int] | None  # threads
    registers: int | None  # per thread
    shared_bytes: int | None  # per block, static and dynamic


class Kernel(NamedTuple):
    """One execution of a kernel, and the host call that launched it (None where the call was not recorded).

    The kernels of a CUDA graph share one launch.
    """

    function: Function
    start_s: float
    end_s: float
    device: int
    stream: int | None
    thread: int | None
    launch_start_s: float | None
    launch_end_s: float | None
    in_graph: bool


class Call(NamedTuple):
    """Call of the CUDA, HIP or XPU interface by the host; `readers._stalls.kind` gives its kind from the name."""

    name: str
    start_s: float
    end_s: float
    thread: int


class Calls(Spans):
    """All calls in order of their start: the fields of `Call` as columns.

    Calls of one thread do not enclose each other: a driver's call inside a call of the runtime is left out.
    """

    def __iter__(self) -> Iterator[Call]:
        return map(Call, self.name, self.start_s.tolist(), self.end_s.tolist(), self.thread.tolist())

    def where(self, wanted: Callable[[str], object]) -> Calls:
        """Return the calls with a name that `wanted` accepts."""
        return self.take(self.name.codes_where(wanted))


_none, _never = np.empty(0, np.int64), np.empty(0)
NO_CALLS = Calls(Categorical([], _none), _never, _never, _none)

# Function, start and end in s, device, stream, whether a CUDA graph ran it, index of the call that launched it.
KernelRow = tuple[Function, float, float, int, int, bool, int]


@dataclass(frozen=True, slots=True)
class Kernels(Columns):
    """All kernel executions in order of their start: the fields of `Kernel` as columns.

    `thread` and the times of the launch come from the call to which the profiler attributes the kernel. It may lie
    inside `call`, the index in `Trace.calls`. All are UNKNOWN or NaN where the launch was not recorded.
    """

    function: Categorical[Function]
    start_s: Floats
    end_s: Floats
    device: Ints
    stream: Ints
    thread: Ints
    launch_start_s: Floats
    launch_end_s: Floats
    in_graph: Bools
    call: Ints

    @classmethod
    def of(cls, rows: Iterable[KernelRow], calls: Calls = NO_CALLS) -> Kernels:
        """Return the kernels in order of their start; the last entry of a row is an index into `calls`."""
        function, start, end, device, stream, in_graph, call = (
            zip(*rows, strict=True) if (rows := [*rows]) else ((),) * 7
        )
        return cls.launched(
            Categorical.of(function),
            np.array(start, np.float64),
            np.array(end, np.float64),
            np.array(device, np.int64),
            np.array(stream, np.int64),
            np.array(in_graph, bool),
            np.array(call, np.int64),
            calls,
        )

    @classmethod
    def launched(
        cls,
        function: Categorical[Function],
        start_s: Floats,
        end_s: Floats,
        device: Ints,
        stream: Ints,
        in_graph: Bools,
        call: Ints,
        calls: Calls,
    ) -> Kernels:
        """Return the kernels from columns in any order."""
        order = np.argsort(start_s, kind="stable")
        call = call[order]
        return cls(
            function=function.take(order).in_order_of_use(),
            start_s=start_s[order],
            end_s=end_s[order],
            device=device[order],
            stream=stream[order],
            thread=taken(calls.thread, call, UNKNOWN),
            launch_start_s=taken(calls.start_s, call, math.nan),
            launch_end_s=taken(calls.end_s, call, math.nan),
            in_graph=in_graph[order],
            call=call,
        )

    @property
    def launched_s(self) -> Floats:
        """Start of each kernel's launch; if it was not recorded, -inf before the recording, else the kernel's start.

        A stream runs its kernels in order, so kernels ahead of its first recorded launch were launched before the
        recording. If no launch was recorded at all, this is unknown.
        """
        lost = np.isnan(self.launch_start_s)
        launched = np.where(lost, self.start_s, self.launch_start_s)
        if lost.any() and not lost.all():
            first, stream = distinct(self.device, self.stream)
            recorded = np.full(len(first), len(self))
            np.minimum.at(recorded, stream[~lost], np.flatnonzero(~lost))
            launched[np.arange(len(self)) < recorded[stream]] = -np.inf
        return launched

    def __getitem__(self, i: int) -> Kernel:
        return next(self.rows(np.array([i])))

    def __iter__(self) -> Iterator[Kernel]:
        return self.rows(np.arange(len(self)))

    def rows(self, which: Ints | Bools) -> Iterator[Kernel]:
        columns = (getattr(self, name)[which].tolist() for name in Kernel._fields[1:])
        for function, start, end, device, stream, thread, launch, launched, graph in zip(
            self.function.take(which), *columns, strict=True
        ):
            known = not math.isnan(launch)
            yield Kernel(
                function,
                start,
                end,
                device,
                None if stream == UNKNOWN else stream,
                thread if known else None,
                launch if known else None,
                launched if known else None,
                graph,
            )


NO_KERNELS = Kernels.of(())


@dataclass(frozen=True, slots=True)
class Allocations(Columns):
    """Calls that allocated or freed device memory, in order of time.

    `change_bytes` is negative for a free; `thread` is UNKNOWN where the call was not recorded.
    """

    time_s: Floats
    thread: Ints
    change_bytes: Ints


class Copy(NamedTuple):
    """Memcpy or memset on the device."""

    kind: str  # "memcpy" or "memset"
    start_s: float
    end_s: float
    device: int
    stream: int | None
    bytes: int | None
    call: int | None = None  # index of the call that requested it
    name: str = ""  # direction and kind of memory: "HtoD pageable", "DtoH unified", "DtoD"; "" if not recorded


@dataclass(frozen=True, slots=True)
class Copies(Columns):
    """All copies in order of their start: the fields of `Copy` as columns."""

    kind: Categorical[str]
    start_s: Floats
    end_s: Floats
    device: Ints
    stream: Ints
    bytes: Ints
    call: Ints
    name: Categorical[str]

    @classmethod
    def of(cls, rows: Iterable[Copy]) -> Copies:
        """Return the copies of an iterable, in order of their start."""
        ordered = sorted(rows, key=itemgetter(1))
        kind, start, end, *numbers, name = zip(*ordered, strict=True) if ordered else ((),) * len(Copy._fields)
        times = np.array(start, np.float64), np.array(end, np.float64)
        device, stream, size, call = (
            np.array([UNKNOWN if value is None else value for value in column], np.int64) for column in numbers
        )
        return cls(Categorical.of(kind), *times, device, stream, size, call, Categorical.of(name))

    def __iter__(self) -> Iterator[Copy]:
        times = self.start_s.tolist(), self.end_s.tolist(), self.device.tolist()
        known = (
            [None if value == UNKNOWN else value for value in column.tolist()]
            for column in (self.stream, self.bytes, self.call)
        )
        return map(Copy, self.kind, *times, *known, self.name)


@dataclass(frozen=True, slots=True)
class Waits(Columns):
    """Waits with a cause that the file itself names, in any order.

    A call may wait without a row here: most files name no cause. `stream` is the stream waited for, on `device`;
    UNKNOWN for all streams of the device, or if the file does not say on which stream an event was recorded.
    `event_call` is the index of the call that recorded the event; UNKNOWN if the call was not recorded, or the wait is
    not for an event. `waiting_stream` is the stream that waits (cudaStreamWaitEvent); UNKNOWN if the host waits inside
    the call.
    """

    call: Ints
    stream: Ints
    device: Ints
    event_call: Ints
    waiting_stream: Ints


INVALID = (1 << 32) - 1  # CUPTI's number for no stream or no event
NO_COPIES, NO_WAITS = Copies.of(()), Waits(*[_none] * 5)


class Step(NamedTuple):
    """Step of the program: the begin and end of its range, by the host's clock.

    `takes_earlier`: kernels launched before this step, even before the recording, belong to it, because it is the
    first. `number`: index from 0, which also counts steps that are left out.
    """

    name: str
    start_s: float
    end_s: float
    takes_earlier: bool = False
    number: int = 0


def steps_of(time_s: Floats, steps: Sequence[Step]) -> tuple[Ints, Bools]:
    """Return (step number, inside) for each time.

    The number is that of the last step that had begun, -1 before the first; `inside` is true where that step had not
    ended.
    """
    number = np.searchsorted([step.start_s for step in steps], time_s, "right") - 1
    if steps[:1] and steps[0].takes_earlier:
        number = np.maximum(number, 0)
    return number, (number >= 0) & (time_s <= np.array([step.end_s for step in steps])[number])


class Op(NamedTuple):
    """Operator with autograd's sequence number.

    `forward_thread` is 0 for a forward operator. For a backward operator it is autograd's number (not the system's) of
    the thread that ran the forward operator with the same sequence number.
    """

    name: str
    start_s: float
    end_s: float
    thread: int
    sequence: int
    forward_thread: int


@dataclass(frozen=True)
class Ops(Spans):
    """Fields of `Op` as columns."""

    sequence: Ints
    forward_thread: Ints

    def __iter__(self) -> Iterator[Op]:
        columns = (self.start_s, self.end_s, self.thread, self.sequence, self.forward_thread)
        return map(Op, self.name, *(column.tolist() for column in columns))


@dataclass(frozen=True, slots=True)
class Trace:
    """Contents of a trace of one process.

    `limitations` lists, as sentences, the data that the file lacks. `ops` and `allocations` are None if the profiler
    recorded none, `modules` is None if no recorder wrote them. `ops` are the entries of `operators` with a sequence
    number. `knows_operators`: the profiler can record operators, also if it recorded none. `messages` maps the index of
    a collective's kernel to the profiler's description of the call. `lacks_kernels`: the device ran kernels that the
    file does not hold, so its idle time is unknown. `lost_launches` are the starts of launches without a kernel because
    of a fault of the profiler (see `_lost_kernels`). `functions` are the calls of Python functions that last half a
    millisecond or more, where stacks were recorded. `multiprocessors` has the number of each device, where the profiler
    recorded it. `processes` are the pids of all that launched kernels, where the file holds several.
    """

    source: str
    profiler: str  # "nsys", "kineto", "rocprofv3" …
    devices: dict[int, str]  # number → name
    kernels: Kernels
    copies: Copies
    calls: Calls
    ranges: Ranges
    overheads: list[tuple[float, float]]  # when the profiler itself delayed the host: (start, end) in s
    ops: Ops | None
    limitations: tuple[str, ...]
    allocations: Allocations | None = None
    modules: Modules | None = None
    operators: Operators | None = None
    job: Job | None = None
    messages: Mapping[int, Message] = field(default_factory=dict)
    knows_operators: bool = False
    lacks_kernels: bool = False
    lost_launches: Floats = field(default_factory=lambda: np.empty(0))
    waits: Waits = NO_WAITS
    functions: Ranges = NO_RANGES
    multiprocessors: dict[int, int] = field(default_factory=dict)
    processes: tuple[int, ...] = ()

    def is_module(self, name: str) -> bool:
        """Return whether a range of this name is a call of a module of the model."""
        return self.modules is not None and self.modules.is_module(name)


def outermost_calls(trace: Trace) -> Trace:
    """Return the trace with only the outermost calls of each thread, in order of their start.

    Work launched by a nested call then belongs to the outer one.
    """
    around = outermost(trace.calls.thread, trace.calls.start_s, trace.calls.end_s)
    kept = np.flatnonzero(around == np.arange(len(around)))
    kept = kept[np.argsort(trace.calls.start_s[kept], kind="stable")]
    if np.array_equal(kept, np.arange(len(around))):
        return trace
    number = np.empty(len(around), np.int64)
    number[kept] = np.arange(len(kept))
    number = number[around]
    waits = replace(
        trace.waits,
        call=taken(number, trace.waits.call, UNKNOWN),
        event_call=taken(number, trace.waits.event_call, UNKNOWN),
    )
    return replace(
        trace,
        calls=trace.calls.take(kept),
        kernels=replace(trace.kernels, call=taken(number, trace.kernels.call, UNKNOWN)),
        copies=replace(trace.copies, call=taken(number, trace.copies.call, UNKNOWN)),
        waits=waits,
    )
