"""Time in a step without a kernel on the device, by cause.

A stretch without a kernel is divided among these causes, by how long each lasted:

- copy: a memcpy or memset ran instead;
- device latency: the next kernel's launch had returned before the stretch began, so that the device, not the host, was
  late (a dependency, the time between two kernels of a queue); also the time after the launch returned, if it is over
  100 µs;
- profiler: the profiler's own bookkeeping delayed the host;
- cudaMalloc: the host was allocating or freeing device memory, with no launch pending;
- synchronisation: the host waited for the device, with no launch pending;
- host: the host made no CUDA call for over 1 ms: Python, data, files, another process;
- launch-bound: the host did something else between its calls, and no launch was pending: the framework, the launch;
- launch not recorded: the next kernel's launch is unknown, so who was late is unknown too;
- kernels not recorded: the device ran kernels that the trace does not hold, at unknown times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Annotated, NamedTuple, TypedDict, cast

import numpy as np

from cs_systems.core.statistics import ROUNDING_S
from cs_systems.core.tables import Column, Tables
from cs_systems.readers._stalls import stalls
from cs_systems.readers.forms.columns import Bools, Floats, Ints
from cs_systems.readers.forms.trace import Kernels, Step, Trace

COPY, LATENCY, PROFILER, MALLOC, SYNC, HOST, LAUNCH, LOST, UNSEEN = CAUSES = (
    "copy", "device latency", "profiler", "cudaMalloc", "synchronisation", "host", "launch-bound",
    "launch not recorded", "kernels not recorded",
)  # fmt: skip
# shortest time between two CUDA calls that counts as host work: many times the usual time between two launches
SILENT_S = 1e-3


LATE_S = 100e-6  # from the end of a launch to its kernel: longer than any launch's own latency


class GapRow(TypedDict):
    """Time of a step without a kernel on a device by cause, in `gaps`; the share is of the step's wall time."""

    device: Annotated[int, Column("GPU")]
    cause: str
    gaps_per_step: Annotated[float, Column("gaps")]
    time_s: float
    share: Annotated[float, Column("of wall time", drop=9)]
    longest_s: Annotated[float, Column("longest")]  # longest gap in any step


class Span(NamedTuple):
    """Interval in which something could keep the device waiting."""

    cause: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Gaps:
    """Times when no kernel ran on one device, cut to the steps: a gap that reaches into two steps has a row in each.

    `pending`: the launch of the kernel after the gap had returned when the gap began. `lost`: that launch was not
    recorded; after the last kernel, no launch was.
    """

    step: Ints
    start_s: Floats
    end_s: Floats
    pending: Bools
    lost: Bools

    def idle_s(self, steps: int) -> list[float]:
        """Return for each step the time without a kernel."""
        return cast(list[float], np.bincount(self.step, self.end_s - self.start_s, steps).tolist())


def gaps_in(kernels: Kernels, steps: Sequence[Step]) -> dict[int, Gaps]:
    """Return the gaps in the steps by device, for each device that ran a kernel."""
    return {device: _gaps(kernels, kernels.device == device, steps) for device in np.unique(kernels.device).tolist()}


def _gaps(kernels: Kernels, own: Bools, steps: Sequence[Step]) -> Gaps:
    """Return the gaps between the kernels of one device, also before the first and after the last."""
    # Latest end of the kernels before each one; a running maximum, as kernels of several streams overlap.
    start = np.concatenate([[-np.inf], np.maximum.accumulate(kernels.end_s[own])])
    end = np.append(kernels.start_s[own], np.inf)
    returned = np.append(kernels.launch_end_s[own], np.nan)
    pending, lost = returned <= start, np.isnan(returned)
    lost[-1] = lost.all()
    real = end > start
    start, end, pending, returned, lost = start[real], end[real], pending[real], returned[real], lost[real]
    # The host is not the cause of the time after the launch returned, unless that is only the usual latency of a
    # launch.
    late = ~pending & (end - returned > LATE_S)
    start, end = np.append(start, returned[late]), np.append(np.where(late, returned, end), end[late])
    order, pending = np.argsort(start), np.append(pending, np.full(late.sum(), True))
    lost = np.append(lost, np.full(late.sum(), False))
    start, end, pending, lost = start[order], end[order], pending[order], lost[order]
    begins, ends = np.array([step.start_s for step in steps]), np.array([step.end_s for step in steps])
    # Gaps and steps are sorted and do not overlap: a gap meets the steps first ≤ step < last.
    first, last = np.searchsorted(ends, start, "right"), np.searchsorted(begins, end, "left")
    times = np.maximum(last - first, 0)
    gap = np.repeat(np.arange(len(start)), times)
    step = np.arange(len(gap)) - np.repeat(np.cumsum(times) - times, times) + first[gap]
    return Gaps(step, np.maximum(start[gap], begins[step]), np.minimum(end[gap], ends[step]), pending[gap], lost[gap])


def gap_rows(trace: Trace, gaps: dict[int, Gaps], steps: Sequence[Step]) -> list[GapRow]:
    """Return one row for each device and cause."""
    wall_s = sum(step.end_s - step.start_s for step in steps)
    count = len(steps)
    rows: list[GapRow] = []
    for device, found in gaps.items():
        times = causes(trace, device, found)
        rows += [
            {
                "device": device,
                "cause": cause,
                "gaps_per_step": np.count_nonzero(lasted) / count,
                "time_s": float(lasted.sum()) / count,
                "share": float(lasted.sum()) / wall_s,
                "longest_s": float(lasted.max()),
            }
            for cause, lasted in sorted(times.items(), key=lambda item: -float(item[1].sum()))
            if lasted.any()
        ]
    return rows


def idle_by_cause(tables: Tables, clean_s: float | None = None) -> dict[str, float]:
    """Return the time of a step without a kernel on the first device, by cause; empty without a table of gaps.

    clean_s: the duration of the step without the profiler, which slows the host down and so lengthens the gaps. The
    time of this step without kernels is then divided among the causes in the proportions of the trace.
    """
    rows = tables.get("gaps", ())
    lasted = {row["cause"]: row["time_s"] for row in rows if row["device"] == rows[0]["device"]}
    steps = [row for row in tables.get("steps", ()) if row["device"] == rows[0]["device"]] if rows else []
    idle_s = sum(lasted.values())
    if clean_s is None or not steps or not idle_s:
        return lasted
    busy_s = [row["busy_share"] * row["wall_s"] for row in steps if row["busy_share"] is not None]
    if not busy_s:
        return lasted
    clean_idle_s = max(0.0, clean_s - median(busy_s))
    return {cause: time_s / idle_s * clean_idle_s for cause, time_s in lasted.items()}


def causes(trace: Trace, device: int, gaps: Gaps) -> dict[str, Floats]:
    """Return the time of each cause in each gap; the host's calls count only where the host was late."""
    copies = [Span(COPY, copy.start_s, copy.end_s) for copy in trace.copies.take(trace.copies.device == device)]
    host = [Span(PROFILER, start, end) for start, end in trace.overheads]
    host += [Span(str(stalls(call.name)), call.start_s, call.end_s) for call in trace.calls.where(stalls)]
    if len(gaps.step):
        within = float(gaps.start_s.min()), float(gaps.end_s.max())
        host += [Span(HOST, start, end) for start, end in silences(trace, *within)]
    times = {cause: np.zeros(len(gaps.step)) for cause in CAUSES}
    if trace.lacks_kernels:
        return times | {UNSEEN: gaps.end_s - gaps.start_s}
    late = ~gaps.pending & ~gaps.lost
    for which, spans, rest in (
        (gaps.pending, copies, LATENCY),
        (late, [*copies, *host], LAUNCH),
        (gaps.lost, copies, LOST),
    ):
        for cause, time_s in _split(gaps.start_s[which], gaps.end_s[which], spans, rest).items():
            times[cause][which] = time_s
    return times


def silences(trace: Trace, from_s: float, to_s: float) -> list[tuple[float, float]]:
    """Return the stretches between two times in which no launching thread made a CUDA call for over 1 ms.

    Empty if the trace has no launch, because then the host's calls are unknown.
    """
    kernels = trace.kernels
    known = ~np.isnan(kernels.launch_start_s)
    if not known.any():
        return []
    calls = trace.calls.take(np.isin(trace.calls.thread, np.unique(kernels.thread[known])))
    start = np.concatenate([kernels.launch_start_s[known], calls.start_s])
    end = np.concatenate([kernels.launch_end_s[known], calls.end_s])
    order = np.argsort(start, kind="stable")
    until = np.clip(np.concatenate([[from_s], np.maximum.accumulate(end[order])]), from_s, to_s)
    after = np.clip(np.append(start[order], to_s), from_s, to_s)
    long = np.flatnonzero(after - until > SILENT_S)
    return list(zip(until[long].tolist(), after[long].tolist(), strict=True))


def idle_during(kernels: Kernels, start_s: Floats, end_s: Floats, which: Bools | None = None) -> Floats:
    """Return for each interval its time in which no device ran a kernel, or none of these kernels."""
    starts, ends = (kernels.start_s, kernels.end_s) if which is None else (kernels.start_s[which], kernels.end_s[which])
    until = np.maximum.accumulate(np.concatenate([[-np.inf], ends]))[:-1]
    busy = np.concatenate([[0.0], np.cumsum(np.clip(ends - np.maximum(starts, until), 0.0, None))])
    latest = np.concatenate([[-np.inf], np.maximum.accumulate(ends)])

    def busy_until(time_s: Floats) -> Floats:
        begun = np.searchsorted(starts, time_s, "right")
        return np.asarray(busy[begun] - np.clip(latest[begun] - time_s, 0.0, None))

    return np.asarray(end_s - start_s - (busy_until(end_s) - busy_until(start_s)))


def _split(start: Floats, end: Floats, spans: Sequence[Span], rest: str) -> dict[str, Floats]:
    """Return the time of each cause in each stretch; `rest` is the cause of time that no span covers.

    Of several spans at once, the cause that is first in CAUSES counts.
    """
    number = np.array([CAUSES.index(span.cause) for span in spans], np.int64)
    begins, ends = (np.array([getattr(span, edge) for span in spans]) for edge in ("start_s", "end_s"))
    edges = np.unique(np.concatenate([begins, ends, start[:1], end[-1:]]))
    # Between two edges the open spans do not change: those that have begun minus those that have ended.
    lasts = np.full(len(edges), CAUSES.index(rest))
    for cause in np.unique(number)[::-1]:
        began, ended = (np.searchsorted(edges, times[number == cause]) for times in (begins, ends))
        lasting = np.cumsum(np.bincount(began, minlength=len(edges)) - np.bincount(ended, minlength=len(edges))) > 0
        lasts[lasting] = cause
    found = {}
    for cause in np.unique(lasts):
        until = np.concatenate([[0.0], np.cumsum(np.where(lasts == cause, np.diff(edges, append=np.nan), 0.0)[:-1])])
        lasted = np.interp(end, edges, until) - np.interp(start, edges, until)
        found[CAUSES[cause]] = np.where(lasted > ROUNDING_S, lasted, 0.0)
    return found
