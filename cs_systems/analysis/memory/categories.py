"""Category of each allocation of a snapshot: parameter, gradient, activation, … The rules are CATEGORIES.

The sidecar's tensor names take precedence, then phase and lifetime, then number and size. The categories at any time
add up exactly to the bytes allocated then: what no rule fits is `unknown`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cs_systems.analysis.memory.allocations import BEFORE, Allocation, Replay
from cs_systems.analysis.memory.phases import NO_STACK, SETUP, Place, layers_by_loop, phase_of_stack, places
from cs_systems.analysis.memory.sites import short_file, sites
from cs_systems.config import Phase
from cs_systems.readers.snapshot import Frame, Tensor

PARAMETERS, OPTIMIZER_STATE, GRADIENTS, ACTIVATIONS = "parameters", "optimizer state", "gradients", "activations"
TEMPORARIES, WORKSPACES, BEFORE_RECORDING, UNKNOWN = "temporaries", "workspaces", "before recording", "unknown"
CATEGORIES = {
    PARAMETERS: (
        "allocated while a model was built or moved, and not freed then; before recording: one for each gradient, of "
        "the gradient's size"
    ),
    OPTIMIZER_STATE: (
        "allocated by the optimizer and not freed in its step; before recording: further ones of each gradient's size"
    ),
    WORKSPACES: (
        "exactly as large as a cuBLAS workspace, never freed, allocated neither where a model is built nor by the "
        "optimizer, of a size that no parameter can have, and older than the last step or allocated in backward"
    ),
    BEFORE_RECORDING: "allocated before recording began, and not identified by its size",
    GRADIENTS: "allocated in backward and not freed in it, also before recording, or freed by zero_grad",
    ACTIVATIONS: "allocated in forward or the loss, or in no known phase, and alive when a backward begins",
    TEMPORARIES: "allocated and freed in one phase; in forward: freed before backward begins",
    UNKNOWN: "no rule fits",
}
# PyTorch's CUBLAS_WORKSPACE_CONFIG: :4096:2:16:8, on Hopper and later :4096:8 (32 MiB).
WORKSPACE_BYTES = (8_519_680, 33_554_432)
MOST_SETS = 4  # most sets of an optimizer's state: moments, master weights and an average
MOST_WORKSPACES = 2  # one for each thread that calls cuBLAS: forward's and autograd's
_OF_KIND = {
    "parameter": PARAMETERS,
    "gradient": GRADIENTS,
    "optimizer_state": OPTIMIZER_STATE,
    "buffer": PARAMETERS,
    "input": ACTIVATIONS,
}


class Attributed(NamedTuple):
    """Allocation with its category, the phase and layer in which it was made, and its tensor where known."""

    allocation: Allocation
    category: str
    phase: str | None
    layer: str | None
    tensor: Tensor | None = None


@dataclass(frozen=True)
class Attribution:
    """All allocations of a replay with their categories.

    `notes` lists what was inferred, and from what; `places` has each event's place, `sites` each stack's site.
    """

    replay: Replay
    allocations: tuple[Attributed, ...]
    places: tuple[Place, ...]
    sites: tuple[str | None, ...]
    notes: tuple[str, ...]

    def alive_at(self, event: int) -> list[Attributed]:
        return [a for a in self.allocations if a.allocation.is_alive(event)]


def attribute(replay: Replay) -> Attribution:
    found = places(replay.snapshot)
    layers, loops = layers_by_loop(replay.snapshot, replay.allocations, found)
    lives = _Lives(replay, found)
    made = [_by_phase(replay, a, found, lives, layers) for a in replay.allocations]
    notes = list(_notes(made, loops))
    if replay.snapshot.sidecar is not None:
        made = _by_tensor(replay, replay.snapshot.sidecar.tensors, made)
        if named := sum(a.tensor is not None for a in made):
            notes.append(f"{named} allocations are identified by the tensors in the JSON file next to the snapshot")
    if not any(a.tensor and a.tensor.kind == "parameter" for a in made):
        made, inferred = _before_by_size(made)
        notes += inferred
    return Attribution(replay, tuple(made), tuple(found), tuple(sites(replay.snapshot.stacks)), tuple(notes))


def _by_phase(
    replay: Replay, a: Allocation, places: Sequence[Place], lives: _Lives, layers: dict[int, str]
) -> Attributed:
    end = len(replay.snapshot.events)
    stays = a.end == end
    if a.start == BEFORE:
        phase, layer = phase_of_stack(replay.snapshot.stacks[a.stack]), None
    else:
        phase, layer = places[a.start]
    # A weight may be as large as a workspace, but not allocated where a workspace is.
    workspace = stays and lives.is_workspace_size(a.requested_bytes) and phase not in (SETUP, Phase.OPTIMIZER)
    if not stays and lives.is_zeroed(a):
        return Attributed(a, GRADIENTS, phase, None)
    if a.start == BEFORE:
        known = {SETUP: PARAMETERS, Phase.OPTIMIZER: OPTIMIZER_STATE}.get(phase or "", BEFORE_RECORDING)
        if phase == Phase.BACKWARD and (stays or places[a.end].phase not in (None, Phase.BACKWARD)):
            known = GRADIENTS
        return Attributed(a, WORKSPACES if workspace else known, phase, None)
    if workspace and (phase == Phase.BACKWARD or lives.outlives_a_step(a)):
        return Attributed(a, WORKSPACES, phase, None)
    category = lives.category(a, None if stays else places[a.end].phase)
    return Attributed(a, category, phase, layer or layers.get(a.start))


class _Lives:
    """Categories by phase and lifetime."""

    def __init__(self, replay: Replay, places: Sequence[Place]) -> None:
        snapshot = replay.snapshot
        self._places = places
        # Sizes of what can be parameters; some of a workspace's size are workspaces.
        self._parameters = Counter(
            a.requested_bytes for a in replay.allocations if a.start == BEFORE or places[a.start].phase == SETUP
        )
        self._stack = snapshot.events.stack
        self._in_zero_grad = [any(frame.function == "zero_grad" for frame in stack) for stack in snapshot.stacks]
        self._next_forward = _next(places, {Phase.FORWARD})
        self._next_backward = _next(places, {Phase.BACKWARD})
        # For each event the next one of another known phase.
        known = {place.phase for place in places} - {None}
        self._ends = {phase: _next(places, known - {phase}) for phase in (SETUP, Phase.BACKWARD, Phase.OPTIMIZER)}

    def is_zeroed(self, a: Allocation) -> bool:
        """Return whether zero_grad frees an allocation that other code made."""
        return self._in_zero_grad[self._stack[a.end]] and not self._in_zero_grad[a.stack]

    def is_workspace_size(self, size: int) -> bool:
        """Return whether cuBLAS makes workspaces of the size, and no parameter can have it."""
        return size in WORKSPACE_BYTES and self._parameters[size] <= MOST_WORKSPACES

    def outlives_a_step(self, a: Allocation) -> bool:
        """Return whether a forward begins after the next backward that follows the allocation."""
        backward = self._next_backward[a.start]
        return backward < len(self._places) and self._next_forward[backward] < len(self._places)

    def category(self, a: Allocation, freed_in: str | None) -> str:
        """Return the category of an allocation.

        `freed_in` is the phase in which the free is requested, None if the allocation is alive at the end or in no
        phase then.
        """
        phase, alive = self._places[a.start].phase, a.end == len(self._places)
        over = self._ends[phase][a.start] if phase in self._ends else None
        if over is not None and phase != Phase.BACKWARD:
            if not alive and a.end < over:
                return TEMPORARIES
            return PARAMETERS if phase == SETUP else OPTIMIZER_STATE
        if over is not None:
            if alive and over == len(self._places):
                return UNKNOWN  # recording ends within backward: a gradient and a temporary look alike
            return TEMPORARIES if freed_in == Phase.BACKWARD and a.end < over else GRADIENTS
        kept = a.end >= self._next_backward[a.start]
        if phase in (Phase.FORWARD, Phase.LOSS):
            return ACTIVATIONS if kept or alive else TEMPORARIES
        return ACTIVATIONS if kept and freed_in == Phase.BACKWARD else UNKNOWN


def _next(places: Sequence[Place], phases: Container[str | None]) -> list[int]:
    """Return for each event the next event of one of the phases; the number of events where none follows."""
    found, following = list[int](), len(places)
    for index, place in reversed([*enumerate(places)]):
        if place.phase in phases:
            following = index
        found.append(following)
    return found[::-1]


def _before_by_size(made: list[Attributed]) -> tuple[list[Attributed], list[str]]:
    """Infer parameters and optimizer state among the allocations before recording, by the gradients' sizes.

    Each parameter has one gradient of its size. If there are at least as many blocks of every gradient's size as
    gradients, they are the parameters, and whole multiples beyond that are the optimizer's. Those may be twice as wide.
    """
    gradients = gradient_sizes(made)
    before = Counter(a.allocation.requested_bytes for a in made if a.category == BEFORE_RECORDING)
    if not gradients or any(before[size] < count for size, count in gradients.items()):
        return made, []
    left = _wider_state(gradients, before) or {
        size: (count, (before[size] // count - 1) * count) for size, count in gradients.items()
    }
    result = []
    # An optimizer may make its state anew in each step; a parameter stays.
    for a in sorted(made, key=lambda a: (a.allocation.start, -a.allocation.end, a.allocation.address)):
        parameters, state = left.get(a.allocation.requested_bytes, (0, 0))
        if a.category == BEFORE_RECORDING and parameters + state:
            category = PARAMETERS if parameters else OPTIMIZER_STATE
            left[a.allocation.requested_bytes] = (parameters - 1, state) if parameters else (0, state - 1)
            a = a._replace(category=category)
        result.append(a)
    result.sort(key=lambda a: (a.allocation.start, a.allocation.address))
    note = (
        "parameters and optimizer state were allocated before recording and are identified by number and size: as many "
        f"parameters as gradients ({sum(gradients.values())}); blocks of equal size cannot be distinguished"
    )
    return result, [note]


def _wider_state(gradients: Counter[int], before: Counter[int]) -> dict[int, tuple[int, int]] | None:
    """Return (parameters, state) by size if the state is twice as wide as the weights: fp32 for weights in bf16.

    None unless whole sets of it are there, one for each moment and master weight, and none as wide as the weights. If
    all weights have one size, a block of twice the size shows nothing.
    """
    narrow = min(before[size] // count - 1 for size, count in gradients.items())
    rest = before - gradients
    sets = min(rest[2 * size] // count for size, count in gradients.items())
    if narrow or not sets or len(gradients) < 2:
        return None
    state = Counter({2 * size: min(sets, MOST_SETS) * count for size, count in gradients.items()})
    return {size: (gradients[size], state[size]) for size in {*gradients, *state}}


def gradient_sizes(made: Iterable[Attributed]) -> Counter[int]:
    """Return the largest number of gradients of each size that are alive at once."""
    changes = []
    for a in made:
        if a.category == GRADIENTS:
            changes += [(a.allocation.start, 1, a.allocation.requested_bytes)]
            changes += [(a.allocation.end, -1, a.allocation.requested_bytes)]
    now: Counter[int] = Counter()
    most: Counter[int] = Counter()
    for _, change, size in sorted(changes):
        now[size] += change
        most[size] = max(most[size], now[size])
    return most


def _by_tensor(replay: Replay, tensors: Iterable[Tensor], made: Sequence[Attributed]) -> list[Attributed]:
    """Apply the tensors of the sidecar, each to the memory block that contains it at the end."""
    end, result = len(replay.snapshot.events), list(made)
    alive = sorted((a.allocation.address, index) for index, a in enumerate(made) if a.allocation.end == end)
    addresses = [address for address, _ in alive]
    for tensor in tensors:
        at = bisect_right(addresses, tensor.address) - 1
        if at < 0:
            continue
        index = alive[at][1]
        a = result[index]
        if tensor.address < a.allocation.address + a.allocation.bytes and a.tensor is None:
            result[index] = a._replace(category=_OF_KIND[tensor.kind], tensor=tensor)
    return result


def _notes(made: Sequence[Attributed], loops: Sequence[Frame]) -> Iterable[str]:
    if loops:
        where = " and ".join(f"{short_file(f.file)}:{f.line}" for f in loops)
        yield f"blocks are numbered by the iterations of the loop at {where}, which the stacks show"
    backward = [a for a in made if a.phase == Phase.BACKWARD and a.allocation.start > BEFORE]
    if backward and not any(a.allocation.stack for a in backward):
        yield f"backward: allocations with {NO_STACK}"
