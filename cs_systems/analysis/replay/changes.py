"""Changes of a program that a replay can carry: each scales or removes costs of the graph, or moves edges."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import NamedTuple, Protocol

import numpy as np

from cs_systems.analysis.replay.graph import Costs, Graph, befores
from cs_systems.analysis.replay.waits import SYNCS, of_kind
from cs_systems.config import Phase
from cs_systems.core.range_names import general, meaning
from cs_systems.readers._stalls import Kind
from cs_systems.readers.forms.columns import UNKNOWN, Bools, Floats, Ranges
from cs_systems.readers.forms.trace import Trace

LONG_S = 5e-3  # host time between two calls that is too long to be the cost of launching
# Measured with nine models on one H100: captured steps took 0.2 to 1.0 µs per kernel less than steps with queued
# launches.
NEARER_S = 0.6e-6


@dataclass(frozen=True)
class Refusal:
    """Answer without a number, and the reason for it.

    share: share of the step that the change saves, if it is too small to state a number.
    """

    reason: str
    share: float | None = None


class Subject(NamedTuple):
    """Graph that a change applies to, with the trace; `origin_s` is the time of the trace at which the graph begins."""

    trace: Trace
    graph: Graph
    costs: Costs
    origin_s: float


class Change(Protocol):
    """Change of the recorded program; as a text, as `--what-if` takes it."""

    def apply(self, to: Subject) -> Subject | Refusal:
        """Return the changed graph and costs, or why they cannot be told."""
        ...


@dataclass(frozen=True)
class LaunchesFree:
    """The step launched as one CUDA graph: no host cost and no host waits; loading the batch remains.

    Attributes:
        keeps_long: whether host time of over LONG_S between two calls stays, because it does more than launching.
        nearer_s: seconds by which the gap between kernels is shorter in a graph than in a stream with a full queue.
    """

    keeps_long: bool = True
    nearer_s: float = NEARER_S

    @property
    def loosely(self) -> LaunchesFree:
        return replace(self, keeps_long=False)

    def __str__(self) -> str:
        return "launches=free"

    def apply(self, to: Subject) -> Subject | Refusal:
        r, costs = to.graph.recorded, to.costs
        inside, marks = np.zeros(len(r.start_s), bool), r.name.codes == 0
        for begins, ends in r.marks.tolist():
            inside[begins + 1 : ends + 1] = True
        segment, work = host_in(to, to.trace.ranges.take(to.trace.ranges.name.codes_where(_is_input)))
        # Time between the steps stays unchanged; a mark has no work of its own.
        if self.keeps_long:
            segment = np.where(costs.segment > LONG_S, costs.segment, segment)
        segment = np.where(inside, np.minimum(segment, costs.segment), costs.segment)
        launched = inside[r.call] & to.graph.launched
        return to._replace(
            costs=replace(
                costs,
                segment=segment,
                work=np.where(inside, np.minimum(work, costs.work), costs.work),
                waits=costs.waits & (~inside | marks),
                blocks=False,
                lead=np.where(launched, 0.0, costs.lead),
                gap=np.where(launched, np.maximum(costs.gap - self.nearer_s, np.minimum(costs.gap, 0.0)), costs.gap),
            )
        )


@dataclass(frozen=True)
class HostScaled:
    """Host time multiplied by a factor: all of it, or that in the ranges with a name."""

    factor: float
    name: str | None = None  # name or pattern of the ranges; None for all host time

    def __str__(self) -> str:
        return f"host{_of(self.name)}={self.factor:g}"

    def apply(self, to: Subject) -> Subject | Refusal:
        if self.name is None:
            return to._replace(costs=less(to.costs, self.factor, to.costs.segment, to.costs.work))
        ranges = to.trace.ranges
        chosen = ranges.take(ranges.name.codes_where(named(self.name)))
        segment, work = host_in(to, chosen)
        if not (segment.any() or work.any()):
            return Refusal(f"no host time of the steps is in a range named {self.name!r}; {_choices(to)}")
        return to._replace(costs=less(to.costs, self.factor, segment, work))


@dataclass(frozen=True)
class InputRemoved:
    """No time for loading the batch: the ranges of the phase input take no host time."""

    def __str__(self) -> str:
        return "input=0"

    def apply(self, to: Subject) -> Subject | Refusal:
        segment, work = host_in(to, to.trace.ranges.take(to.trace.ranges.name.codes_where(_is_input)))
        if not (segment.any() or work.any()):
            return Refusal("no range of the steps marks the loading of data; mark it with the range input")
        return to._replace(costs=less(to.costs, 0.0, segment, work))


@dataclass(frozen=True)
class SyncRemoved:
    """No wait of the host for the GPU, in all of the step or in the ranges with a name."""

    name: str | None = None

    def __str__(self) -> str:
        return f"sync{_of(self.name)}=0"

    def apply(self, to: Subject) -> Subject | Refusal:
        r = to.graph.recorded
        removed = np.zeros(len(r.start_s), bool)
        removed[of_kind(r, *SYNCS, Kind.BLOCKING_COPY)] = True
        removed[r.call[to.graph.waits.inside]] = True
        if self.name is not None:
            ranges = to.trace.ranges
            removed &= within(to, ranges.take(ranges.name.codes_where(named(self.name))))
        waited = np.zeros(len(r.start_s), bool)
        waited[list(to.graph.waits.awaited)] = True
        if not (removed & waited).any():
            where = "" if self.name is None else f" in a range named {self.name!r}"
            return Refusal(f"the host waits nowhere{where} for the GPU; there is nothing to remove")
        return to._replace(costs=replace(to.costs, waits=to.costs.waits & ~removed))


@dataclass(frozen=True)
class FamilyScaled:
    """Duration of all kernels of one family times a factor."""

    family: str
    factor: float

    def __str__(self) -> str:
        return f"family:{self.family}={self.factor:g}"

    def apply(self, to: Subject) -> Subject | Refusal:
        r = to.graph.recorded
        names, of = r.families
        if is_whole_graph(r.label.values, r.label.codes[r.trace_kernel != UNKNOWN]):
            return Refusal(
                "the trace holds CUDA graphs without their kernels; record with nsys --cuda-graph-trace=node"
            )
        present = [name for number, name in enumerate(names) if (of == number).any()]
        if self.family not in present:
            return Refusal(f"no kernel is of family {self.family!r}; choose among {', '.join(sorted(present))}")
        if self.family == "collective":
            return Refusal("the time of a collective depends on all ranks; give the traces of all ranks")
        scaled = np.where(of == names.index(self.family), to.costs.duration * self.factor, to.costs.duration)
        return to._replace(costs=replace(to.costs, duration=scaled))


@dataclass(frozen=True)
class CopiesOverlapped:
    """Copies between host and device on a stream of their own, a step ahead, with no wait of the host."""

    def __str__(self) -> str:
        return "copies=overlapped"

    def apply(self, to: Subject) -> Subject | Refusal:
        graph, r = to.graph, to.graph.recorded
        moved = r.label.codes_where(lambda name: name.startswith(("HtoD", "DtoH"))) & graph.launched
        moved &= (r.trace_kernel == UNKNOWN) & ~r.node
        if not moved.any():
            known = r.label.codes_where(bool) | (r.trace_kernel != UNKNOWN)
            return Refusal(
                "no copy between host and device is in the steps"
                if known.all()
                else "the trace names no copy's direction"
            )
        directions = [name.partition(" ")[0] for name in r.label.values]
        apart = {one: len(r.of_stream) + n for n, one in enumerate(dict.fromkeys(directions))}
        stream = np.where(moved, np.array([apart[one] for one in directions])[r.label.codes], r.stream)
        r = replace(r, stream=stream, of_stream=(*r.of_stream, *((UNKNOWN, n) for n in apart.values())))
        depends = {
            k: kept
            for k, found in graph.waits.depends.items()
            if not moved[k] and (kept := [m for m in found if not moved[m]])
        }
        awaited = {i: kept for i, found in graph.waits.awaited.items() if (kept := [m for m in found if not moved[m]])}
        waits = graph.waits._replace(awaited=awaited, depends=depends, inside=graph.waits.inside & ~moved)
        lead = np.where(moved, graph.constants.launch.value, to.costs.lead)
        return to._replace(
            graph=replace(graph, recorded=r, before=befores(r), waits=waits), costs=replace(to.costs, lead=lead)
        )


def _of(name: str | None) -> str:
    return "" if name is None else f":{name}"


def is_whole_graph(names: Iterable[str], codes: object) -> bool:
    """Return whether a kernel represents a whole CUDA graph."""
    present = {*np.unique(np.asarray(codes)).tolist()}
    return any(number in present and name.startswith("CUDA graph ") for number, name in enumerate(names))


def named(pattern: str) -> Callable[[str], bool]:
    """Return a function that accepts names of ranges that match a pattern, or are equal to it."""
    return lambda name: name == pattern or fnmatchcase(general(name), pattern) or fnmatchcase(name, pattern)


def _is_input(name: str) -> bool:
    return meaning(name).phase == Phase.INPUT


def less(costs: Costs, factor: float, segment: Floats, work: Floats) -> Costs:
    """Return the costs with some of the host time times a factor."""
    return replace(costs, segment=costs.segment - (1 - factor) * segment, work=costs.work - (1 - factor) * work)


def host_in(to: Subject, ranges: Ranges) -> tuple[Floats, Floats]:
    """Return how much of each call's segment and of its own work is inside of ranges.

    The ranges of a call's own thread count, and of the main thread, which waits meanwhile.
    """
    r, costs = to.graph.recorded, to.costs
    recorded = to.graph.costs.segment
    segment, work = np.zeros(len(r.start_s)), np.zeros(len(r.start_s))
    lasted = r.end_s - r.start_s
    for thread in np.unique(r.thread).tolist():
        own = ranges.take((ranges.thread == thread) | (ranges.thread == r.main))
        edges, inside = _covered(own.start_s - to.origin_s, own.end_s - to.origin_s)
        if not len(edges):
            continue
        calls = np.flatnonzero(r.thread == thread)
        at, until = (np.interp(r.start_s[calls] - s, edges, inside) for s in (recorded[calls], 0.0))
        ended = np.interp(r.end_s[calls], edges, inside)
        share = np.divide(until - at, recorded[calls], out=np.zeros(len(calls)), where=recorded[calls] > 0)
        segment[calls] = share * np.maximum(costs.segment[calls], 0.0)
        share = np.divide(ended - until, lasted[calls], out=np.zeros(len(calls)), where=lasted[calls] > 0)
        work[calls] = share * costs.work[calls]
    return segment, work


def _covered(start_s: Floats, end_s: Floats) -> tuple[Floats, Floats]:
    """Return (times, how much of the time until each is inside of an interval)."""
    order = np.argsort(start_s)
    start_s, end_s = start_s[order], np.maximum.accumulate(end_s[order])
    head = np.append(True, start_s[1:] > end_s[:-1])[: len(start_s)]
    begins, ends = start_s[head], end_s[np.append(head[1:], True)[: len(start_s)]]
    edges = np.stack([begins, ends], axis=1).ravel()
    lengths = np.cumsum(ends - begins)
    return edges, np.stack([np.append(0.0, lengths)[:-1], lengths], axis=1).ravel() if len(lengths) else np.empty(0)


def within(to: Subject, ranges: Ranges) -> Bools:
    """Return for each call whether it starts inside of a range of its thread or of the main thread."""
    r = to.graph.recorded
    found = np.zeros(len(r.start_s), bool)
    for thread in np.unique(r.thread).tolist():
        own = ranges.take((ranges.thread == thread) | (ranges.thread == r.main))
        edges, _ = _covered(own.start_s - to.origin_s, own.end_s - to.origin_s)
        calls = np.flatnonzero(r.thread == thread)
        found[calls] = np.searchsorted(edges, r.start_s[calls], "right") % 2 == 1
    return found


def _choices(to: Subject) -> str:
    ranges, r = to.trace.ranges, to.graph.recorded
    until_s = to.origin_s + float(r.end_s.max())
    inside = ranges.take((ranges.end_s > to.origin_s) & (ranges.start_s < until_s))
    codes, counts = np.unique(inside.name.codes, return_counts=True)
    names = dict.fromkeys(general(inside.name.values[c]) for c in codes[np.argsort(-counts)].tolist())
    return f"choose among {', '.join(list(names)[:12])}" if names else "the steps have no range"
