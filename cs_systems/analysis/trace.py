"""What a profiler saw, in one plain form for every profiler: a `Recording`. Floor 0.

Times are seconds from an origin that the recording chose, on one clock for host and device. A thread is a number that
is unique in the recording. What a profiler did not record is None.
"""

from __future__ import annotations

import gc
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar


class Function(NamedTuple):
    """A kernel and how it is launched: what many launches have in common."""

    name: str  # demangled, as the profiler wrote it
    grid: tuple[int, int, int] | None  # blocks
    block: tuple[int, int, int] | None  # threads
    registers: int | None  # a thread
    shared_bytes: int | None  # a block, static and dynamic


class Kernel(NamedTuple):
    """One run of a kernel, and the call by which the host launched it (None: it was not recorded).

    The kernels of a CUDA graph share one launch.
    """

    function: Function
    start_s: float
    end_s: float
    device: int
    stream: int | None
    pid: int
    correlation: int | None
    thread: int | None
    launch_start_s: float | None
    launch_end_s: float | None
    in_graph: bool


class Copy(NamedTuple):
    """A memcpy or a memset by the device."""

    kind: str  # "memcpy" or "memset"
    start_s: float
    end_s: float
    device: int
    stream: int
    bytes: int | None


class Call(NamedTuple):
    """A call of CUDA by the host that can make the device wait; launches stand in their kernels."""

    name: str
    start_s: float
    end_s: float
    thread: int
    pid: int


class Range(NamedTuple):
    """A named part of the program: an NVTX range or a `record_function`."""

    name: str
    start_s: float
    end_s: float
    thread: int
    pid: int


class Op(NamedTuple):
    """An operator with autograd's sequence number; `forward_thread` is 0 in forward, in backward autograd's number (not
    the system's) of the thread that ran the forward operator with the same sequence number."""

    name: str
    start_s: float
    end_s: float
    thread: int
    sequence: int
    forward_thread: int


@dataclass(frozen=True, slots=True)
class Recording:
    """`limitations` says in words what the file does not tell; `ops` is None where the profiler records none."""

    source: str
    profiler: str  # "nsys" or "kineto"
    devices: dict[int, str]  # number → name
    kernels: list[Kernel]
    copies: list[Copy]
    calls: list[Call]
    ranges: list[Range]
    overheads: list[tuple[float, float]]  # when the profiler itself stood in the way: (start, end) in s
    ops: list[Op] | None
    limitations: tuple[str, ...]


@contextmanager
def without_collector() -> Iterator[None]:
    """Millions of tuples in no cycle: looking through them for garbage, again and again, takes a third of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class Interval(Protocol):
    @property
    def start_s(self) -> float: ...
    @property
    def end_s(self) -> float: ...


T = TypeVar("T", bound=Interval)


class Timeline(Generic[T]):
    """What was open when, on one thread: `stacks[i]` (outermost first) from `times[i]` to `times[i + 1]`,
    of which the first and the last are infinite.

    Intervals need not nest: an NVTX start/end range may end before one that it encloses.
    """

    def __init__(self, intervals: Iterable[T]) -> None:
        # At one time what ends goes before what begins, and what ends last begins first.
        edges: list[tuple[float, int, float, int, T]] = []
        for number, item in enumerate(intervals):
            if item.end_s > item.start_s:
                edges.append((item.start_s, 1, -item.end_s, number, item))
                edges.append((item.end_s, 0, 0.0, number, item))
        edges.sort(key=lambda edge: edge[:4])
        self.times: list[float] = [float("-inf")]
        self.stacks: list[tuple[T, ...]] = [()]
        active: list[T] = []
        for time, begins, _, _, item in edges:
            active.append(item) if begins else active.remove(item)
            if time == self.times[-1]:
                self.stacks[-1] = tuple(active)
            else:
                self.times.append(time)
                self.stacks.append(tuple(active))
        self.times.append(float("inf"))

    def index(self, time_s: float) -> int:
        return bisect_right(self.times, time_s) - 1

    def at(self, time_s: float) -> tuple[T, ...]:
        return self.stacks[bisect_right(self.times, time_s) - 1]


def timelines(intervals: Sequence[T], thread: str = "thread") -> dict[int, Timeline[T]]:
    """A Timeline for each thread that has an interval."""
    by_thread: dict[int, list[T]] = {}
    for item in intervals:
        by_thread.setdefault(getattr(item, thread), []).append(item)
    return {number: Timeline(items) for number, items in by_thread.items()}
