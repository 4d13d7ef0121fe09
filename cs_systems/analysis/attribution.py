"""Which phase, and apart which layer, caused each kernel. Floor 0.

A kernel belongs to the ranges that were open on the launching thread when its launch began. The autograd thread
launches the backward kernels while the main thread waits inside its `backward` range: there the phase is taken from
what the main thread had open at that time, and the layer from the ranges that hooks opened in the autograd thread; else
from the forward operator with the backward operator's sequence number; else the layer is unattributed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from cs_systems.analysis.names import UNATTRIBUTED, meaning
from cs_systems.analysis.sequence import SequenceRoute
from cs_systems.analysis.trace import Kernel, Range, Recording, timelines
from cs_systems.config import Phase


class Place(NamedTuple):
    """Where a kernel belongs: to exactly one phase, to exactly one layer, and in a block to at most one part of it."""

    phase: str
    layer: str
    part: str | None


NOWHERE = Place(UNATTRIBUTED, UNATTRIBUTED, None)


def attribute(recording: Recording) -> list[Place]:
    """A Place for each kernel of the recording, in its order."""
    lines = timelines(recording.ranges)
    mains = {pid: lines[thread] for pid, thread in main_threads(recording.ranges).items()}
    route = SequenceRoute(recording) if recording.ops else None
    # Kernels of one stretch of time share their place; a thread without ranges has one stretch.
    known: dict[tuple[int, int | None, int], Place] = {}
    places = []
    for kernel in recording.kernels:
        time, thread = kernel.launch_start_s, kernel.thread
        if time is None:
            places.append(NOWHERE)
            continue
        line, main = lines.get(thread) if thread is not None else None, mains.get(kernel.pid)
        there = bisect_right(main.times, time) - 1 if main else 0
        here = there if line is main else bisect_right(line.times, time) - 1 if line else 0
        place = known.get((there, thread, here))
        if place is None:
            own = line.stacks[here] if line else ()
            outer = main.stacks[there] if main and line is not main else ()
            place = known[there, thread, here] = place_of(own, outer)
        if route and place.layer == UNATTRIBUTED and place.phase == Phase.BACKWARD:
            place = _with_forwards_layer(place, kernel, route)
        places.append(place)
    return places


def main_threads(ranges: Sequence[Range]) -> dict[int, int]:
    """pid → the thread that opened most of its phases."""
    phases: dict[int, Counter[int]] = {}
    for r in ranges:
        phases.setdefault(r.pid, Counter())[r.thread] += meaning(r.name).phase not in (None, Phase.LOSS)
    return {pid: counts.most_common(1)[0][0] for pid, counts in phases.items()}


def place_of(own: Sequence[Range], outer: Sequence[Range] = ()) -> Place:
    """The place that open ranges mean, outermost first: `own` of the launching thread, `outer` of the main thread where
    that is another one. The outermost phase counts, and the innermost layer and part."""
    inside = [meaning(r.name) for r in own]
    phases = [m.phase for m in (*(meaning(r.name) for r in outer), *inside) if m.phase]
    phase = phases[0] if phases else UNATTRIBUTED
    layer = part = None
    for m in inside:
        if m.layer:
            layer, part = m.layer, None
        # `norm` inside attention is still attention's; `attention.scores` says more than `attention`.
        if m.part and (part is None or m.part.startswith(part)):
            part = m.part
    if layer is None and phase in (Phase.LOSS, Phase.OPTIMIZER):
        layer = phase
    return Place(phase, layer or UNATTRIBUTED, part)


def _with_forwards_layer(place: Place, kernel: Kernel, route: SequenceRoute) -> Place:
    ranges = route.forward_ranges(kernel)
    if not ranges:
        return place
    forward = place_of(ranges)
    return Place(place.phase, forward.layer, forward.part)
