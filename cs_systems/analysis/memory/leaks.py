"""Allocations of each step that are never freed: growth of a program's memory, by the line that makes it.

A step ends with the optimizer's update; if there are no updates, with a backward pass; if there are none either, before
a forward pass. A line of code leaks if allocations that it made in each step but the first and the last are alive at
the end: the first step also creates what stays, such as the optimizer's state, and the tensors of the last one are
still in use.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from cs_systems.analysis.memory.allocations import ALLOC, BEFORE
from cs_systems.analysis.memory.categories import Attributed, Attribution
from cs_systems.analysis.memory.counterfactual import peak_without
from cs_systems.analysis.memory.phases import Place
from cs_systems.analysis.memory.sites import outside_forward
from cs_systems.config import Phase

LEAST_STEPS = 5  # in three of them, without the first and the last, each leaking line has left something
OF_A_GRAPH = 3  # lines of forward and loss that all leak keep the graph of autograd


@dataclass(frozen=True)
class Leak:
    """Allocations that each step leaves behind.

    Attributes:
        step_bytes: bytes that stay per step, the median over the steps.
        steps: complete steps of the history.
        site: the line that leaves most.
        sites: the number of lines.
        is_graph: the lines belong to a forward pass with a graph that stays; `site` is the line that begins the pass.
        allocations: of all steps but the last.
        peak_without_bytes: the peak without these allocations.
    """

    step_bytes: int
    steps: int
    site: str
    sites: int
    is_graph: bool
    allocations: tuple[Attributed, ...]
    peak_without_bytes: int


def leak(found: Attribution) -> Leak | None:
    """Return what each step of a snapshot leaves allocated, or None; None also for fewer than LEAST_STEPS steps."""
    leaks = ((each, ends) for ends in _step_ends(found) if (each := _leak(found, ends)))
    return next((each for each, ends in leaks if not each.is_graph or _are_apart(found, ends)), None)


def _are_apart(found: Attribution, ends: Sequence[int]) -> bool:
    """Return whether something happens outside of forward between steps: layers of one pass have equal stacks too.

    A module that is built or moved inside of a forward is a part of the pass.
    """
    snapshot = found.replay.snapshot
    inside = [not stack or any(frame.function == "forward" for frame in stack) for stack in snapshot.stacks]
    outside = [
        event
        for event, (place, stack) in enumerate(zip(found.places, snapshot.events.stack, strict=True))
        if place.phase != Phase.FORWARD and not inside[stack]
    ]
    before = [bisect_left(outside, end + 1) for end in ends[:-1]]
    return len({*before}) == len(before)


def _leak(found: Attribution, ends: Sequence[int]) -> Leak | None:
    if len(ends) < LEAST_STEPS:
        return None
    last, never = len(ends) - 1, len(found.places)
    by_site: dict[str, list[tuple[int, Attributed]]] = defaultdict(list)
    for one in found.allocations:
        start, end, site = one.allocation.start, one.allocation.end, found.sites[one.allocation.stack]
        if site and start > BEFORE and end == never and (step := bisect_left(ends, start)) < last:
            by_site[site].append((step, one))
    between = range(1, last)
    leaking = {site: kept for site, kept in by_site.items() if {step for step, _ in kept} >= {*between}}
    if not leaking:
        return None
    of_step, of_site = Counter[int](), Counter[str]()
    for site, kept in leaking.items():
        for step, one in kept:
            of_step[step] += one.allocation.bytes
            of_site[site] += one.allocation.bytes
    passes = {s for s, kept in leaking.items() if {one.phase for _, one in kept} & {Phase.FORWARD, Phase.LOSS}}
    most = of_site.most_common(1)[0][0]
    is_graph = len(passes) >= OF_A_GRAPH
    if is_graph:
        stacks = found.replay.snapshot.stacks
        begin = (outside_forward(stacks[one.allocation.stack]) for site in passes for _, one in leaking[site])
        most = next(filter(None, begin), most)
    gone = tuple(one for kept in leaking.values() for _, one in kept)
    step_bytes = int(median(of_step[step] for step in between))
    return Leak(step_bytes, len(ends), most, len(leaking), is_graph, gone, peak_without(found, gone))


def _step_ends(found: Attribution) -> Iterator[list[int]]:
    """Yield lists of the events with which steps end, the longest kind of step first."""
    snapshot = found.replay.snapshot
    zeroes = [any(frame.function == "zero_grad" for frame in stack) for stack in snapshot.stacks]
    updates = [
        place if place.phase != Phase.OPTIMIZER or not zeroes[stack] else Place(None, None)
        for place, stack in zip(found.places, snapshot.events.stack, strict=True)
    ]  # zero_grad may stand anywhere in a step
    yield _ends_of(updates, Phase.OPTIMIZER)
    yield _ends_of(found.places, Phase.BACKWARD)
    yield _passes(found)


def _ends_of(places: Sequence[Place], phase: str) -> list[int]:
    """Return the last event of each stretch of a phase; events without a phase belong to the stretch around them."""
    known = [(event, place.phase) for event, place in enumerate(places) if place.phase is not None]
    following = [*(name for _, name in known), None][1:]
    return [event for (event, name), then in zip(known, following, strict=False) if name == phase != then]


def _passes(found: Attribution) -> list[int]:
    """Return the last event of each forward pass: the rarest stack that recurs at all begins one."""
    events = found.replay.snapshot.events
    made = [
        (event, stack)
        for event, (action, stack, place) in enumerate(zip(events.action, events.stack, found.places, strict=True))
        if action == ALLOC and stack and place.phase == Phase.FORWARD
    ]
    times = Counter(stack for _, stack in made)
    fewest = min((count for count in times.values() if count > 1), default=0)
    first = next((stack for _, stack in made if times[stack] == fewest), None)
    return [*[event - 1 for event, stack in made if stack == first][1:], len(found.places) - 1] if first else []
