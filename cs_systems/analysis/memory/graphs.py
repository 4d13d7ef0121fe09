"""Graphs of autograd that no backward uses: a forward pass with gradients and an output that is only looked at.

Without gradients a pass frees each tensor when the next operator has read it. With gradients it keeps them for
backward; if none comes, all are freed at once, when the program releases the output of the pass. Such a burst of frees,
outside of every module and of backward, is the trace of a graph that nothing needed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from cs_systems.analysis.memory.allocations import ALLOC, OOM
from cs_systems.analysis.memory.categories import Attributed, Attribution
from cs_systems.analysis.memory.counterfactual import peak_without
from cs_systems.analysis.memory.groups import weight_copies
from cs_systems.analysis.memory.sites import short_file
from cs_systems.config import Phase

LEAST = 5  # allocations that are freed at once
LEAST_SITES = 3  # lines of code that made them


@dataclass(frozen=True)
class UnusedGraphs:
    """Graphs that no backward uses, at the peak of a snapshot.

    Attributes:
        at_peak: number of graphs at the peak; 2 if the last iteration's graph is alive as well as the current one.
        peak_bytes: their bytes at the peak.
        site: the line of code that releases the first of them.
        allocations: allocations of all such graphs.
        peak_without_bytes: the peak without these allocations.
    """

    at_peak: int
    peak_bytes: int
    site: str | None
    allocations: tuple[Attributed, ...]
    peak_without_bytes: int


def unused_graphs(found: Attribution) -> UnusedGraphs | None:
    """Return the graphs that no backward uses; None if none is alive at the peak."""
    peak = found.replay.peak_event
    graphs = [*_released(found).values()]
    alive = [[one for one in graph if one.allocation.is_alive(peak)] for graph in graphs]
    alive = [graph for graph in alive if graph]
    if not alive:
        return None
    events = found.replay.snapshot.events
    gone = tuple(one for graph in graphs for one in graph)
    size = sum(one.allocation.bytes for graph in alive for one in graph)
    site = found.sites[events.stack[alive[0][0].allocation.end]]
    return UnusedGraphs(len(alive), size, site, gone, peak_without(found, gone))


def _released(found: Attribution) -> Mapping[int, Sequence[Attributed]]:
    """Return the allocations of each graph that was released without a backward, by a number in order of time."""
    snapshot = found.replay.snapshot
    events, count = snapshot.events, len(found.places)
    outside = [bool(stack) and not any(_is_module(frame.file) for frame in stack) for stack in snapshot.stacks]
    # Frees with no allocation between them are one burst; those after a failed request are of the stack's unwinding.
    burst = [*accumulate(action in (ALLOC, OOM) for action in events.action)]
    failed = {burst[event] for event, action in enumerate(events.action) if action == OOM}
    copies = {*map(id, weight_copies(found))}  # autocast keeps them until it ends, without gradients too
    graphs: dict[int, list[Attributed]] = defaultdict(list)
    for one in found.allocations:
        end = one.allocation.end
        if (
            end < count
            and one.phase in (Phase.FORWARD, Phase.LOSS)
            and found.places[end].phase != Phase.BACKWARD
            and outside[events.stack[end]]
            and burst[end] not in failed
            and id(one) not in copies
        ):
            graphs[burst[end]].append(one)
    return {
        number: graph
        for number, graph in sorted(graphs.items())
        if len(graph) >= LEAST and len({one.allocation.stack for one in graph}) >= LEAST_SITES
    }


@dataclass(frozen=True)
class KeptOutput:
    """Output of a pass that is alive at the peak, in the next pass.

    Attributes:
        bytes: its size.
        site: the line that made it.
        peak_without_bytes: the peak without any such output.
    """

    bytes: int
    site: str
    peak_without_bytes: int


def kept_output(found: Attribution) -> KeptOutput | None:
    """Return the largest tensor of the last pass that is freed only after the same line has made it again.

    Tensors of blocks (three of one line at once) and tensors that backward frees are kept on purpose, so they do not
    count.
    """
    peak, same = found.replay.peak_event, defaultdict[tuple[str, int], list[Attributed]](list)
    for one in found.allocations:
        site = found.sites[one.allocation.stack]
        if one.phase == Phase.FORWARD and site and not (one.layer or "").startswith("block"):
            same[site, one.allocation.bytes].append(one)
    earlier = [
        one
        for group in same.values()
        if all(first.allocation.end <= third.allocation.start for first, third in zip(group, group[2:], strict=False))
        for one, following in pairwise(group)
        if following.allocation.start < one.allocation.end <= following.allocation.end and _is_released(found, one)
    ]
    alive = [one for one in earlier if one.allocation.is_alive(peak)]
    largest = max(alive, key=lambda one: one.allocation.bytes, default=None)
    site = found.sites[largest.allocation.stack] if largest else None
    if largest is None or site is None:
        return None
    return KeptOutput(largest.allocation.bytes, site, peak_without(found, earlier))


def _is_released(found: Attribution, one: Attributed) -> bool:
    """Return whether the program itself frees the allocation: not backward, a module or the end of the recording."""
    end, snapshot = one.allocation.end, found.replay.snapshot
    if end == len(found.places) or found.places[end].phase == Phase.BACKWARD:
        return False
    stack = snapshot.stacks[snapshot.events.stack[end]]
    return bool(stack) and not any(_is_module(frame.file) for frame in stack)


def _is_module(file: str) -> bool:
    return short_file(file) == "module.py" and "torch" in file
