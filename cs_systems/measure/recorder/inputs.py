"""Inputs of the models in the steps of a loop: how large they are, and whether they differ."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from cs_systems.measure.recorder.phases import Call

Batch = Counter[tuple[tuple[int, ...], ...]]  # calls of the models in a step by the shapes of their tensors


class StepInputs(NamedTuple):
    """Calls of the models in one step, its tokens if the loop gave them, and the iterators that data loaders began.

    collates_rows: data loaders have put all its batches together from single rows in memory. starts_workers: a data
    loader has started worker processes.
    """

    calls: Counter[Call]
    tokens: int | None
    iterators: int = 0
    collates_rows: bool = False
    starts_workers: bool = False


def batches_of(inputs: Sequence[StepInputs]) -> list[Batch]:
    """Return the input shapes of the models in each step; if the loop trains, only of training calls."""
    trains = any(with_gradients for each in inputs for with_gradients, _ in each.calls)
    found = []
    for each in inputs:
        batch = Batch()
        for (with_gradients, shapes), count in each.calls.items():
            if shapes and with_gradients == trains:
                batch[shapes] += count
        found.append(batch)
    return found


def sizes(inputs: Sequence[StepInputs]) -> list[int]:
    """Return the elements of the models' inputs in each step."""
    return [size_of(batch)[1] for batch in batches_of(inputs)]


def elements(inputs: Sequence[StepInputs]) -> float | None:
    """Return the elements of the models' inputs in a step, the median of the steps; None without any."""
    of_steps = sizes(inputs)
    return float(median(of_steps)) if any(of_steps) else None


def are_different(batches: Sequence[Batch]) -> bool:
    """Return whether batches differ in shape, regardless of how often a model is called."""
    ordered = sorted(batches, key=Batch.total)
    return any(not few <= many and size_of(few) != size_of(many) for few, many in pairwise(ordered))


def size_of(batch: Batch) -> tuple[int, int]:
    """Return the sum of the first dimensions of the first tensors, and the elements of all tensors, over all calls."""
    rows = sum(shapes[0][0] * count for shapes, count in batch.items())
    return rows, sum(sum(map(math.prod, shapes)) * count for shapes, count in batch.items())


def rows_of_tokens(batch: Batch) -> tuple[int, ...]:
    """Return the shape of a model's first input if it is called once with a matrix; else an empty one."""
    shapes = [*batch.elements()]
    return shapes[0][0] if len(shapes) == 1 and len(shapes[0][0]) == 2 else ()
