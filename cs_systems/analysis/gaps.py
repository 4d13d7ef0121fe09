"""When the device ran no kernel in a step, and why. Floor 0.

The causes of a stretch without a kernel, each for as long as it lasted:

- copy: a memcpy or memset ran instead;
- device latency: the next kernel's launch had returned before the stretch began, so that the device, not the host, was
  late (a dependency, the time between two kernels of a queue);
- profiler: the profiler's own bookkeeping held the host up;
- cudaMalloc: the host was allocating or freeing device memory, with no launch pending;
- synchronisation: the host waited for the device, with no launch pending;
- launch-bound: the host did something else, and no launch was pending: Python, the framework, the launch itself.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from cs_systems.analysis.profile import Profile
from cs_systems.analysis.stalls import stalls
from cs_systems.analysis.trace import Kernel, Recording, Timeline, union
from cs_systems.record import Row

COPY, LATENCY, PROFILER, MALLOC, SYNC, LAUNCH = CAUSES = (
    "copy", "device latency", "profiler", "cudaMalloc", "synchronisation", "launch-bound",
)  # fmt: skip


class Span(NamedTuple):
    """What could keep the device waiting, while it lasted."""

    cause: str
    start_s: float
    end_s: float


class Gap(NamedTuple):
    """A stretch without a kernel; `pending`: the launch of the next kernel had returned when it began."""

    start_s: float
    end_s: float
    pending: bool


def gap_rows(profile: Profile) -> list[Row]:
    """A row for each device and cause: {device, cause, gaps_per_step, time_s, share, longest_s}: per step, the share of
    the step's wall time."""
    wall_s = sum(step.end_s - step.start_s for step in profile.steps)
    count = len(profile.steps)
    rows = []
    for device, kernels in kernels_by_device(profile.recording).items():
        times: dict[str, list[float]] = {cause: [] for cause in CAUSES}
        lines = _stalls(profile.recording, device)
        for gap in _in_steps(profile, list(gaps(kernels))):
            by_cause: dict[str, float] = {}
            for cause, time_s in split(gap, lines):
                by_cause[cause] = by_cause.get(cause, 0.0) + time_s
            for cause, time_s in by_cause.items():
                times[cause].append(time_s)
        rows += [
            {
                "device": device,
                "cause": cause,
                "gaps_per_step": len(found) / count,
                "time_s": sum(found) / count,
                "share": sum(found) / wall_s,
                "longest_s": max(found),
            }
            for cause, found in sorted(times.items(), key=lambda item: -sum(item[1]))
            if found
        ]
    return rows


def busy_s(profile: Profile) -> dict[tuple[int, int], float]:
    """(number of the step, device) → for how long within the step's wall time at least one kernel ran."""
    busy = {}
    for device, kernels in kernels_by_device(profile.recording).items():
        spans = union((kernel.start_s, kernel.end_s) for kernel in kernels)
        ends = [end for _, end in spans]
        for number, step in enumerate(profile.steps):
            total = 0.0
            for start, end in spans[bisect_right(ends, step.start_s) :]:
                if start >= step.end_s:
                    break
                total += min(end, step.end_s) - max(start, step.start_s)
            busy[number, device] = total
    return busy


def kernels_by_device(recording: Recording) -> dict[int, list[Kernel]]:
    devices: dict[int, list[Kernel]] = {}
    for kernel in recording.kernels:
        devices.setdefault(kernel.device, []).append(kernel)
    return dict(sorted(devices.items()))


def gaps(kernels: Sequence[Kernel]) -> Iterator[Gap]:
    """Between the kernels of one device, which come in order of their start; before the first and after the last too."""
    end = float("-inf")
    for kernel in kernels:
        if kernel.start_s > end:
            yield Gap(end, kernel.start_s, kernel.launch_end_s is not None and kernel.launch_end_s <= end)
        if kernel.end_s > end:
            end = kernel.end_s
    yield Gap(end, float("inf"), False)


def _in_steps(profile: Profile, found: Sequence[Gap]) -> Iterator[Gap]:
    """The gaps cut to the steps' wall times."""
    first = 0
    for step in profile.steps:
        while found[first].end_s <= step.start_s:
            first += 1
        for gap in itertools.islice(found, first, None):
            if gap.start_s >= step.end_s:
                break
            yield Gap(max(gap.start_s, step.start_s), min(gap.end_s, step.end_s), gap.pending)


def _stalls(recording: Recording, device: int) -> tuple[Timeline[Span], Timeline[Span]]:
    """(copies of the device, all that stalls it): of the second only matters what no launch was pending in."""
    copies = [Span(COPY, copy.start_s, copy.end_s) for copy in recording.copies if copy.device == device]
    host = [Span(PROFILER, start, end) for start, end in recording.overheads]
    host += [Span(stalls(call.name) or LAUNCH, call.start_s, call.end_s) for call in recording.calls]
    return Timeline(copies), Timeline([*copies, *host])


def split(gap: Gap, lines: tuple[Timeline[Span], Timeline[Span]]) -> Iterator[tuple[str, float]]:
    """The gap's time by cause. Of several at one time the first in CAUSES counts."""
    line, rest = (lines[0], LATENCY) if gap.pending else (lines[1], LAUNCH)
    at = line.index(gap.start_s)
    start = gap.start_s
    while start < gap.end_s:
        end = line.times[at + 1] if at + 1 < len(line.times) else gap.end_s
        end = min(end, gap.end_s)
        cause = min((span.cause for span in line.stacks[at]), key=CAUSES.index, default=rest)
        if end > start:
            yield cause, end - start
        start, at = end, at + 1
