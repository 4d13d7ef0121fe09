"""Common form of a trace, which every reader returns and every table is made from: a `Trace` of one process.

Times are seconds from an origin that the reader chooses, on one clock for host and device. A thread is a number that is
unique in the trace. Large tables are stored as columns: arrays with one entry a row. An unrecorded value is None in a
row made from the columns, and UNKNOWN or NaN in a column.
"""

from __future__ import annotations

import functools
import gc
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from cs_systems.readers.forms.jobs import Job, Message
from cs_systems.readers.forms.modules import Modules

if TYPE_CHECKING:
    from cs_systems.readers.forms.operators import Operators

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
T = TypeVar("T")
UNKNOWN = -1


@contextmanager
def without_collector() -> Iterator[None]:
    """Disable the garbage collector inside the block.

    A reader makes millions of objects in no reference cycle; the collector's repeated scans of them take a third of the
    time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class Categorical(Sequence[T]):
    """Long column with few distinct values: entry i is `values[codes[i]]`."""

    def __init__(self, values: Sequence[T], codes: Ints) -> None:
        self.values, self.codes = values, codes

    @classmethod
    def of(cls, entries: Iterable[T]) -> Categorical[T]:
        numbers: dict[T, int] = {}
        codes = [numbers.setdefault(entry, len(numbers)) for entry in entries]
        return cls(list(numbers), np.array(codes, np.int64))

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, i: Any) -> Any:
        return self.take(i) if isinstance(i, slice) else self.values[self.codes[i]]

    def __iter__(self) -> Iterator[T]:
        return map(self.values.__getitem__, self.codes.tolist())

    def take(self, which: Ints | Bools | slice) -> Categorical[T]:
        return Categorical(self.values, self.codes[which])

    def codes_where(self, wanted: Callable[[T], object]) -> Bools:
        """Return for each entry whether its value is wanted; `wanted` is called once for each distinct value."""
        return np.array([bool(wanted(value)) for value in self.values], bool)[self.codes]


def distinct(*columns: Ints) -> tuple[Ints, Ints]:
    """Return (first, codes) of the distinct rows of a table given by its columns.

    `first[k]` is the index of the first row equal to the k-th distinct row; row i equals the `codes[i]`-th distinct
    row.
    """
    table = np.stack(columns)
    if (key := _small(table)) is None:
        return _sorted(table)
    # Rows of small numbers are counted; only the distinct ones are sorted.
    first = np.full(int(key.max()) + 1, UNKNOWN)
    first[key[::-1]] = np.arange(len(key))[::-1]  # of equal rows, the first is assigned last
    known = np.flatnonzero(first != UNKNOWN)
    of_known, codes = _sorted(table[:, first[known]])
    numbers = np.empty(len(first), np.int64)
    numbers[known] = codes
    return first[known[of_known]], numbers[key]


def _small(table: Ints) -> Ints | None:
    """Return a number of each row that equal rows share; None where there are too few rows for as high numbers."""
    if not table.size:
        return None
    low, high = table.min(axis=1).tolist(), table.max(axis=1).tolist()
    sizes = [last - first + 1 for first, last in zip(low, high, strict=True)]
    if math.prod(sizes) > table.shape[1]:
        return None
    return np.asarray(np.ravel_multi_index([*(table - np.array(low)[:, None])], sizes))


def _sorted(table: Ints) -> tuple[Ints, Ints]:
    """Return the distinct rows as `distinct` does, in the order of a hash."""
    # One sort by a hash is faster than one by every column; the check below detects rows that share a hash.
    multipliers = np.random.default_rng(0).integers(1, 2**62, len(table), dtype=np.int64) * 2 + 1
    hashed = (table * multipliers[:, None]).sum(axis=0)  # wraps around
    _, first, codes = np.unique(hashed, return_index=True, return_inverse=True)
    if not all((column[first][codes] == column).all() for column in table):
        _, first, codes = np.unique(table, axis=1, return_index=True, return_inverse=True)
    return first, codes.reshape(-1)


class Function(NamedTuple):
    """Kernel name and launch configuration, which many launches share."""

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


Launch = tuple[float, float, int]  # start and end in s, thread
# Function, start and end in s, device, stream, whether a CUDA graph ran it, correlation: the number of its launch.
KernelRow = tuple[Function, float, float, int, int, bool, int]


@dataclass(frozen=True, slots=True)
class Kernels:
    """All kernel executions in order of their start: the fields of `Kernel` as columns."""

    function: Categorical[Function]
    start_s: Floats
    end_s: Floats
    device: Ints
    stream: Ints
    thread: Ints
    launch_start_s: Floats
    launch_end_s: Floats
    in_graph: Bools

    @classmethod
    def of(cls, rows: Iterable[KernelRow], launches: Mapping[int, Launch]) -> Kernels:
        """Return the kernels in order of their start, each with the launch of its correlation."""
        if not (ordered := sorted(rows, key=itemgetter(1))):
            return NO_KERNELS
        unknown = (math.nan, math.nan, UNKNOWN)
        function, start, end, device, stream, in_graph, correlation = zip(*ordered, strict=True)
        launched, returned, thread = zip(*(launches.get(n, unknown) for n in correlation), strict=True)
        return cls(
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

    @property
    def launched_s(self) -> Floats:
        """Start of each kernel's launch; where it was not recorded, -inf before the recording, else the kernel's start.

        A stream runs its kernels in order, so those ahead of its first recorded launch were launched before the
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

    def __len__(self) -> int:
        return len(self.start_s)

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


_none, _never = np.empty(0, np.int64), np.empty(0)
NO_KERNELS = Kernels(Categorical([], _none), _never, _never, _none, _none, _none, _never, _never, np.empty(0, bool))


@dataclass(frozen=True, slots=True)
class Allocations:
    """Calls that allocated or freed device memory, in order of time.

    `change_bytes` is negative for a free; `thread` is UNKNOWN where the call was not recorded.
    """

    time_s: Floats
    thread: Ints
    change_bytes: Ints

    def __len__(self) -> int:
        return len(self.time_s)


class Copy(NamedTuple):
    """Memcpy or memset on the device."""

    kind: str  # "memcpy" or "memset"
    start_s: float
    end_s: float
    device: int
    stream: int
    bytes: int | None


class Call(NamedTuple):
    """CUDA call of the host that can leave the device without work; launches are fields of their kernels instead."""

    name: str
    start_s: float
    end_s: float
    thread: int


class Range(NamedTuple):
    """Named part of the program: an NVTX range or a `record_function`."""

    name: str
    start_s: float
    end_s: float
    thread: int


@dataclass(frozen=True)
class Ranges:
    """Fields of `Range` as columns."""

    name: Categorical[str]
    start_s: Floats
    end_s: Floats
    thread: Ints

    @classmethod
    def of(cls, rows: Sequence[Range]) -> Ranges:
        name, start, end, thread = zip(*rows, strict=True) if rows else ((),) * 4
        times = np.array(start, np.float64), np.array(end, np.float64)
        return cls(Categorical.of(name), *times, np.array(thread, np.int64))

    def __len__(self) -> int:
        return len(self.start_s)

    def __iter__(self) -> Iterator[Range]:
        return map(Range, self.name, self.start_s.tolist(), self.end_s.tolist(), self.thread.tolist())

    def take(self, which: Ints | Bools) -> Ranges:
        return Ranges(self.name.take(which), self.start_s[which], self.end_s[which], self.thread[which])

    @functools.cached_property
    def timelines(self) -> dict[int, Timeline[str]]:
        """Timeline of the open ranges' names, for each thread with a range."""
        return timelines(self.thread, self.start_s, self.end_s, self.name)

    def named(self, wanted: Callable[[str], object]) -> list[Range]:
        """Return the ranges with a wanted name in order of their start, an enclosing range before those inside it."""
        found = self.take(self.name.codes_where(wanted))
        return list(found.take(np.lexsort((-found.end_s, found.start_s))))


NO_RANGES = Ranges(Categorical([], _none), _never, _never, _none)


class Step(NamedTuple):
    """One step by the host's clock: the extent of its range.

    `takes_earlier`: kernels launched before it, even before the recording, belong to it, because no step is before it.
    `number`: from 0, also of the steps that are left out.
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
class Ops:
    """Fields of `Op` as columns."""

    name: Categorical[str]
    start_s: Floats
    end_s: Floats
    thread: Ints
    sequence: Ints
    forward_thread: Ints

    @classmethod
    def of(cls, rows: Sequence[Op]) -> Ops:
        name, start, end, *numbers = zip(*rows, strict=True) if rows else ((),) * 6
        times = np.array(start, np.float64), np.array(end, np.float64)
        return cls(Categorical.of(name), *times, *(np.array(column, np.int64) for column in numbers))

    def __len__(self) -> int:
        return len(self.start_s)

    def __iter__(self) -> Iterator[Op]:
        columns = (self.start_s, self.end_s, self.thread, self.sequence, self.forward_thread)
        return map(Op, self.name, *(column.tolist() for column in columns))


@dataclass(frozen=True, slots=True)
class Trace:
    """Contents of a trace of one process.

    `limitations` lists in words what the file lacks; `ops` and `allocations` are None where the profiler records none,
    `modules` where the recorder wrote none. `ops` are those of `operators` with a sequence number. `messages` maps the
    index of a collective's kernel to what the profiler recorded of the call. `lacks_kernels`: the device ran kernels
    that the file does not hold, so nothing is known of its idle time. `lost_launches` are the starts of the launches
    whose kernels it lacks by a fault (`traces.lost_kernels`).
    """

    source: str
    profiler: str  # "nsys", "kineto" or "rocprofv3"
    devices: dict[int, str]  # number → name
    kernels: Kernels
    copies: list[Copy]
    calls: list[Call]
    ranges: Ranges
    overheads: list[tuple[float, float]]  # when the profiler itself delayed the host: (start, end) in s
    ops: Ops | None
    limitations: tuple[str, ...]
    allocations: Allocations | None = None
    modules: Modules | None = None
    operators: Operators | None = None
    job: Job | None = None
    messages: Mapping[int, Message] = field(default_factory=dict)
    lacks_kernels: bool = False
    lost_launches: Floats = field(default_factory=lambda: np.empty(0))


class Timeline(Generic[T]):
    """Stack of the open intervals over time, on one thread.

    `stacks[stack[i]]` (outermost first) is open from `times[i]` to `times[i + 1]`; the first and the last time are
    infinite. Equal stacks are stored once.

    Intervals need not nest: an NVTX start/end range may end before one that it encloses.
    """

    def __init__(self, start_s: Floats, end_s: Floats, values: Sequence[T]) -> None:
        lasting = np.flatnonzero(end_s > start_s)
        start_s, end_s, count = start_s[lasting], end_s[lasting], len(lasting)
        # At equal times ends come before begins, and the interval that ends last begins first.
        edges, begins = np.concatenate([start_s, end_s]), np.arange(2 * count) < count
        order = np.lexsort((np.tile(-end_s, 2), begins, edges))
        times, stack = [-math.inf], [0]
        known: dict[tuple[T, ...], int] = {(): 0}
        active: list[int] = []
        opened: list[T] = []
        items = lasting.tolist()
        for time, edge in zip(edges[order].tolist(), order.tolist(), strict=True):
            if edge < count:
                active.append(edge)
                opened.append(values[items[edge]])
            else:  # nearly always the innermost interval ends
                at = -1 if active[-1] == edge - count else active.index(edge - count)
                del active[at], opened[at]
            number = known.setdefault(tuple(opened), len(known))
            if time == times[-1]:
                stack[-1] = number
            else:
                times.append(time)
                stack.append(number)
        self.times: Floats = np.array([*times, math.inf])
        self.stack: Ints = np.array(stack)
        self.stacks = list(known)

    def at(self, time_s: float) -> tuple[T, ...]:
        return self.stacks[int(self.stack[self.times.searchsorted(time_s, "right") - 1])]

    def index(self, time_s: Floats) -> Ints:
        """Return the number of the stack that is open at each time."""
        return self.stack[np.searchsorted(self.times, time_s, "right") - 1]


def timelines(thread: Ints, start_s: Floats, end_s: Floats, values: Sequence[T]) -> dict[int, Timeline[T]]:
    """Return a Timeline for each thread that has an interval."""
    lines, values = {}, list(values)
    for number in np.unique(thread).tolist():
        own = np.flatnonzero(thread == number)
        lines[number] = Timeline(start_s[own], end_s[own], [values[i] for i in own.tolist()])
    return lines
