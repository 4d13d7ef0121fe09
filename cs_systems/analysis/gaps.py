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
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from cs_systems.analysis.profile import Profile, Step
from cs_systems.analysis.stalls import stalls
from cs_systems.analysis.trace import Kernel, Recording, Timeline
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
    for device, found in _gaps_in_steps(profile):
        times: dict[str, list[float]] = {cause: [] for cause in CAUSES}
        copies, stalling = _stalls(profile.recording, device)
        for gap in itertools.chain.from_iterable(found):
            line, rest = (copies, LATENCY) if gap.pending else (stalling, LAUNCH)
            for cause, time_s in split(gap, line, rest).items():
                times[cause].append(time_s)
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
    return {
        (number, device): step.end_s - step.start_s - sum(gap.end_s - gap.start_s for gap in pieces)
        for device, found in _gaps_in_steps(profile)
        for number, (step, pieces) in enumerate(zip(profile.steps, found, strict=True))
    }


def _gaps_in_steps(profile: Profile) -> Iterator[tuple[int, Iterator[list[Gap]]]]:
    """For each device that ran a kernel: for each step its gaps, cut to the step's wall time."""
    for device, kernels in kernels_by_device(profile.recording).items():
        yield device, _cut(list(gaps(kernels)), profile.steps)


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


def _cut(found: Sequence[Gap], steps: Sequence[Step]) -> Iterator[list[Gap]]:
    """For each step the gaps within it: of gaps in order only the first and the last can reach out of a step."""
    starts, ends = [gap.start_s for gap in found], [gap.end_s for gap in found]
    for step in steps:
        pieces = list(found[bisect_right(ends, step.start_s) : bisect_left(starts, step.end_s)])
        if pieces:
            pieces[0] = pieces[0]._replace(start_s=max(pieces[0].start_s, step.start_s))
            pieces[-1] = pieces[-1]._replace(end_s=min(pieces[-1].end_s, step.end_s))
        yield pieces


def _stalls(recording: Recording, device: int) -> tuple[Timeline[Span], Timeline[Span]]:
    """(the device's copies, whatever stalls it): the second counts only where no launch was pending."""
    copies = [Span(COPY, copy.start_s, copy.end_s) for copy in recording.copies if copy.device == device]
    host = [Span(PROFILER, start, end) for start, end in recording.overheads]
    host += [Span(stalls(call.name) or LAUNCH, call.start_s, call.end_s) for call in recording.calls]
    return Timeline(copies), Timeline([*copies, *host])


def split(gap: Gap, line: Timeline[Span], rest: str) -> dict[str, float]:
    """Cause → its time in the gap, `rest` where the line has none; of several at once the first in CAUSES counts."""
    start, end, _ = gap
    at = bisect_right(line.times, start) - 1
    if not line.stacks[at] and line.times[at + 1] >= end:
        return {rest: end - start}  # nearly every gap, of which there are as many as kernels
    times: dict[str, float] = {}
    while start < end:
        stop = min(line.times[at + 1], end)
        cause = min((span.cause for span in line.stacks[at]), key=CAUSES.index, default=rest)
        times[cause] = times.get(cause, 0.0) + stop - start
        start, at = stop, at + 1
    return times
