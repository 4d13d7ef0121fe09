"""Phase and layer of each event of a snapshot: by ranges where there are some, else by stacks.

The rules are data: ANYWHERE, INNERMOST and NO_STACK, and for ranges `core.range_names`. A range counts for
all threads, by time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from cs_systems.analysis.memory.allocations import ALLOC, BEFORE, FREE_COMPLETED, FREE_REQUESTED, Allocation
from cs_systems.analysis.memory.sites import python_frames, short_file
from cs_systems.config import Phase
from cs_systems.core.range_names import meaning
from cs_systems.readers.snapshot import Annotation, Frame, Snapshot, Stack

SETUP = "setup"  # a model is built or moved


class StackRule(NamedTuple):
    """Rule that a frame belongs to a phase if its function and file match these patterns as a whole."""

    phase: str
    function: str
    file: str
    why: str


# Rules for a frame anywhere in the stack: calls from backward (a checkpoint's forward, a hook) belong to backward.
ANYWHERE = (
    StackRule(Phase.BACKWARD, r"_engine_run_backward|backward", r".*", "a function named backward"),
    StackRule(Phase.BACKWARD, r"torch::autograd::Engine::.*", r".*", "a frame of autograd's engine"),
)
# Otherwise the innermost frame that fits a rule counts: forward in an optimizer's closure is forward.
INNERMOST = (
    StackRule(Phase.OPTIMIZER, r".*", r".*torch/optim/.*", "a frame in torch/optim/"),
    StackRule(Phase.OPTIMIZER, r"_init_group|step", r".*optim[^/]*\.py", "step or _init_group in a file named optim*"),
    StackRule(Phase.LOSS, r".*cross_entropy|nll_loss|.*_loss|loss|loss_fn", r".*", "a function named like a loss"),
    StackRule(Phase.FORWARD, r"forward", r".*", "a function named forward"),
    StackRule(
        SETUP,
        r"_apply|convert|reset_parameters|_?init_weights?|__init__",
        r".*",
        "__init__, _apply, convert, reset_parameters or init_weights",
    ),
)
NO_STACK = "no Python frame, while others have some: from autograd's own thread"


class Place(NamedTuple):
    phase: str | None
    layer: str | None


def phase_of_stack(stack: Stack) -> str | None:
    """Return the phase by ANYWHERE, else by INNERMOST; None where no rule fits."""
    phases = [_by_frame(ANYWHERE, f.function, f.file) for f in stack]
    phases += [_by_frame(INNERMOST, f.function, f.file) for f in stack]
    return next((phase for phase in phases if phase), None)


@lru_cache(maxsize=65536)
def _by_frame(rules: tuple[StackRule, ...], function: str, file: str) -> str | None:
    fitting = (r for r in rules if re.fullmatch(r.function, function) and re.fullmatch(r.file, file))
    return next((str(rule.phase) for rule in fitting), None)


def places(snapshot: Snapshot) -> list[Place]:
    """Return the place of each event."""
    by_stack = [Place(phase_of_stack(stack), None) for stack in snapshot.stacks]
    without = {kind: _without_stack(snapshot, kind) for kind in (ALLOC, FREE_REQUESTED, FREE_COMPLETED)}
    events, found = snapshot.events, []
    last = Place(None, None)
    ranges = _ranges(snapshot.annotations)
    begins, here = next(ranges, _NEVER)
    now = Place(None, None)
    for index, (action, stack) in enumerate(zip(events.action, events.stack, strict=True)):
        if events.time_us:
            while begins <= events.time_us[index]:
                now = here
                begins, here = next(ranges, _NEVER)
        place = by_stack[stack] if stack else without.get(action, last)
        place = last if place is None else place
        found.append(Place(now.phase or place.phase, now.layer))
        if action == ALLOC:
            last = place
    return found


_NEVER = (1 << 63, Place(None, None))


def _without_stack(snapshot: Snapshot, kind: int) -> Place | None:
    """Return the place of an event of this kind that has no stack.

    None means the place of the allocation before, since no event of this kind has a stack.
    """
    events = snapshot.events
    have_some = any(stack for stack, action in zip(events.stack, events.action, strict=True) if action == kind)
    if kind == ALLOC:
        return Place(Phase.BACKWARD.value if have_some else None, None)
    return Place(Phase.BACKWARD.value, None) if have_some else None


def _ranges(annotations: Sequence[Annotation]) -> Iterator[tuple[int, Place]]:
    """Yield (time, place from then on): the innermost open range with a phase, and the innermost with a layer.

    Events in the µs in which a range begins or ends are inside.
    """
    phases: list[str] = []  # names of the open ranges with a phase, outermost first
    layers: list[str] = []
    for time_us, begins, name in sorted(a if a.begins else a._replace(time_us=a.time_us + 1) for a in annotations):
        means = meaning(name)
        for opened in [stack for stack, known in ((phases, means.phase), (layers, means.layer)) if known]:
            if begins:
                opened.append(name)
            elif name in opened:
                del opened[len(opened) - 1 - opened[::-1].index(name)]
        phase = meaning(phases[-1]).phase if phases else None
        yield time_us, Place(phase, meaning(layers[-1]).layer if layers else None)


def layers_by_loop(
    snapshot: Snapshot, allocations: Sequence[Allocation], places: Sequence[Place]
) -> tuple[dict[int, str], list[Frame]]:
    """Return (layers, frames): the pass of the loop over the layers for each allocation of forward, by event.

    The frames are those of the loops. Stacks do not number the layers, but they show a loop: below a frame named
    `forward`, without leaving it, the first stack recurs after others. The outermost such loop is the one over the
    layers.
    """
    if any(place.layer and place.layer.startswith("block") for place in places):
        return {}, []  # ranges name the layers
    chains = _Chains()
    # The depth of the interpreter's own frames varies, so only Python's frames show that a stack recurs.
    python = [python_frames(stack) for stack in snapshot.stacks]
    by_stack = [chains.of(stack) for stack in python]
    equal = {stack: index for index, stack in enumerate(python)}
    forward = [(event, equal[python[stack]], turn) for event, stack, turn in _forward(allocations, places)]
    loops = {prefix for _, passes in _passes(forward, by_stack) for prefix, number in passes if number}
    outermost = [prefix for prefix in loops if not loops & {prefix[:n] for n in range(len(prefix))}]
    frames = sorted({prefix[-1] for prefix in outermost})
    numbered: dict[int, str] = {}
    for event, passes in _passes(forward, by_stack):
        prefix, number = next(((p, n) for p, n in passes if p in loops), ((), 0))
        if prefix:
            where = f" ({short_file(prefix[-1].file)}:{prefix[-1].line})" if len(frames) > 1 else ""
            numbered[event] = f"block {number}{where}"
    return numbered, frames


def _forward(allocations: Sequence[Allocation], places: Sequence[Place]) -> Iterator[tuple[int, int, int]]:
    """Yield (event, stack, number of the forward pass) of forward's allocations, in order.

    An event of another phase ends a pass.
    """
    number, at = 0, 0
    for a in allocations:  # by their starts
        if a.start > BEFORE and a.stack and places[a.start].phase == Phase.FORWARD:
            number += any(p.phase not in (None, Phase.FORWARD) for p in places[at : a.start])
            at = a.start
            yield a.start, a.stack, number


class _Chains:
    """Prefixes of a stack from the outermost frame to each frame named forward, outermost first.

    Equal prefixes are one object.
    """

    def __init__(self) -> None:
        self._known: dict[Stack, Stack] = {}

    def of(self, stack: Stack) -> tuple[Stack, ...]:
        outside = stack[::-1]
        parts = [outside[: n + 1] for n, frame in enumerate(outside) if frame.function == "forward"]
        return tuple(self._known.setdefault(part, part) for part in parts)


def _passes(
    forward: Sequence[tuple[int, int, int]], chains: Sequence[tuple[Stack, ...]]
) -> Iterator[tuple[int, list[tuple[Stack, int]]]]:
    """Yield (event, passes) for each allocation.

    `passes` holds, for each part of its chain, how often the first stack below that part has recurred.
    """
    state: list[list[int]] = []  # for each part still open: [first stack, last stack, passes]
    opened: tuple[Stack, ...] = ()
    before = -1
    for event, stack, number in forward:
        chain = chains[stack]
        common = 0
        while number == before and common < min(len(opened), len(chain)) and opened[common] is chain[common]:
            common += 1
        del state[common:]
        for entry in state:
            entry[2] += stack == entry[0] and entry[1] != stack
            entry[1] = stack
        state += [[stack, stack, 0] for _ in chain[common:]]
        opened, before = chain, number
        yield event, [(part, entry[2]) for part, entry in zip(chain, state, strict=True)]
