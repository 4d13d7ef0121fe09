"""Simulation of a host with several threads, and a GPU with streams: a program becomes a trace with known answers.

A program is a list of operations for each thread. The simulation runs them by the rules of CUDA: activities of a stream
run in order, a stream may wait for an event of another, the host for a stream, an event or the device, and a launch
waits for room in the queue of its stream.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from cs_systems.analysis.replay.waits import US
from cs_systems.readers.forms.columns import UNKNOWN, Range, Ranges
from cs_systems.readers.forms.trace import Call, Calls, Copies, Copy, Function, Kernels, Step, Trace, Waits

MAIN, AUTOGRAD, OTHER = 1, 2, 3
MS = 1000 * US


class Host(NamedTuple):
    """Python's own work."""

    time_s: float


class Launch(NamedTuple):
    time_s: float
    stream: int = 7
    name: str = "gemm"
    cost_s: float = 5 * US


class Graph(NamedTuple):
    """Launch of a CUDA graph with nodes of these durations, 1 µs apart."""

    times_s: tuple[float, ...]
    stream: int = 7
    cost_s: float = 8 * US


class Copied(NamedTuple):
    time_s: float
    stream: int = 7
    name: str = "HtoD pinned"
    cost_s: float = 5 * US


class Collective(NamedTuple):
    """All-reduce that ends on all ranks at once, `time_s` after the last has arrived."""

    time_s: float
    stream: int = 30
    cost_s: float = 5 * US


class Record(NamedTuple):
    event: str
    stream: int


class Wait(NamedTuple):
    """A stream waits for an event."""

    stream: int
    event: str


class Sync(NamedTuple):
    """The host waits: for a stream, an event, or by default the device."""

    stream: int | None = None
    event: str | None = None


class Free(NamedTuple):
    """The host frees memory: it waits for the device, and then works on."""

    after_s: float


class Open(NamedTuple):
    name: str


class Close(NamedTuple):
    pass


class Run(NamedTuple):
    """The thread hands over to another, which runs these operations, and waits for it."""

    thread: int
    program: tuple[object, ...]


@dataclass(frozen=True)
class Machine:
    """Delays of the simulated machine."""

    launch_s: float = 4 * US
    gap_s: float = 1 * US
    return_s: float = 6 * US
    queue: int = 1020
    routine_s: float = 3 * US  # host time of a call that does not launch
    says_waits: bool = True  # whether the trace names what is waited for


class Activity(NamedTuple):
    start_s: float
    end_s: float
    stream: int
    call: int
    name: str
    is_copy: bool
    node: bool


@dataclass
class Simulation:
    """State of the machine while it runs a program."""

    machine: Machine
    calls: list[Call] = field(default_factory=list)
    activities: list[Activity] = field(default_factory=list)
    ranges: list[Range] = field(default_factory=list)
    free_s: dict[int, float] = field(default_factory=lambda: defaultdict(lambda: -1.0))
    ends: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    events: dict[str, tuple[float, int, int]] = field(default_factory=dict)  # end, stream, call
    pending: dict[int, float] = field(default_factory=lambda: defaultdict(lambda: -1.0))
    waits: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    finish: Sequence[float] = ()  # ends of the collectives that the other ranks decide
    arrived: list[float] = field(default_factory=list)

    def call(self, name: str, start_s: float, end_s: float, thread: int) -> int:
        self.calls.append(Call(name, start_s, end_s, thread))
        return len(self.calls) - 1

    def run(self, programs: dict[int, Sequence[object]]) -> None:
        """Run the threads at the same time: always the operation that begins first."""
        ready: list[tuple[float, int, Iterator[object], list[tuple[str, float]]]] = [
            (0.0, thread, iter(program), []) for thread, program in programs.items()
        ]
        queue = [(at, number) for number, (at, *_) in enumerate(ready)]
        while queue:
            at, number = heapq.heappop(queue)
            _, thread, program, opened = ready[number]
            if (operation := next(program, None)) is not None:
                heapq.heappush(queue, (self.do(operation, at, thread, opened), number))

    def do(self, operation: object, at: float, thread: int, opened: list[tuple[str, float]]) -> float:
        """Run one operation and return when it has ended."""
        m = self.machine
        match operation:
            case Host(time_s):
                return at + time_s
            case Open(name):
                opened.append((name, at))
            case Close():
                name, since = opened.pop()
                self.ranges.append(Range(name, since, at, thread))
            case Run(other, program):
                inner: list[tuple[str, float]] = []
                for one in program:
                    at = self.do(one, at, other, inner)
            case Launch(time_s, stream, name, cost_s):
                end = self.room(stream, at + cost_s)
                number = self.call("cudaLaunchKernel", at, end, thread)
                self.enqueue(time_s, stream, number, name, end + m.launch_s)
                return end
            case Collective(time_s, stream, cost_s):
                number, end = self.call("cudaLaunchKernel", at, at + cost_s, thread), at + cost_s
                self.enqueue(0.0, stream, number, "ncclDevKernel_AllReduce", end + m.launch_s)
                start = self.activities[-1].start_s
                until = max(start + time_s, self.finish[len(self.arrived)] if self.finish else 0.0)
                self.activities[-1] = self.activities[-1]._replace(end_s=until)
                self.free_s[stream] = self.ends[stream][-1] = until
                self.arrived.append(start)
                return end
            case Graph(times_s, stream, cost_s):
                number = self.call("cudaGraphLaunch", at, at + cost_s, thread)
                for n, time_s in enumerate(times_s):
                    self.enqueue(time_s, stream, number, f"node {n}", at + cost_s + m.launch_s, node=True)
                return at + cost_s
            case Copied(time_s, stream, name, cost_s):
                pageable = name.endswith("pageable")
                end = at + cost_s if pageable else self.room(stream, at + cost_s)
                number = self.call("cudaMemcpyAsync", at, end, thread)
                done = self.enqueue(time_s, stream, number, name, (at if pageable else end) + m.launch_s, is_copy=True)
                if pageable:
                    end = max(end, done + m.return_s)
                    self.calls[number] = self.calls[number]._replace(end_s=end)
                return end
            case Record(event, stream):
                number = self.call("cudaEventRecord", at, at + m.routine_s, thread)
                self.events[event] = self.free_s[stream], stream, number
                return at + m.routine_s
            case Wait(stream, event):
                number = self.call("cudaStreamWaitEvent", at, at + m.routine_s, thread)
                done, of, recorded = self.events[event]
                self.pending[stream] = max(self.pending[stream], done)
                self.waits.append((number, of, 0, recorded, stream))
                return at + m.routine_s
            case Sync(stream, event):
                what = "Event" if event else "Device" if stream is None else "Stream"
                if event:
                    done, of, recorded = self.events[event]
                else:
                    done = max(self.free_s.values(), default=-1.0) if stream is None else self.free_s[stream]
                    of, recorded = UNKNOWN if stream is None else stream, UNKNOWN
                end = max(at + m.routine_s, done + m.return_s if done > 0 else 0.0)
                self.waits.append((self.call(f"cuda{what}Synchronize", at, end, thread), of, 0, recorded, UNKNOWN))
                return end
            case Free(after_s):
                end = max(at + m.routine_s, *self.free_s.values()) + after_s
                self.call("cudaFree", at, end, thread)
                return end
        return at

    def room(self, stream: int, end_s: float) -> float:
        ends = self.ends[stream]
        return max(end_s, ends[-self.machine.queue]) if len(ends) >= self.machine.queue else end_s

    def enqueue(
        self,
        time_s: float,
        stream: int,
        call: int,
        name: str,
        start_s: float,
        is_copy: bool = False,
        node: bool = False,
    ) -> float:
        gap_s = self.machine.gap_s
        if self.free_s[stream] >= 0:
            start_s = max(start_s, self.free_s[stream] + gap_s)
        if (done := self.pending.pop(stream, -1.0)) >= 0:
            start_s = max(start_s, done + gap_s)
        self.activities.append(Activity(start_s, start_s + time_s, stream, call, name, is_copy, node))
        self.free_s[stream] = start_s + time_s
        self.ends[stream].append(start_s + time_s)
        return start_s + time_s

    def trace(self) -> Trace:
        order = np.argsort([call.start_s for call in self.calls], kind="stable")
        number = np.empty(len(order) + 1, np.int64)
        number[order], number[-1] = np.arange(len(order)), UNKNOWN
        calls = Calls.of([self.calls[i] for i in order.tolist()])
        of = [one._replace(call=int(number[one.call])) for one in self.activities]
        kernels = [
            (Function(a.name, None, None, None, None), a.start_s, a.end_s, 0, a.stream, a.node, a.call)
            for a in of
            if not a.is_copy
        ]
        copies = [Copy("memcpy", a.start_s, a.end_s, 0, a.stream, 64, a.call, a.name) for a in of if a.is_copy]
        columns = (
            np.array(self.waits, np.int64).reshape(-1, 5).T if self.machine.says_waits else np.empty((5, 0), np.int64)
        )
        call, stream, device, event, waiting = columns
        return Trace(
            source="simulated",
            profiler="simulation",
            devices={0: "H200"},
            kernels=Kernels.of(kernels, calls),
            copies=Copies.of(copies),
            calls=calls,
            ranges=Ranges.of(self.ranges),
            overheads=[],
            ops=None,
            limitations=(),
            waits=Waits(number[call], stream, device, number[event], waiting),
        )


def simulated(
    step: Sequence[object],
    count: int = 6,
    machine: Machine = Machine(),
    beside: Sequence[object] = (),
) -> tuple[Trace, list[Step], float]:
    """Return (trace, its later steps, duration of a step) of a program that repeats a step.

    The duration is the time between the ends of the work of two late steps. beside: what another thread does.
    """
    simulation = Simulation(machine)
    program = [Host(50 * US), *(one for _ in range(count) for one in (Open("step"), *step, Close()))]
    simulation.run({MAIN: program, **({OTHER: beside} if beside else {})})
    trace = simulation.trace()
    steps = [Step("step", r.start_s, r.end_s) for r in trace.ranges.named("step".__eq__)]
    done = []
    for one in steps:
        launched = trace.kernels.launch_start_s < one.end_s
        done.append(max(one.end_s, float(trace.kernels.end_s[launched].max(initial=0.0))))
    first, last = steps[count // 2 - 1], steps[-1]
    host_s = (last.end_s - first.end_s) / (count - count // 2)
    gpu_s = (done[-1] - done[count // 2 - 1]) / (count - count // 2)
    return trace, steps[count // 2 :], max(host_s, gpu_s)


def ranks(
    steps: Sequence[Sequence[object]], count: int = 6, machine: Machine = Machine()
) -> tuple[list[tuple[Trace, list[Step]]], float]:
    """Return (trace and later steps of each rank, duration of a step) of ranks that repeat a step each."""
    finish: list[float] = []
    while True:
        simulations = [Simulation(machine, finish=finish) for _ in steps]
        for simulation, step in zip(simulations, steps, strict=True):
            program = [Host(50 * US), *(one for _ in range(count) for one in (Open("step"), *step, Close()))]
            simulation.run({MAIN: program})
        lasts = [one.time_s for _ in range(count) for one in steps[0] if isinstance(one, Collective)]
        arrivals = zip(*(one.arrived for one in simulations), lasts, strict=True)
        last, finish = finish, [max(at) + transfer for *at, transfer in arrivals]
        if len(last) == len(finish) and all(abs(a - b) < 1e-12 for a, b in zip(last, finish, strict=True)):
            break
    found, ends = [], []
    for simulation in simulations:
        trace = simulation.trace()
        of = [Step("step", r.start_s, r.end_s) for r in trace.ranges.named("step".__eq__)]
        found.append((trace, of[count // 2 :]))
        ends.append((of[-1].end_s - of[count // 2 - 1].end_s) / (count - count // 2))
    return found, max(ends)


def times(operations: Iterable[object], factor: float, name: str = "gemm") -> list[object]:
    """Return the operations with the durations of one kernel times a factor."""

    def changed(one: object) -> object:
        if isinstance(one, Launch) and one.name == name:
            return one._replace(time_s=one.time_s * factor)
        return one._replace(program=tuple(map(changed, one.program))) if isinstance(one, Run) else one

    return [changed(one) for one in operations]


def without(operations: Iterable[object], kind: type[object]) -> list[object]:
    """Return the operations except those of one kind."""
    return [one for one in operations if not isinstance(one, kind)]


def slower(operations: Iterable[object], factor: float) -> list[object]:
    """Return the operations with the host's time times a factor."""
    found: list[object] = []
    for one in operations:
        if isinstance(one, Host):
            one = Host(one.time_s * factor)
        elif isinstance(one, Launch):
            one = one._replace(cost_s=one.cost_s * factor)
        elif isinstance(one, Run):
            one = one._replace(program=tuple(slower(one.program, factor)))
        found.append(one)
    return found
