"""Blocks of a model found by repetition, for a trace in which nothing names a layer.

The blocks of a forward pass launch the same kernels one block after the other, so the sequence of kernel names has a
period. A wrong guess is worse than none: the repeated part must take most of forward's time, hold a matrix product, and
repeat at least three times, equally often in each pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cs_systems.analysis.attribution.kernel_families import family, is_collective
from cs_systems.analysis.attribution.places import Place
from cs_systems.analysis.attribution.sequence_numbers import SequenceRoute
from cs_systems.config import Phase
from cs_systems.core.range_names import UNATTRIBUTED
from cs_systems.readers.forms.columns import UNKNOWN, Bools, Categorical, Floats, Ints, distinct
from cs_systems.readers.forms.trace import Trace

LEAST_SHARE = 0.6  # least share of a pass's time in the repeated part
SURE_SHARE = 0.85
FEWEST = 3  # repetitions
SHORTEST, LONGEST = 4, 2000  # kernels of one block
MOST_DIFFERENT = 20  # number of passes in which a period is searched, if all differ
NEARLY = 0.98  # a shorter period is preferred if it explains this share of what the best period explains
PRODUCTS = ("matmul", "attention")


class Repetition(NamedTuple):
    """Repeated part of a sequence: from `first` on, `blocks` repetitions of `period` kernels; its share of the time."""

    first: int
    period: int
    blocks: int
    share: float


def repetition(codes: Ints, time_s: Floats, is_product: Bools) -> Repetition | None:
    """Return the repetition that explains most of the time of a sequence of kernels; None where nothing repeats."""
    if not (total := float(time_s.sum())):
        return None
    until = np.concatenate([[0.0], np.cumsum(time_s)])
    products = np.concatenate([[0], np.cumsum(is_product)])
    best: Repetition | None = None
    for period in range(SHORTEST, min(len(codes) // FEWEST, LONGEST) + 1):
        equal = np.concatenate([[False], codes[period:] == codes[:-period], [False]])
        edges = np.flatnonzero(equal[1:] != equal[:-1])
        starts, ends = edges[::2], edges[1::2]  # limits of the runs of equal pairs
        counts = (ends - starts) // period + 1
        lasts = starts + counts * period
        fits = (counts >= FEWEST) & (products[np.minimum(starts + period, len(codes))] > products[starts])
        if not fits.any():
            continue
        shares = np.where(fits, until[lasts] - until[starts], 0.0) / total
        at = int(shares.argmax())
        if best is None or shares[at] * NEARLY > best.share:
            best = Repetition(int(starts[at]), period, int(counts[at]), float(shares[at]))
    return best


class Layers(NamedTuple):
    """Places of all kernels.

    `found` says how blocks were found and how certain that is, `tried` why none were found.
    """

    places: Categorical[Place]
    found: str | None = None
    tried: str | None = None


def with_blocks(trace: Trace, places: Categorical[Place], route: SequenceRoute | None) -> Layers:
    """Give kernels of forward and backward their block, where the trace names no layer and phases are known."""
    phase = np.array([place.phase for place in places.values], object)
    known = (Phase.FORWARD, Phase.BACKWARD)
    of_model = places.codes_where(lambda place: place.phase in known)
    named = places.codes_where(lambda place: place.phase in known and place.layer != UNATTRIBUTED)
    of_model &= ~is_collective(trace.kernels)
    if trace.modules is not None or not of_model.any() or (named & of_model).any():
        return Layers(places)
    forward = _passes(trace, np.flatnonzero(of_model & (phase == Phase.FORWARD)[places.codes]))
    found = _in_passes(trace, forward)
    blocks = np.full(len(trace.kernels), UNKNOWN)
    sure = [(which, one) for which, one in zip(forward, found, strict=True) if one and one.share >= LEAST_SHARE]
    for which, one in sure:
        _number(blocks, which, one)
    share = _share(trace, of_model & (phase == Phase.FORWARD)[places.codes], blocks)
    if share < LEAST_SHARE or len({one.blocks for _, one in sure}) > 1:
        return Layers(places, tried=f"forward's kernels do not repeat as those of blocks do{_best(found)}")
    block = sure[0][1]
    backward = np.flatnonzero(of_model & (phase == Phase.BACKWARD)[places.codes])
    also, of_backward = _backward(trace, route, backward, blocks, block.blocks) if len(backward) else ("", 1.0)
    confidence = "high" if min(share, of_backward) >= SURE_SHARE else "medium"
    how = (
        f"no range names a layer: {block.blocks} blocks are found by repetition, {block.period} kernels each, with "
        f"{share:.0%} of forward's time{also} (confidence: {confidence}); the first kernel of a block may be some "
        "kernels off"
    )
    return Layers(_placed(places, blocks), how)


def _share(trace: Trace, which: Bools | Ints, blocks: Ints) -> float:
    """Return the share of the time of some kernels that belongs to blocks."""
    time_s = (trace.kernels.end_s - trace.kernels.start_s)[which]
    total = float(time_s.sum())
    return float(time_s[blocks[which] != UNKNOWN].sum()) / total if total else 0.0


def _passes(trace: Trace, which: Ints) -> list[Ints]:
    """Return the kernels of each pass in launch order; a pass ends where another phase launches kernels."""
    kernels = trace.kernels
    order = np.lexsort((kernels.start_s, kernels.launch_start_s, kernels.device))
    place = np.empty(len(kernels), np.int64)
    place[order] = np.arange(len(kernels))
    sorted_places = np.sort(place[which])
    breaks = np.flatnonzero(_other_between(trace, order, sorted_places)) + 1
    return [order[part] for part in np.split(sorted_places, breaks) if len(part) >= FEWEST * SHORTEST]


def _other_between(trace: Trace, order: Ints, chosen: Ints) -> Bools:
    """Return for each chosen kernel but the last whether a kernel that was not chosen comes before the next one.

    Collectives do not count as such kernels.
    """
    others = np.ones(len(order), bool)
    others[chosen] = False
    others &= ~is_collective(trace.kernels)[order]
    before = np.cumsum(others)
    return np.diff(before[chosen]) > 0


def _in_passes(trace: Trace, passes: Sequence[Ints]) -> list[Repetition | None]:
    """Return the repetition in each pass; passes with equal kernels share one search."""
    kernels = trace.kernels
    names = Categorical.of(function.name for function in kernels.function.values).codes[kernels.function.codes]
    product = kernels.function.codes_where(lambda function: family(function.name) in PRODUCTS)
    time_s = kernels.end_s - kernels.start_s
    known: dict[bytes, Repetition | None] = {}
    found = []
    for which in passes:
        key = names[which].tobytes()
        if key not in known:
            enough = len(known) < MOST_DIFFERENT
            known[key] = repetition(names[which], time_s[which], product[which]) if enough else None
        found.append(known[key])
    return found


def _number(blocks: Ints, which: Ints, one: Repetition, backward: bool = False) -> None:
    numbers = np.repeat(np.arange(one.blocks), one.period)
    inside = which[one.first : one.first + one.blocks * one.period]
    blocks[inside] = one.blocks - 1 - numbers if backward else numbers


def _backward(trace: Trace, route: SequenceRoute | None, which: Ints, blocks: Ints, count: int) -> tuple[str, float]:
    """Give the kernels of backward their block; return the words for the note, and the share of time explained."""
    if route is not None:
        _by_sequence(route, which, blocks)
        share = _share(trace, which, blocks)
        if share >= LEAST_SHARE:
            return f"; backward by autograd's sequence numbers, with {share:.0%} of its time", share
        blocks[which] = UNKNOWN
    passes = _passes(trace, which)
    for own, one in zip(passes, _in_passes(trace, passes), strict=True):
        if one and one.share >= LEAST_SHARE and one.blocks == count:
            _number(blocks, own, one, backward=True)
    share = _share(trace, which, blocks)
    if share < LEAST_SHARE:
        blocks[which] = UNKNOWN
        return "; the kernels of backward do not repeat as often, so backward has no blocks", LEAST_SHARE
    return f", and as many in backward, with {share:.0%} of its time", share


def _by_sequence(route: SequenceRoute, which: Ints, blocks: Ints) -> None:
    """Give each backward kernel the block of the forward operator with the same autograd sequence number."""
    forward = np.flatnonzero(blocks != UNKNOWN)
    of_number = dict(zip(route.forward_numbers(forward), blocks[forward].tolist(), strict=True)) | {None: UNKNOWN}
    blocks[which] = [of_number.get(number, UNKNOWN) for number in route.forward_numbers(which)]


def _placed(places: Categorical[Place], blocks: Ints) -> Categorical[Place]:
    numbers = {place: n for n, place in enumerate(places.values)}
    codes = places.codes.copy()
    which = np.flatnonzero(blocks != UNKNOWN)
    first, pairs = distinct(codes[which], blocks[which])
    to = np.empty(len(first), np.int64)
    for pair in np.argsort(first).tolist():
        at = which[first[pair]]
        place = places.values[codes[at]]._replace(layer=f"block {blocks[at]}")
        to[pair] = numbers.setdefault(place, len(numbers))
    codes[which] = to[pairs]
    return Categorical(list(numbers), codes)


def _best(found: list[Repetition | None]) -> str:
    known = [one for one in found if one is not None]
    if not known:
        return ""
    best = max(known, key=lambda one: one.share)
    return f": at best {best.period} kernels repeat {best.blocks} times, with {best.share:.0%} of the time"
