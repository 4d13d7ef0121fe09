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

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from cs_systems.analysis.profile import Profile, Step
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
        found = list(gaps(kernels))
        for pieces in _in_steps([(gap.start_s, gap.end_s) for gap in found], profile.steps):
            for start, end, number in pieces:
                by_cause = split(Gap(start, end, found[number].pending), lines)
                for cause in by_cause:
                    times[cause].append(by_cause[cause])
        rows += [
            {
                "device": device,
                "cause": cause,
                "gaps_per_step": len(lasted) / count,
                "time_s": sum(lasted) / count,
                "share": sum(lasted) / wall_s,
                "longest_s": max(lasted),
            }
            for cause, lasted in sorted(times.items(), key=lambda item: -sum(item[1]))
            if lasted
        ]
    return rows


def busy_s(profile: Profile) -> dict[tuple[int, int], float]:
    """(number of the step, device) → for how long within the step's wall time at least one kernel ran."""
    busy = {}
    for device, kernels in kernels_by_device(profile.recording).items():
        spans = union((kernel.start_s, kernel.end_s) for kernel in kernels)
        for number, pieces in enumerate(_in_steps(spans, profile.steps)):
            busy[number, device] = sum(end - start for start, end, _ in pieces)
    return busy


def kernels_by_device(recording: Recording) -> dict[int, list[Kernel]]:
    devices: dict[int, list[Kernel]] = {}
    for kernel in recording.kernels:
        devices.setdefault(kernel.device, []).append(kernel)
    return dict(sorted(devices.items()))


def gaps(kernels: Sequence[Kernel]) -> Iterator[Gap]:
    """Between the kernels of one device, given in order of their start; also before the first and after the last."""
    end = float("-inf")
    for kernel in kernels:
        if kernel.start_s > end:
            yield Gap(end, kernel.start_s, kernel.launch_end_s is not None and kernel.launch_end_s <= end)
        if kernel.end_s > end:
            end = kernel.end_s
    yield Gap(end, float("inf"), False)


def _in_steps(spans: Sequence[tuple[float, float]], steps: Sequence[Step]) -> Iterator[list[tuple[float, float, int]]]:
    """For each step the pieces of the spans that lie in it: (start, end, number of the span). Both come in order."""
    first = 0
    for step in steps:
        while first < len(spans) and spans[first][1] <= step.start_s:
            first += 1
        pieces = []
        for number in range(first, len(spans)):
            start, end = spans[number]
            if start >= step.end_s:
                break
            pieces.append((max(start, step.start_s), min(end, step.end_s), number))
        yield pieces


def _stalls(recording: Recording, device: int) -> tuple[Timeline[Span], Timeline[Span]]:
    """(copies of the device, all that stalls it): of the second only matters what no launch was pending in."""
    copies = [Span(COPY, copy.start_s, copy.end_s) for copy in recording.copies if copy.device == device]
    host = [Span(PROFILER, start, end) for start, end in recording.overheads]
    host += [Span(stalls(call.name) or LAUNCH, call.start_s, call.end_s) for call in recording.calls]
    return Timeline(copies), Timeline([*copies, *host])


def split(gap: Gap, lines: tuple[Timeline[Span], Timeline[Span]]) -> dict[str, float]:
    """Cause → its time in the gap. Of several at one time the first in CAUSES counts."""
    line, rest = (lines[0], LATENCY) if gap.pending else (lines[1], LAUNCH)
    at, start = line.index(gap.start_s), gap.start_s
    if not line.stacks[at] and (at + 1 == len(line.times) or line.times[at + 1] >= gap.end_s):
        return {rest: gap.end_s - start}  # nearly every gap, of which there are as many as kernels
    times: dict[str, float] = {}
    while start < gap.end_s:
        end = min(line.times[at + 1] if at + 1 < len(line.times) else gap.end_s, gap.end_s)
        stack = line.stacks[at]
        cause = min((span.cause for span in stack), key=CAUSES.index) if stack else rest
        times[cause] = times.get(cause, 0.0) + end - start
        start, at = end, at + 1
    return times
