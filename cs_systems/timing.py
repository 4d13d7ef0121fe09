"""The only synchronisation policy: one device synchronisation before a step and one at its end, none between its phases. Floor 1.

On CUDA a phase lies between two events, on a CPU between two readings of the monotonic clock; the whole step is timed by the
host's clock as well, so that the two can be held against each other. The host's time at each boundary is kept too: how long
it took to submit a phase, and how far the device was behind when it had.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cs_systems.annotate import annotate
from cs_systems.device import Device
from cs_systems.probes import Probes
from cs_systems.record import Sample
from cs_systems.workloads import Workload

Clock = Callable[[], float]


def measure(
    workload: Workload,
    device: Device,
    *,
    warmup: int,
    steps: int,
    warmup_s: float = 0.0,
    round: int = 0,
    probes: Probes | None = None,
    clock: Clock = time.perf_counter,
) -> Iterator[Sample]:
    """Run warm-up steps (at least `warmup`, for at least `warmup_s` seconds), then `steps` timed ones; yield a sample of each."""
    probes = probes or Probes(device)
    started, done = clock(), 0
    while done < warmup or clock() - started < warmup_s:
        yield _sample(workload, device, probes, clock, round, warmup=True)
        done += 1
    for _ in range(steps):
        yield _sample(workload, device, probes, clock, round, warmup=False)


def _sample(workload: Workload, device: Device, probes: Probes, clock: Clock, round: int, *, warmup: bool) -> Sample:
    workload.prepare()
    before = probes.read()
    names: list[str] = []
    with _no_garbage_collection():
        device.synchronize()
        host = [clock()]
        marks = [device.mark()]
        for name, run in workload.step():
            with annotate(name):
                run()
            marks.append(device.mark())
            host.append(clock())
            names.append(name)
        device.synchronize()
        end = clock()
    phases = {name: device.between_s(marks[i], marks[i + 1]) for i, name in enumerate(names)}
    submit = {name: host[i + 1] - host[i] for i, name in enumerate(names)}
    lag = None
    if device.is_cuda:
        lag = {n: device.between_s(marks[0], marks[i]) - (host[i] - host[0]) for i, n in enumerate(names, 1)}
    return Sample(round, warmup, end - host[0], phases, submit, lag, **probes.since(before))


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A collection inside a step would be charged to whichever phase triggered it; it may run between steps."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
