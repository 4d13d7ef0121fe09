"""Attribution of each kernel to a phase and, separately, to a layer.

A kernel belongs to the ranges that were open on the launching thread when its launch began. The autograd thread
launches the backward kernels while the main thread waits inside its `backward` range. For these the phase comes from
the ranges open on the main thread at that time, and the layer from the first of these that is known:

- the ranges that hooks opened in the autograd thread;
- the ranges of the forward operator with the backward operator's sequence number.

Otherwise the layer is unattributed. Where no range marks forward or backward, `inferred_phases` gives the phases.

A collective is in the layer `communication`. Outside of all phases, such as between backward and optimizer in DDP or
FSDP, it is also in the phase `communication`.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from cs_systems.analysis.attribution.inferred_phases import are_marked, inferred
from cs_systems.analysis.attribution.kernel_families import is_collective
from cs_systems.analysis.attribution.sequence_numbers import SequenceRoute
from cs_systems.config import Phase
from cs_systems.core.range_names import COMMUNICATION, FUSED, UNATTRIBUTED, meaning, refined
from cs_systems.readers.forms.columns import Bools, Categorical, Floats, Ints, Ranges, Timeline
from cs_systems.readers.forms.modules import Modules
from cs_systems.readers.forms.trace import Trace


class Place(NamedTuple):
    """Phase, layer and part of a kernel: exactly one phase, exactly one layer and, in a block, at most one part."""

    phase: str
    layer: str
    part: str | None
    fused: bool = False  # a compiler fused it with operators of other layers
    module: str | None = None  # path of the innermost module, where the trace has a table of modules


NOWHERE = Place(UNATTRIBUTED, UNATTRIBUTED, None)
NOTHING_OPEN: Timeline[str] = Timeline(np.empty(0), np.empty(0), ())


def attribute(trace: Trace, route: SequenceRoute | None) -> Categorical[Place]:
    """Return the Place of each kernel of the trace, in order, with the help of its sequence route if there is one."""
    kernels = trace.kernels
    found = places_at(trace.ranges, kernels.thread, kernels.launch_start_s, trace.modules)
    places = {place: n for n, place in enumerate(found.values)}

    def change(which: Bools, **fields: Any) -> None:
        listed, own = list(places), found.codes[which]
        to = np.arange(len(listed))
        for n in np.unique(own).tolist():
            to[n] = places.setdefault(listed[n]._replace(**fields), len(places))
        found.codes[which] = to[own]

    if not are_marked(trace):
        unknown = np.array([place.phase == UNATTRIBUTED for place in found.values])[found.codes]
        for phase, which in inferred(trace, route).items():
            change(which & unknown, phase=phase, **({"layer": phase} if phase == Phase.OPTIMIZER else {}))
    if route is not None:
        _layers_by_sequence(trace, route, places, found.codes)
    # DDP and FSDP communicate from hooks, while the range of some module is open.
    communicates = is_collective(kernels)
    change(communicates, layer=COMMUNICATION, part=None, module=None)
    without_phase = np.array([place.phase == UNATTRIBUTED for place in places])[found.codes]
    change(communicates & without_phase & ~np.isnan(kernels.launch_start_s), phase=COMMUNICATION)
    return Categorical(list(places), found.codes)


def places_at(ranges: Ranges, thread: Ints, time_s: Floats, modules: Modules | None = None) -> Categorical[Place]:
    """Return the Place of the call that each thread made at each time; NOWHERE where the time is unknown (NaN)."""
    lines, main = ranges.timelines, main_timeline(ranges)
    places = {NOWHERE: 0}
    codes = np.zeros(len(thread), np.int64)
    known = ~np.isnan(time_s)
    for number in np.unique(thread[known]).tolist():
        mine = np.flatnonzero(known & (thread == number))
        own = lines.get(number, NOTHING_OPEN)
        outer = NOTHING_OPEN if own is main else main
        # Calls made under the same open ranges share their place.
        open_here, open_there = own.index(time_s[mine]), outer.index(time_s[mine])
        both, inverse = np.unique(open_here * len(outer.stacks) + open_there, return_inverse=True)
        found = (divmod(pair, len(outer.stacks)) for pair in both.tolist())
        of_pair = [place_of(own.stacks[here], outer.stacks[there], modules) for here, there in found]
        codes[mine] = np.array([places.setdefault(place, len(places)) for place in of_pair])[inverse]
    return Categorical(list(places), codes)


def _layers_by_sequence(trace: Trace, route: SequenceRoute, places: dict[Place, int], codes: Ints) -> None:
    """Give backward kernels without a layer the layer of their forward operator; update `codes` and `places`."""
    without_layer = [n for place, n in places.items() if (place.phase, place.layer) == (Phase.BACKWARD, UNATTRIBUTED)]
    which = np.flatnonzero(np.isin(codes, without_layer))
    found: dict[tuple[str, ...], int] = {}  # the ranges around the forward operator → the place
    for i, ranges in zip(which.tolist(), route.forward_ranges(which), strict=True):
        if not ranges:
            continue
        if ranges not in found:
            forward = place_of(ranges, modules=trace.modules)
            place = Place(Phase.BACKWARD.value, forward.layer, forward.part, module=forward.module)
            found[ranges] = places.setdefault(place, len(places))
        codes[i] = found[ranges]


def main_timeline(ranges: Ranges) -> Timeline[str]:
    thread = main_thread(ranges)
    return NOTHING_OPEN if thread is None else ranges.timelines[thread]


def main_thread(ranges: Ranges) -> int | None:
    """Return the thread that opened the most phases; without any phase, the one that opened the most ranges."""
    phases = ranges.named(lambda name: meaning(name).phase not in (None, Phase.LOSS))
    threads = Counter(r.thread for r in phases) or Counter(ranges.thread.tolist())
    return threads.most_common(1)[0][0] if threads else None


# phase → phases that count instead of it if they are open inside it: `optimizer.step(closure)` runs a forward.
# Recomputation inside backward, in a range named forward, counts as backward.
INSIDE: dict[str, tuple[str, ...]] = {
    Phase.FORWARD: (Phase.BACKWARD, Phase.OPTIMIZER),
    Phase.LOSS: (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER),
    Phase.BACKWARD: (Phase.OPTIMIZER,),
    Phase.OPTIMIZER: (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD),
}


def phase_of(names: Iterable[str]) -> str:
    """Return the phase that the names of the open ranges, outermost first, mean together."""
    return functools.reduce(phase_inside, names, UNATTRIBUTED)


def phase_inside(found: str, name: str) -> str:
    """Return the phase inside of a range with this name that begins in a phase."""
    phase = meaning(name).phase
    return phase if phase and (found == UNATTRIBUTED or phase in INSIDE.get(found, ())) else found


@functools.lru_cache(maxsize=65536)
def place_of(own: tuple[str, ...], outer: tuple[str, ...] = (), modules: Modules | None = None) -> Place:
    """Return the place that the names of open ranges mean: the phase of `phase_of`, the innermost layer and part.

    Args:
        own: The ranges open on the launching thread, outermost first.
        outer: The ranges open on the main thread, if it is not the launching thread.
        modules: The modules of the model; the ranges named after them mean only the module.
    """
    if modules is not None:
        return _place_in(modules, own, outer)
    inside = [meaning(name) for name in own]
    phase = phase_of((*outer, *own))
    layer = part = None
    for m in inside:
        if m.layer and m.layer != layer:
            layer, part = m.layer, None
        part = refined(part, m.part)
    if layer is None and phase in (Phase.LOSS, Phase.OPTIMIZER):
        layer = phase
    return Place(phase, layer or UNATTRIBUTED, part, any(name.startswith(FUSED) for name in own))


def _place_in(modules: Modules, own: tuple[str, ...], outer: tuple[str, ...]) -> Place:
    phase = phase_of(name for name in (*outer, *own) if not modules.is_module(name))
    layer, part, module = modules.found(own)
    if layer is None and phase in (Phase.LOSS, Phase.OPTIMIZER):
        layer = phase
    fused = any(name.startswith(FUSED) for name in own)
    return Place(phase, layer or UNATTRIBUTED, part, fused, module)
