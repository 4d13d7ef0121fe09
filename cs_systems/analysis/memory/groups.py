"""Groups of a snapshot's allocations that one remedy concerns, such as the activations of all blocks.

What a leak or an unused graph keeps belongs to its own cause and to no other group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from cs_systems.analysis.memory.allocations import BEFORE
from cs_systems.analysis.memory.categories import (
    ACTIVATIONS,
    BEFORE_RECORDING,
    GRADIENTS,
    OPTIMIZER_STATE,
    PARAMETERS,
    TEMPORARIES,
    Attributed,
    Attribution,
)
from cs_systems.analysis.memory.model_copies import LARGE_BYTES, model_copies
from cs_systems.analysis.memory.sites import of_torch, python_frames
from cs_systems.config import Phase

LOGITS, FOREACH, EARLIER_GRADIENTS = "logits", "foreach temporaries", "earlier gradients"
IN_BLOCKS, SCORES, WEIGHT_COPIES = "activations in blocks", "attention scores", "weight copies"
MODEL_COPIES, UPDATE = "model copies", "update temporaries"
LEAST_SIZES = 5  # sizes of tensors of a pass; fewer may be equal by chance
PASS = (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD)
_OF_FOREACH = ("_multi_tensor", "_foreach")  # beginnings of torch.optim's functions that update all parameters at once


def groups(found: Attribution, apart: Iterable[Attributed]) -> Mapping[str, Sequence[Attributed]]:
    """Return the allocations of each group over the whole history, without the allocations in `apart`."""
    copies, models = weight_copies(found), model_copies(found)
    of_models = models.allocations if models else ()
    others = {id(one) for one in (*apart, *copies, *of_models)}
    own = [one for one in found.allocations if id(one) not in others]
    logits = [*_logits(own)]
    of_logits = {*map(id, logits)}
    # without backward, nothing is kept for it, unless the recording ends before it
    is_trained = any(place.phase == Phase.BACKWARD for place in found.places) or _ends_with_graph(found, own)
    kept = [one for one in own if is_trained and one.category == ACTIVATIONS and id(one) not in of_logits]
    in_blocks = [one for one in kept if (one.layer or "").startswith("block")]
    passing = [one for one in own if one.category == TEMPORARIES and (one.layer or "").startswith("block")]
    scores = _scores(found, in_blocks or kept if is_trained else passing)
    of_scores = {*map(id, scores)}
    return {
        ACTIVATIONS: [one for one in kept if id(one) not in of_scores],
        SCORES: scores,
        WEIGHT_COPIES: copies,
        MODEL_COPIES: of_models,
        IN_BLOCKS: in_blocks or kept,
        LOGITS: logits,
        PARAMETERS: [one for one in own if one.category == PARAMETERS],
        GRADIENTS: [one for one in own if one.category == GRADIENTS],
        EARLIER_GRADIENTS: [*_earlier_gradients(found, own)],
        OPTIMIZER_STATE: [one for one in own if one.category == OPTIMIZER_STATE],
        FOREACH: (of_foreach := [*_of_foreach(found, own)]),
        UPDATE: [*_of_update(own, of_foreach)],
    }


def _ends_with_graph(found: Attribution, own: Sequence[Attributed]) -> bool:
    """Return whether the recording ends in a forward pass that keeps tensors of several blocks for backward."""
    blocks = {one.layer for one in own if one.category == ACTIVATIONS and (one.layer or "").startswith("block")}
    last = next((place.phase for place in reversed(found.places) if place.phase), None)
    return last in (Phase.FORWARD, Phase.LOSS) and len(blocks) > 1


def earlier_pass(found: Attribution) -> Sequence[Attributed]:
    """Return the allocations from before the recording that have the number and sizes of its forward pass.

    They are the tensors of a pass before it, which something still holds; empty if the sizes do not tell.
    """
    end = len(found.places)
    made = Counter(
        one.allocation.requested_bytes
        for one in found.allocations
        if one.phase == Phase.FORWARD and one.allocation.end == end and one.allocation.start > BEFORE
    )
    before = [one for one in found.allocations if one.category == BEFORE_RECORDING and one.allocation.end == end]
    if len(made) < LEAST_SIZES or made - Counter(one.allocation.requested_bytes for one in before):
        return ()
    twins = list[Attributed]()
    for one in reversed(before):
        if made[one.allocation.requested_bytes]:
            made[one.allocation.requested_bytes] -= 1
            twins.append(one)
    return twins


def weight_copies(found: Attribution) -> Sequence[Attributed]:
    """Return the copies of weights in half their size that autocast makes in forward.

    Empty if their sizes do not show them.

    Sizes show them if most large weights have a copy, weights have several sizes, and no size has more copies than
    weights.
    """
    peak = found.replay.peak_event
    alive = [one for one in found.alive_at(peak) if one.allocation.requested_bytes >= LARGE_BYTES // 2]
    weights = Counter(
        one.allocation.requested_bytes // 2
        for one in alive
        if one.allocation.requested_bytes >= LARGE_BYTES and one.category in (PARAMETERS, BEFORE_RECORDING)
    )
    made = Counter(one.allocation.requested_bytes for one in alive if one.phase == Phase.FORWARD)
    copied = {size: made[size] for size, count in weights.items() if 0 < made[size] <= count}
    if len(copied) < 2 or 2 * sum(copied.values()) < sum(weights.values()):
        return ()
    return [one for one in found.allocations if one.phase == Phase.FORWARD and one.allocation.requested_bytes in copied]


def _scores(found: Attribution, kept: Sequence[Attributed]) -> Sequence[Attributed]:
    """Return the outputs of softmax and the scores before it that its calling function keeps, masked or not."""
    of_softmax = [one for one in kept if _of_softmax(found, one)]
    alike = {(one.allocation.requested_bytes, _function(found, one)) for one in of_softmax}
    return [one for one in kept if (one.allocation.requested_bytes, _function(found, one)) in alike]


def _function(found: Attribution, one: Attributed) -> tuple[str, str] | None:
    """Return file and name of the innermost function outside of PyTorch that made the allocation."""
    stack = python_frames(found.replay.snapshot.stacks[one.allocation.stack])
    return next(((frame.file, frame.function) for frame in stack if not of_torch(frame.file)), None)


def _of_softmax(found: Attribution, one: Attributed) -> bool:
    """Return whether a softmax made the allocation; in a block this is the softmax of attention."""
    stack = found.replay.snapshot.stacks[one.allocation.stack]
    names = [frame.function.lower() for frame in python_frames(stack)]
    return any("softmax" in name and "log_softmax" not in name for name in names)


def _logits(own: Sequence[Attributed]) -> Iterator[Attributed]:
    """Yield the tensors of the loss and lm_head, and tensors of the pass as large as the largest of the loss.

    Logits in 16 bits that the loss converts to fp32 are half as large; they are the last large tensor before the loss.
    """
    largest = max((one.allocation.requested_bytes for one in own if one.phase == Phase.LOSS), default=0)
    before: Attributed | None = None
    for one in sorted(own, key=lambda one: one.allocation.start):
        if one.phase == Phase.FORWARD and one.category == ACTIVATIONS and 4 * one.allocation.requested_bytes > largest:
            before = one
        if one.phase == Phase.LOSS and one.allocation.requested_bytes == largest and before is not None:
            if 2 * before.allocation.requested_bytes == largest and before.layer != "lm_head":
                yield before
            before = None
    for one in own:
        as_large = one.allocation.requested_bytes == largest and one.category in (ACTIVATIONS, TEMPORARIES)
        in_block = (one.layer or "").startswith("block")
        if one.phase == Phase.LOSS or one.layer == "lm_head" or (as_large and one.phase in PASS and not in_block):
            yield one


def _earlier_gradients(found: Attribution, own: Sequence[Attributed]) -> Iterator[Attributed]:
    """Yield the gradients at the peak that were there when the forward pass before the peak began.

    None where the optimizer still needs them: a pass without a backward may run between backward and the update.
    """
    begins = _begin_of_pass(found)
    if begins is None or not _has_backward(found):
        return
    for one in own:
        if one.category == GRADIENTS and one.allocation.start < begins and one.allocation.end > found.replay.peak_event:
            yield one


def _begin_of_pass(found: Attribution) -> int | None:
    """Return the first event of the forward pass at the peak, or of the forward pass of the backward at the peak."""
    begins = None
    for event in range(found.replay.peak_event, BEFORE, -1):
        phase = found.places[event].phase
        if phase == Phase.FORWARD:
            begins = event
        elif phase not in (None, Phase.LOSS) and (phase != Phase.BACKWARD or begins is not None):
            break
    return begins


def _has_backward(found: Attribution) -> bool:
    """Return whether the pass that the peak is in may have a backward: no update comes before another forward."""
    updated = False
    for place in found.places[max(found.replay.peak_event, 0) :]:
        if place.phase == Phase.BACKWARD:
            return True
        if place.phase == Phase.FORWARD and updated:
            return False
        updated |= place.phase == Phase.OPTIMIZER
    return not updated


def _of_foreach(found: Attribution, own: Sequence[Attributed]) -> Iterator[Attributed]:
    stacks = found.replay.snapshot.stacks
    known = [any(frame.function.startswith(_OF_FOREACH) for frame in stack) for stack in stacks]
    for one in own:
        if one.category == TEMPORARIES and one.phase == Phase.OPTIMIZER and known[one.allocation.stack]:
            yield one


def _of_update(own: Sequence[Attributed], apart: Sequence[Attributed]) -> Iterator[Attributed]:
    """Yield the temporary tensors of an optimizer that updates one parameter at a time."""
    others = {*map(id, apart)}
    for one in own:
        if one.category == TEMPORARIES and one.phase == Phase.OPTIMIZER and id(one) not in others:
            yield one
