"""Timing of steps. The device is synchronised only before a step and at its end.

A phase is timed on CUDA by two events, on a CPU by two readings of the monotonic clock. The whole step is also timed by
the host's clock, so that the two can be compared. The host's time at each boundary is kept as well: it shows how long
the host took to submit a phase, and how far the device was behind at that time.

A workload with `hides_launches` is timed without launch overhead: the device is kept busy after the first
synchronisation until the host has submitted the step, and the device alone times the step. A CUDA graph would hide
launches too, but would run other code than the caller's, and cannot capture code that synchronises or tunes.

On N ranks each rank measures itself; they begin a step together, after a barrier.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

from cs_systems.core.collector import without_collector
from cs_systems.instrument.annotate import STEP, annotate
from cs_systems.instrument.probes import Probes
from cs_systems.machine import process_group
from cs_systems.machine.device import Device
from cs_systems.measure.workloads import Workload
from cs_systems.record import Sample

Clock = Callable[[], float]
# The device is held for twice the time that the last step took to submit, but not for the minutes of a compiling step.
HOLD_MARGIN = 2.0
FIRST_HOLD_S = 1e-3
LONGEST_HOLD_S = 0.1


def measure(
    workload: Workload,
    device: Device,
    *,
    warmup: int,
    steps: int,
    warmup_s: float = 0.0,
    steps_s: float = 0.0,
    round: int = 0,
    probes: Probes | None = None,
    clock: Clock = time.perf_counter,
    region: Callable[[], AbstractContextManager[object]] = nullcontext,
    on_warmup: Callable[[int], object] = lambda done: None,
    on_timed: Callable[[int], object] = lambda done: None,
) -> Iterator[Sample]:
    """Run warm-up steps (at least `warmup`, for at least `warmup_s` seconds), then timed ones likewise; yield samples.

    region: a context entered around the timed steps only.
    on_warmup: called with the number of finished warm-up steps before each further one, and never before a timed step.
    on_timed: called with the number of finished timed steps before each further one, outside of any time.
    """
    probes = probes or Probes(device)
    hold_s = FIRST_HOLD_S if device.is_cuda and getattr(workload, "hides_launches", False) else None
    started, warmed, timed = clock(), 0, 0
    begun = started  # start of the timed steps
    with ExitStack() as watched:
        while timed < steps or (steps_s and process_group.agreed(clock() - begun < steps_s, device)):
            is_warmup = warmed < warmup
            if warmup_s and not is_warmup:
                is_warmup = process_group.agreed(clock() - started < warmup_s, device)
            if is_warmup:
                on_warmup(warmed)
            elif timed == 0:
                watched.enter_context(region())
                begun = clock()
            else:
                on_timed(timed)
            sample = _sample(workload, device, probes, clock, hold_s, round=round, warmup=is_warmup)
            if hold_s is not None:
                hold_s = min(HOLD_MARGIN * sum(sample.submit_s.values()), LONGEST_HOLD_S)
            warmed, timed = warmed + is_warmup, timed + (not is_warmup)
            yield sample


def _sample(
    workload: Workload, device: Device, probes: Probes, clock: Clock, hold_s: float | None, *, round: int, warmup: bool
) -> Sample:
    workload.prepare()
    before = probes.read()
    names: list[str] = []
    process_group.wait_for_all(device)
    with without_collector(), annotate(STEP):  # it may collect between steps
        host, start = [clock()], device.mark()
        marks = [start if hold_s is None else _hold(device, hold_s)]
        for name, run in workload.step():
            with annotate(name):
                run()
            marks.append(device.mark())
            host.append(clock())
            names.append(name)
        device.synchronize()
        end = clock()
    phases, submit = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
    for i, name in enumerate(names):  # a phase may occur several times in a step, as with accumulated gradients
        phases[name] = _ns(phases[name] + device.between_s(marks[i], marks[i + 1]))
        submit[name] = _ns(submit[name] + host[i + 1] - host[i])
    lag = None
    if device.is_cuda:
        lag = {n: _ns(device.between_s(start, marks[i]) - (host[i] - host[0])) for i, n in enumerate(names, 1)}
    wall, held = end - host[0], None
    if hold_s is not None:
        wall, held = device.between_s(marks[0], marks[-1]), _ns(device.between_s(start, marks[0]))
    return Sample(round, warmup, _ns(wall), phases, submit, lag, held, **probes.since(before))


def _ns(seconds: float) -> float:
    """Round to nanoseconds, the finest resolution of the clocks; this halves the size of a record."""
    return round(seconds, 9)


def _hold(device: Device, seconds: float) -> Any:
    """Keep the device busy for that long; return the mark that follows."""
    device.occupy(seconds)
    return device.mark()
