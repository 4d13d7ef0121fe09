"""One process and its GPU, with clocks that move as on a real machine, and a list of all that a profiler would record.

The host has one clock: while autograd's thread launches, the main thread waits. Each stream has the time at which it is
free. A kernel begins after its launch, after the work before it on its stream, and after what it waits for. At most 1,000
kernels are outstanding; then a launch blocks. Waits end when the awaited work ends. Times are in microseconds.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

MAIN, AUTOGRAD = 1000, 1032
LAUNCH_TO_START, BETWEEN_KERNELS, RETURN, QUEUE = 4.5, 1.0, 5.0, 1000
GB_PER_S_PINNED, GB_PER_S_PAGEABLE = 52.0, 6.5


@dataclass
class Event:
    """Anything recorded: an operator, a call, an activity of the GPU, a range."""

    kind: str  # op, call, kernel, copy, set, sync, range, python
    name: str
    start: float
    end: float
    thread: int = MAIN
    stream: int = 0
    correlation: int = 0
    external: int = 0
    data: dict[str, Any] = field(default_factory=dict)


class Machine:
    """Clock of the host, clocks of the streams, and the events so far."""

    def __init__(
        self,
        seed: int = 0,
        *,
        rank: int | None = None,
        world: int = 1,
        launch: float = 4.0,
        op: float = 3.0,
        noise: float = 0.03,
        gpu: str = "NVIDIA H100 80GB HBM3",
        ranges: str = "ProfilerStep#{}",
    ) -> None:
        self.random = random.Random(seed * 1009 + (rank or 0))
        self.rank, self.world, self.gpu, self.noise = rank, world, gpu, noise
        self.launch_us, self.op_us, self.step_name = launch, op, ranges
        self.now, self.thread = 100.0, MAIN
        self.free: dict[int, float] = {}
        self.events: list[Event] = []
        self.pending: deque[float] = deque()
        self.correlation, self.external, self.sequence, self.steps = 10, 1, 100, 0
        self.blocking_launches = False
        self.marks: dict[int, float] = {}

    def about(self, us: float) -> float:
        """Return a duration near the given one."""
        return max(us * (1 + self.random.gauss(0, self.noise)), 0.05)

    def add(self, kind: str, name: str, start: float, end: float, **rest: Any) -> Event:
        """Record an event of the current thread."""
        event = Event(kind, name, start, end, **{"thread": self.thread, **rest})
        self.events.append(event)
        return event

    # the host

    def host(self, us: float, python: str | None = None) -> None:
        """Let the host work without launching anything, in a Python function that the recording names or not."""
        start = self.now
        self.now += self.about(us)
        if python:
            self.add("python", python, start, self.now)

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        """Mark the calls inside with a range, as record_function or NVTX does."""
        start, thread = self.now, self.thread
        self.external += 1
        external = self.external
        self.now += 0.6
        yield
        self.now += 0.6
        self.events.append(Event("range", name, start, self.now, thread=thread, external=external))

    @contextmanager
    def python(self, name: str) -> Iterator[None]:
        """Mark the calls inside as a Python function."""
        start, thread = self.now, self.thread
        yield
        self.events.append(Event("python", name, start, self.now, thread=thread))

    @contextmanager
    def step(self) -> Iterator[None]:
        """Mark one step."""
        with self.range(self.step_name.format(self.steps)):
            yield
        self.steps += 1
        self.now += 2.0

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Let autograd's thread launch the calls inside, while the main thread waits for it."""
        self.now += 12.0
        self.thread = AUTOGRAD
        yield
        self.thread = MAIN
        self.now += 8.0

    @contextmanager
    def op(self, name: str, dims: Sequence[Any] | None = None, sequence: int | None = None) -> Iterator[int]:
        """Record a PyTorch operator around the calls inside."""
        self.external += 1
        external, start = self.external, self.now
        self.now += self.about(self.op_us / 2)
        yield external
        self.now += self.about(self.op_us / 2)
        data = {"dims": dims, "sequence": sequence}
        self.add("op", name, start, self.now, external=external, data=data)

    @contextmanager
    def node(self, name: str, sequence: int) -> Iterator[None]:
        """Record a node of autograd's graph as its thread evaluates it."""
        with self.op(f"autograd::engine::evaluate_function: {name}", None, sequence), self.op(name, None, sequence):
            yield

    # calls and what they start

    def call(self, name: str, us: float, external: int = 0, correlation: int | None = None) -> int:
        """Record a CUDA call of some duration, and return its correlation ID."""
        if correlation is None:
            self.correlation += 1
            correlation = self.correlation
        start = self.now
        self.now += us
        self.add("call", name, start, self.now, correlation=correlation, external=external)
        return correlation

    def kernel(
        self,
        name: str,
        us: float,
        *,
        op: str | None = None,
        dims: Sequence[Any] | None = None,
        sequence: int | None = None,
        stream: int = 7,
        after: float = 0.0,
        grid: Sequence[int] = (528, 1, 1),
        block: Sequence[int] = (256, 1, 1),
        api: str = "cudaLaunchKernel",
        exact: bool = False,
        graph: int | None = None,
    ) -> float:
        """Launch a kernel, inside an operator if one is named, and return the time at which it ends."""
        with self.op(op, dims, sequence) if op else nullcontext(0) as external:
            call = self.about(self.launch_us)
            while self.pending and self.pending[0] <= self.now:
                self.pending.popleft()
            if len(self.pending) >= QUEUE:
                call += max(self.pending[len(self.pending) - QUEUE] - self.now, 0.0)
            launched = self.now
            correlation = self.call(api, call, external)
            duration = us if exact else max(self.about(us), 1.2)
            start = max(self.free.get(stream, 0.0) + BETWEEN_KERNELS, launched + call + LAUNCH_TO_START - 2.0, after)
            end = start + duration
            self.free[stream] = end
            self.pending.append(end)
            data = {"grid": tuple(grid), "block": tuple(block), "graph": graph}
            self.add("kernel", name, start, end, stream=stream, correlation=correlation, external=external, data=data)
            if self.blocking_launches:
                call_event = next(e for e in reversed(self.events) if e.correlation == correlation and e.kind == "call")
                self.now = call_event.end = max(self.now, end + RETURN)
        return end

    def copy(
        self,
        direction: str,
        size: float,
        *,
        pinned: bool = True,
        blocking: bool = False,
        stream: int = 7,
        op: str | None = "aten::copy_",
        after: float = 0.0,
    ) -> float:
        """Copy bytes, "HtoD", "DtoH" or "DtoD"; from and to pageable memory the call lasts until the copy has ended."""
        kinds = {"H": "Pinned" if pinned else "Pageable", "D": "Device"}
        rate = 1250.0 if direction == "DtoD" else GB_PER_S_PINNED if pinned else GB_PER_S_PAGEABLE
        with self.op(op) if op else nullcontext(0) as external:
            launched = self.now
            self.correlation += 1
            correlation = self.correlation
            issue = self.about(6.0)
            start = max(self.free.get(stream, 0.0) + BETWEEN_KERNELS, launched + issue, after)
            end = start + max(self.about(size / rate / 1e3), 1.3)
            self.free[stream] = end
            lasts = issue if pinned or direction == "DtoD" else end - launched + RETURN
            self.call("cudaMemcpyAsync", lasts, external, correlation)
            name = f"Memcpy {direction} ({kinds[direction[0]]} -> {kinds[direction[-1]]})"
            data = {"bytes": int(size), "direction": direction, "pinned": pinned}
            self.add("copy", name, start, end, stream=stream, correlation=correlation, external=external, data=data)
            if blocking:
                self.synchronize("stream", stream)
        return end

    def clear(self, size: float, stream: int = 7) -> None:
        """Set bytes to zero."""
        self.correlation += 1
        start = max(self.free.get(stream, 0.0) + BETWEEN_KERNELS, self.now + 6.0)
        self.free[stream] = start + max(size / 2.6e6, 1.1)
        self.call("cudaMemsetAsync", self.about(4.0), 0, self.correlation)
        data = {"bytes": int(size)}
        name, end = "Memset (Device)", self.free[stream]
        self.add("set", name, start, end, stream=stream, correlation=self.correlation, data=data)

    def synchronize(self, what: str = "device", stream: int = 7) -> None:
        """Let the host wait: for a stream, for an event recorded now on it, or for the device."""
        until = max(self.free.values(), default=0.0) if what == "device" else self.free.get(stream, 0.0)
        call = {"device": "cudaDeviceSynchronize", "stream": "cudaStreamSynchronize", "event": "cudaEventSynchronize"}
        start = self.now
        end = max(self.now + 2.5, until + self.about(RETURN))
        correlation = self.call(call[what], end - start)
        kind = {"device": "Context Sync", "stream": "Stream Sync", "event": "Event Sync"}[what]
        self.add("sync", kind, start + 0.5, end - 0.5, stream=stream, correlation=correlation, data={"what": what})
        self.now += self.about(3.0)

    def item(self) -> None:
        """Read one number from the GPU, as .item() does."""
        with self.op("aten::item"), self.op("aten::_local_scalar_dense"):
            self.copy("DtoH", 4, pinned=True, op=None)
            self.events[-1].name = "Memcpy DtoH (Device -> Pageable)"
            self.events[-1].data["pinned"] = False
            self.synchronize("stream")

    def mark(self, stream: int = 7) -> float:
        """Record an event of CUDA on a stream, and return when the work before it ends."""
        self.call("cudaEventRecord", self.about(1.5))
        return self.free.get(stream, 0.0)

    def wait(self, until: float, stream: int = 7) -> None:
        """Let a stream wait for an event."""
        self.call("cudaStreamWaitEvent", self.about(1.5))
        self.free[stream] = max(self.free.get(stream, 0.0), until)

    # summary, by which the planted cost is checked

    def busy(self) -> float:
        """Return the fraction of the steps' time in which the GPU computes or copies."""
        steps = [e for e in self.events if e.kind == "range" and e.name.startswith(self.step_name.split("{")[0])]
        low = min((e.start for e in steps), default=min(e.start for e in self.events))
        high = max((e.end for e in steps), default=max(e.end for e in self.events))
        spans = sorted(
            (max(e.start, low), min(e.end, high)) for e in self.events if e.kind in ("kernel", "copy", "set")
        )
        total, last = 0.0, low
        for start, end in spans:
            if end > last:
                total += end - max(start, last)
                last = end
        return total / (high - low)


@contextmanager
def step_of(machines: Sequence[Machine]) -> Iterator[None]:
    """Mark one step of all ranks."""
    starts = [machine.now for machine in machines]
    yield
    for machine, start in zip(machines, starts, strict=True):
        machine.add("range", f"ProfilerStep#{machine.steps}", start, machine.now)
        machine.steps += 1
        machine.now += 2


def collective(
    machines: Sequence[Machine],
    name: str,
    size: float,
    us: float,
    *,
    stream: int = 20,
    after: Sequence[float] | None = None,
    wait: bool = True,
    op: str = "c10d::allreduce_",
    dtype: str = "BFloat16",
) -> list[float]:
    """Run one collective on all ranks: it ends everywhere at once, when the last rank has come and the bytes are sent."""
    starts, pending = [], []
    for index, machine in enumerate(machines):
        ready = after[index] if after else machine.mark()
        with machine.op(op) as external, machine.op("record_param_comms") as inner:
            machine.wait(ready, stream)
            launched = machine.now
            correlation = machine.call("cudaLaunchKernelExC", machine.about(5.0), external)
            start = max(machine.free.get(stream, 0.0) + BETWEEN_KERNELS, launched + 8.0)
            starts.append(start)
            pending.append((correlation, inner))
    end = max(starts) + machines[0].about(us)
    kernel = {
        "all_reduce": "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "all_gather": "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "reduce_scatter": "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "all_to_all": "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
    }[name]
    collectives = {
        "all_reduce": "allreduce",
        "all_gather": "_allgather_base",
        "reduce_scatter": "_reduce_scatter_base",
        "all_to_all": "all_to_allv",
    }
    ends = []
    for machine, start, (correlation, external) in zip(machines, starts, pending, strict=True):
        finished = end + machine.random.uniform(0, 1.0)
        machine.free[stream] = finished
        machine.pending.append(finished)
        data = {
            "grid": (24, 1, 1),
            "block": (544, 1, 1),
            "graph": None,
            "collective": {
                "Collective name": collectives[name],
                "In msg nelems": int(size / 2),
                "Out msg nelems": int(size / 2),
                "Group size": machine.world,
                "dtype": dtype,
                "Process Group Name": "0",
                "Process Group Description": "default_pg",
                "Process Group Ranks": str(list(range(machine.world))).replace(" ", ""),
            },
        }
        rest = {"stream": stream, "correlation": correlation, "external": external}
        machine.add("kernel", kernel, start, finished, data=data, **rest)
        if wait:
            machine.wait(finished)
        ends.append(finished)
    return ends


def transfer(sender: Machine, receiver: Machine, size: float, us: float, stream: int = 24) -> None:
    """Send bytes from one rank to another; the receiver's kernel waits for the sender's."""
    names = (("c10d::send", "send"), ("c10d::recv_", "recv"))
    starts, calls = [], []
    for machine, (op, _) in zip((sender, receiver), names, strict=True):
        ready = machine.mark() if machine is sender else 0.0
        with machine.op(op) as external:
            machine.wait(ready, stream)
            launched = machine.now
            calls.append((machine.call("cudaLaunchKernelExC", machine.about(5.0), external), external))
            starts.append(max(machine.free.get(stream, 0.0) + 1.0, launched + 8.0))
    end = max(starts) + us
    for machine, start, (correlation, external), (_, name) in zip(
        (sender, receiver), starts, calls, names, strict=True
    ):
        machine.free[stream] = end
        details = {"Collective name": name, "In msg nelems": int(size / 2), "Group size": machine.world}
        details |= {"dtype": "BFloat16", "Process Group Name": "0"}
        data = {"grid": (2, 1, 1), "block": (544, 1, 1), "graph": None, "collective": details}
        machine.add(
            "kernel",
            "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
            start,
            end,
            stream=stream,
            correlation=correlation,
            external=external,
            data=data,
        )
    receiver.wait(end)
