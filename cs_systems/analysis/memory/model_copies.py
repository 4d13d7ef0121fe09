"""Further copies of a model's weights, such as a frozen reference or an average, by number and size of the tensors."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cs_systems.analysis.memory.allocations import BEFORE
from cs_systems.analysis.memory.categories import (
    GRADIENTS,
    OPTIMIZER_STATE,
    PARAMETERS,
    Attributed,
    Attribution,
    gradient_sizes,
)
from cs_systems.analysis.memory.sites import python_frames, short_file
from cs_systems.readers.snapshot import Frame, Stack

LARGE_BYTES = 1 << 16  # a smaller weight is a vector: any model has these sizes, and autocast does not copy them
FEWEST = 8  # tensors of a model
PRECISIONS = (1.0, 0.5, 2.0)  # possible sizes of a copy's tensors, as a multiple of the weights' sizes
# A copy of a model is made by one of these functions; the moments of an optimizer are not.
MAKES = re.compile(r"(__)?deepcopy(__)?|load_state_dict|from_pretrained|_apply|convert|to|to_empty")
_OF_LIBRARY = re.compile(r"(^|/)(site|dist)-packages/|/lib/python3|(^|/)copy\.py$|(^|/)torch/")


@dataclass(frozen=True)
class ModelCopies:
    """Allocations of the copies alive at the peak, their number, and the lines of the user's code that made them."""

    allocations: tuple[Attributed, ...]
    count: int
    lines: tuple[str, ...]


def model_copies(found: Attribution) -> ModelCopies | None:
    """Return the copies of the trained weights, alive at the peak; None without any, or without gradients.

    The weights have the sizes of the gradients, and so have the moments of an optimizer: only tensors that a known
    function for modules or copies made are counted, and not the first set of them, which are the weights themselves.
    """
    weights = Counter({size: n for size, n in gradient_sizes(found.allocations).items() if size >= LARGE_BYTES})
    if sum(weights.values()) < FEWEST or len(weights) < 2:
        return None
    by_line: dict[str, list[Attributed]] = defaultdict(list)
    for one in found.alive_at(found.replay.peak_event):
        if one.category not in (GRADIENTS, OPTIMIZER_STATE):
            stack = python_frames(found.replay.snapshot.stacks[one.allocation.stack])
            if any(MAKES.fullmatch(frame.function) for frame in stack) and (line := _line(stack)):
                by_line[line].append(one)
    sets = {line: made for line, own in by_line.items() if (made := _sets(own, weights))}
    ordered = sorted(sets, key=lambda line: sets[line][0][0].allocation.start)
    chosen = [(line, each) for line in ordered for each in sets[line]]
    if not _weights_are_older(found, weights):
        chosen = chosen[1:]
    if not chosen:
        return None
    lines = tuple(dict.fromkeys(line for line, _ in chosen))
    return ModelCopies(tuple(one for _, each in chosen for one in each), len(chosen), lines)


def _sets(own: Sequence[Attributed], weights: Mapping[int, int]) -> list[list[Attributed]]:
    """Return the whole sets of tensors of the weights' number and sizes, in one precision, in order of allocation."""
    of_size: dict[int, list[Attributed]] = defaultdict(list)
    for one in sorted(own, key=lambda one: (one.allocation.start, one.allocation.address)):
        of_size[one.allocation.requested_bytes].append(one)
    for times in PRECISIONS:
        sizes = {int(size * times): count for size, count in weights.items()}
        if whole := min(len(of_size[size]) // count for size, count in sizes.items()):
            return [
                [one for size, count in sizes.items() for one in of_size[size][number * count : (number + 1) * count]]
                for number in range(whole)
            ]
    return []


def _weights_are_older(found: Attribution, weights: Mapping[int, int]) -> bool:
    """Return whether the weights were allocated before recording, where stacks are unknown."""
    before = Counter(
        one.allocation.requested_bytes
        for one in found.allocations
        if one.allocation.start == BEFORE and one.category == PARAMETERS and one.allocation.stack == 0
    )
    return all(before[size] >= count for size, count in weights.items())


def _line(stack: Stack) -> str | None:
    own: Frame | None = next((frame for frame in stack if not _OF_LIBRARY.search(frame.file.replace("\\", "/"))), None)
    return f"{short_file(own.file)}:{own.line} {own.function}" if own else None
