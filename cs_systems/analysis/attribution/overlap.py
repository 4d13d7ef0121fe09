"""Communication against computation on one rank, and waiting against transfer between ranks.

In one rank's trace, by interval arithmetic: communication is hidden while a collective and computation run together (a
kernel, a copy), and exposed while it runs alone. The device is idle while neither runs. The step is the sum of these
times:

    step = compute + exposed + idle

The difference between a traced step on N ranks and one on one rank is exactly the sum of three (`reconcile`):

- exposed communication;
- slower computation during communication: the collective's kernels take multiprocessors and memory bandwidth from it,
  and some strategies copy;
- longer waits of the device for the host.

In the traces of all ranks, a collective ends on all ranks at once and begins on each when that rank reaches it. The
last rank to arrive does not wait, so its duration is the transfer time; the longer durations of other ranks include
waiting. Clocks differ between ranks, durations do not (`waiting`).

A CPU trace has no kernels. There gloo's ranges are the communication, and the marked phases of the step, except those
that communicate, are the computation, although a rank may also wait for a collective within a phase. Where no backward
is marked, the operators of ATen and the innermost of others are the computation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, NamedTuple, TypedDict

import numpy as np

from cs_systems.analysis.attribution.kernel_families import is_collective
from cs_systems.analysis.attribution.places import attribute
from cs_systems.analysis.attribution.profile import find_steps
from cs_systems.analysis.attribution.sequence_numbers import route_of
from cs_systems.config import ConfigError, Phase
from cs_systems.core.range_names import COMMUNICATION, UNATTRIBUTED, meaning
from cs_systems.core.statistics import ROUNDING_S, excess_s
from cs_systems.core.tables import Column, Table
from cs_systems.readers.forms.columns import UNKNOWN, Bools, Categorical, Floats, Ints
from cs_systems.readers.forms.trace import Kernels, Step, Trace, steps_of

GLOO = "gloo:"  # prefix of the range of each gloo collective
_SENDS = ("c10d::", "record_param_comms")  # operators that communicate
_NO_COMPUTATION = (None, Phase.SYNCHRONIZE, COMMUNICATION)
FINEST = 1000  # a picture shows intervals down to a step's duration divided by this


class StreamTimes(TypedDict):
    """Times of one step of a rank's communication and computation."""

    step_s: float
    compute_s: float
    communication_s: float
    hidden_s: float  # communication during computation
    exposed_s: float  # communication alone
    idle_s: float
    collectives: int


class SkewRow(TypedDict):
    """Collectives of one rank in a step; None where the ranks' traces do not fit together."""

    rank: int
    transfer_s: float | None
    waiting_s: float | None  # waiting for the other ranks


class RankOverlapRow(StreamTimes, SkewRow):
    """Median step of one rank, in `overlap` of the profiler `overlap`."""


class Interval(TypedDict):
    """Interval to draw of one step's streams, from the step's start."""

    stream: str  # "compute" or "communication"
    phase: str | None  # phase that launched the computation
    start_s: float
    end_s: float


class StreamRow(Interval):
    """Row of the table `streams`: an interval of one rank."""

    rank: int


class HostWork(NamedTuple):
    """Computation in a trace without kernels; `phase` is UNATTRIBUTED for operators."""

    phase: Categorical[str]
    start_s: Floats
    end_s: Floats


def host_work(trace: Trace) -> HostWork:
    """Return when the host computed: in marked phases, or in operators where none is marked as backward."""
    ops, ranges = trace.operators, trace.ranges
    if ops is None or any(meaning(name).phase == Phase.BACKWARD for name in ranges.name.values):
        marks = ranges.take(ranges.name.codes_where(lambda name: meaning(name).phase not in _NO_COMPUTATION))
        phases = [str(meaning(name).phase) for name in marks.name.values]
        return HostWork(Categorical(phases, marks.name.codes), marks.start_s, marks.end_s)
    # An operator of ATen also works outside of nested operators; one of autograd may wait for a collective.
    computes = ops.innermost | ops.signature.codes_where(lambda one: one.name.startswith("aten::"))
    which = np.flatnonzero(computes & ~ops.signature.codes_where(lambda one: one.name.startswith(_SENDS)))
    nowhere = Categorical([UNATTRIBUTED], np.zeros(len(which), np.int64))
    return HostWork(nowhere, ops.start_s[which], ops.end_s[which])


class Intervals(NamedTuple):
    """Sorted intervals that do not overlap: (count,) starts and ends, in s."""

    start_s: Floats
    end_s: Floats

    @property
    def length_s(self) -> float:
        return float((self.end_s - self.start_s).sum())


NOTHING = Intervals(np.empty(0), np.empty(0))
NO_KERNELS: Ints = np.empty(0, np.int64)


def union(start_s: Floats, end_s: Floats) -> Intervals:
    """Return the union of the intervals, given in any order; intervals of zero length cover nothing."""
    lasting = end_s > start_s
    order = np.argsort(start_s[lasting], kind="stable")
    start_s, end_s = start_s[lasting][order], end_s[lasting][order]
    reached = np.maximum.accumulate(end_s)
    begins = np.ones(len(start_s), bool)
    begins[1:] = start_s[1:] > reached[:-1]
    first = np.flatnonzero(begins)
    return Intervals(start_s[first], reached[np.append(first[1:], len(start_s)) - 1] if len(first) else end_s[:0])


def intersection(a: Intervals, b: Intervals) -> Intervals:
    """Return the intersection of both; intervals that only touch do not overlap, in spite of rounding."""
    edges = np.unique(np.concatenate([*a, *b]))
    inside = _covers(a, edges[:-1]) & _covers(b, edges[:-1]) & (np.diff(edges) > ROUNDING_S)
    return union(edges[:-1][inside], edges[1:][inside])


def _covers(intervals: Intervals, time_s: Floats) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Return for each time whether an interval contains it."""
    begun, ended = (np.searchsorted(edges, time_s, "right") for edges in intervals)
    return np.asarray(begun > ended)


@dataclass(frozen=True)
class Streams:
    """Collectives, in order, and computation of one step on one device; times are from the step's start.

    Attributes:
        step: the step, until the host's range and the device's work have ended.
        collectives: the start and end of each, not merged.
        names: their names.
        computing: the computation, merged.
        sent: index of each collective among the trace's kernels; empty without kernels.
        computed: the kernels that compute.
    """

    step: Step
    collectives: Intervals
    names: tuple[str, ...]
    computing: Intervals
    sent: Ints = field(default_factory=NO_KERNELS.copy)
    computed: Ints = field(default_factory=NO_KERNELS.copy)

    @property
    def communicating(self) -> Intervals:
        return union(*self.collectives)

    def row(self) -> StreamTimes:
        step_s = self.step.end_s - self.step.start_s
        compute_s, communication_s = self.computing.length_s, self.communicating.length_s
        hidden_s = intersection(self.communicating, self.computing).length_s
        exposed_s = excess_s(communication_s, hidden_s)
        return {
            "step_s": step_s,
            "compute_s": compute_s,
            "communication_s": communication_s,
            "hidden_s": hidden_s,
            "exposed_s": exposed_s,
            "idle_s": excess_s(step_s, compute_s + exposed_s),
            "collectives": len(self.names),
        }


def streams(trace: Trace, steps: str | None = None) -> list[Streams]:
    """Return both streams of each step of one rank.

    Raises:
        ConfigError: No step is found, as in `find_steps`.
    """
    chosen, _ = find_steps(trace, steps)
    if len(trace.kernels):
        return of_kernels(trace, chosen)
    ranges = trace.ranges
    gloo = ranges.take(ranges.name.codes_where(lambda name: name.startswith(GLOO)))
    _, start_s, end_s = host_work(trace)
    return _cut(chosen, list(gloo.name), _Work.of_ranges(gloo.start_s, gloo.end_s), _Work.of_ranges(start_s, end_s))


def of_kernels(trace: Trace, chosen: Sequence[Step], device: int | None = None) -> list[Streams]:
    """Return both streams of each step, from the kernels launched in it on one device (None: on any).

    Memcpys and memsets count as computation: they occupy a stream as kernels do.
    """
    kernels = trace.kernels
    own = np.ones(len(kernels), bool) if device is None else kernels.device == device
    collective = is_collective(kernels)
    copies = trace.copies if device is None else trace.copies.take(trace.copies.device == device)
    collectives, computing = _Work.of_kernels(kernels, own & collective), _Work.of_kernels(kernels, own & ~collective)
    copied = _Work.of_ranges(copies.start_s, copies.end_s)
    computing = _Work(*(np.append(*columns) for columns in zip(computing, copied, strict=True)))
    names = [function.name for function in kernels.function.take(own & collective)]
    return _cut(chosen, names, collectives, computing)


class _Work(NamedTuple):
    """Intervals in any order, and the time at which the host launched each, which decides the step they belong to."""

    launched_s: Floats
    start_s: Floats
    end_s: Floats
    kernel: Ints  # index in the trace; UNKNOWN for others

    @classmethod
    def of_kernels(cls, kernels: Kernels, which: Bools) -> _Work:
        return cls(kernels.launched_s[which], kernels.start_s[which], kernels.end_s[which], np.flatnonzero(which))

    @classmethod
    def of_ranges(cls, start_s: Floats, end_s: Floats) -> _Work:
        return cls(start_s, start_s, end_s, np.full(len(start_s), UNKNOWN))

    def by_step(self, steps: Sequence[Step]) -> list[Ints]:
        """Return for each step the indices of its intervals, from one sort over all intervals."""
        number, inside = steps_of(self.launched_s, steps)
        mine = np.flatnonzero(inside)
        mine = mine[np.argsort(number[mine], kind="stable")]
        first = np.searchsorted(number[mine], np.arange(len(steps) + 1))
        return [mine[begin:end] for begin, end in pairwise(first.tolist())]


def _cut(chosen: Sequence[Step], names: Sequence[str], collectives: _Work, computing: _Work) -> list[Streams]:
    """Return both streams of each step; the step lasts until the host's range and the device's work have ended."""
    found = []
    for step, sent, computed in zip(chosen, collectives.by_step(chosen), computing.by_step(chosen), strict=True):
        sent = sent[np.argsort(collectives.start_s[sent], kind="stable")]
        start, end = collectives.start_s[sent] - step.start_s, collectives.end_s[sent] - step.start_s
        computes = union(computing.start_s[computed] - step.start_s, computing.end_s[computed] - step.start_s)
        last = max([step.end_s, *collectives.end_s[sent].tolist(), *computing.end_s[computed].tolist()])
        of_step = tuple(names[i] for i in sent.tolist())
        own = (kernel[kernel != UNKNOWN] for kernel in (collectives.kernel[sent], computing.kernel[computed]))
        found.append(Streams(step._replace(end_s=last), Intervals(start, end), of_step, computes, *own))
    return found


class Waiting(NamedTuple):
    """Transfer and waiting times of all ranks' collectives.

    Shape: `transfer_s` (collectives,), the duration once all ranks have arrived; `wait_s` (ranks, collectives), the
    time that each rank waited for the others.
    """

    transfer_s: Floats
    wait_s: Floats


def waiting(durations_s: Sequence[Floats]) -> Waiting:
    """Return transfer and waiting times from each rank's durations of the collectives, all in one order.

    Raises:
        ConfigError: The ranks ran different numbers of collectives.
    """
    counts = [len(own) for own in durations_s]
    if len(set(counts)) > 1:
        raise ConfigError(
            f"the ranks' traces hold different numbers of collectives: {', '.join(map(str, counts))}; "
            "profile once more, and if they still differ, let all ranks run the same collectives"
        )
    table = np.stack(durations_s)
    transfer_s = table.min(axis=0)
    return Waiting(transfer_s, table - transfer_s)


def skew_rows(ranks: Sequence[Sequence[Streams]]) -> list[SkewRow]:
    """Return one row for each rank, per step, from the streams of all ranks.

    Raises:
        ConfigError: The streams are not of the same steps.
    """
    durations = [np.concatenate([s.collectives.end_s - s.collectives.start_s for s in own]) for own in ranks]
    found, steps = waiting(durations), max(len(ranks[0]), 1)
    return [
        {
            "rank": rank,
            "transfer_s": float(found.transfer_s.sum()) / steps,
            "waiting_s": float(own.sum()) / steps,
        }
        for rank, own in enumerate(found.wait_s)
    ]


def median_step(found: Sequence[Streams]) -> int:
    """Return the number of the step with the median duration; a sum of medians would belong to no real step."""
    return sorted(range(len(found)), key=lambda number: found[number].row()["step_s"])[(len(found) - 1) // 2]


def median_row(found: Sequence[Streams]) -> StreamTimes:
    return found[median_step(found)].row()


def picture(trace: Trace, step: Streams) -> list[Interval]:
    """Return intervals to draw one step's streams; those that are too close to be seen apart are joined."""
    tolerance = (step.step.end_s - step.step.start_s) / FINEST
    rows: list[Interval] = [
        {"stream": "communication", "phase": None, "start_s": start, "end_s": end}
        for start, end in _joined(step.collectives, tolerance)
    ]
    for phase, intervals in _computing_by_phase(trace, step).items():
        rows += [
            {
                "stream": "compute",
                "phase": phase,
                "start_s": start - step.step.start_s,
                "end_s": end - step.step.start_s,
            }
            for start, end in _joined(intervals, tolerance)
        ]
    return rows


def _computing_by_phase(trace: Trace, of: Streams) -> dict[str, Intervals]:
    kernels, step, found = trace.kernels, of.step, dict[str, Intervals]()
    if not len(kernels):
        phases, start_s, end_s = host_work(trace)
        of_step = (step.start_s <= start_s) & (start_s < step.end_s)
        for phase in phases.values:
            own = of_step & phases.codes_where(phase.__eq__)
            if own.any():
                found[phase] = Intervals(start_s[own], end_s[own])
        return found
    places = attribute(trace, route_of(trace)).take(of.computed)
    for phase in dict.fromkeys(place.phase for place in places.values):
        named = np.array([place.phase == phase for place in places.values])
        own = of.computed[named[places.codes]]
        if len(own):
            found[phase] = Intervals(kernels.start_s[own], kernels.end_s[own])
    return found


def _joined(intervals: Intervals, tolerance: float) -> list[tuple[float, float]]:
    """Return the union of the intervals, joining those closer together than the tolerance."""
    start, end = union(intervals.start_s, intervals.end_s + tolerance)
    return list(zip(start.tolist(), (end - tolerance).tolist(), strict=True))


class Reconciled(TypedDict):
    """Difference between two steps: timed, traced, and the three terms of the traced difference."""

    difference_s: Annotated[float, Column("longer", "longer: timed step minus that of one rank alone")]
    traced_difference_s: Annotated[
        float,
        Column(
            "traced",
            "traced: the same under the profiler: exposed communication, slower computation and additional idle time",
        ),
    ]  # profilers and other programs change the steps, so this may differ from difference_s
    exposed_s: float  # communication without computation
    slower_compute_s: Annotated[float, Column("compute")]
    waits_longer_s: Annotated[float, Column("idle")]


def reconcile(several: StreamTimes, alone: StreamTimes, several_s: float, alone_s: float) -> Reconciled:
    """Return the reasons why a step takes `several_s` on several ranks and `alone_s` on one rank.

    `several_s` and `alone_s` are times without a profiler; `several` and `alone` are the `median_row` of a traced step
    of each. All are in s.
    """
    exposed_s = excess_s(several["exposed_s"], alone["exposed_s"])
    slower_s = excess_s(several["compute_s"], alone["compute_s"])
    idle_s = excess_s(several["idle_s"], alone["idle_s"])
    return {
        "difference_s": excess_s(several_s, alone_s),
        "traced_difference_s": exposed_s + slower_s + idle_s,
        "exposed_s": exposed_s,
        "slower_compute_s": slower_s,
        "waits_longer_s": idle_s,
    }


RANK_OVERLAP = Table("overlap", RankOverlapRow, "communication and computation of each rank's median step")
STREAMS = Table("streams", StreamRow, "communication and computation of one step, as intervals")
