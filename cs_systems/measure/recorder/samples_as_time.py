"""Recurrent layers without batch_first that get (samples, time, features), and so walk over samples as if over time.

The shapes alone cannot tell: a layer may walk over time while the model pools what several stations measured. So one of
two things must also show that the first dimension holds samples: a data loader that shuffles gives batches of this
size, or the model uses the layer's last state along the second dimension.
"""

from __future__ import annotations

import gc
import sys
from typing import NamedTuple

from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    dataloader,
    default_collate,
)

from cs_systems.analysis.comparison.loop_findings import SAMPLES_AS_TIME, SamplesAsTimeRow
from cs_systems.measure.recorder.graph_size import nodes_below
from cs_systems.measure.recorder.guard import as_guest
from cs_systems.measure.recorder.module_calls import CallObserver, SeenCall
from cs_systems.measure.recorder.observers import Period
from cs_systems.measure.recorder.stacks import own_lines, place_of
from cs_systems.measure.workloads._batches import tensors_in

SHUFFLING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
BY_LOADER, BY_STATE = "a shuffled data loader", "the last state along dimension 1"
LAST = (1 << 64) - 1  # index -1 as autograd keeps it


class _Walk(NamedTuple):
    """Call of a recurrent layer in this step, with the shape of its input: the steps that it walks over first."""

    call: SeenCall
    shape: tuple[int, int, int]
    place: str | None


class SamplesAsTime(CallObserver):
    """Observer of recurrent layers, of the models around them, and of what these return."""

    runs_operators = False

    def __init__(self) -> None:
        super().__init__()
        self.restart()

    def restart(self) -> None:
        self.kept = {}
        self._rows: dict[str, SamplesAsTimeRow] = {}
        self._steps = 0
        self.step_failed()

    def step_failed(self) -> None:
        self._open: list[_Walk] = []
        self._found: dict[str, SamplesAsTimeRow] = {}

    def begins(self, period: Period) -> None:
        self.step_failed()

    @as_guest
    def call_seen(self, call: SeenCall) -> None:
        if isinstance(call.module, nn.RNNBase):
            if (shape := walked(call)) is not None:
                line = own_lines(sys._getframe(1))[1]
                self._open.append(_Walk(call, shape, place_of(line) if line is not None else None))
        elif self._open:
            for walk in self._open:
                if walk.call.begin_s > call.begin_s and (how := shown_by(walk.call, walk.shape, call)) is not None:
                    self._find(walk, how)
        if call.is_outermost:
            self._open.clear()

    def _find(self, walk: _Walk, how: str) -> None:
        name, (samples, length, width) = walk.call.named(), walk.shape
        self._found[name] = {
            "module": name, "kind": type(walk.call.module).__name__, "samples": samples, "length": length,
            "width": width, "evidence": how, "steps": 1, "of_steps": 0, "place": walk.place,
        }  # fmt: skip

    @as_guest
    def step_seen(self, modules_s: float) -> None:
        self._steps += 1
        for name, row in self._found.items():
            row["steps"] += self._rows[name]["steps"] if name in self._rows else 0
            self._rows[name] = row
        self.step_failed()

    def end(self) -> None:
        for row in self._rows.values():
            row["of_steps"] = self._steps
        self.keep(SAMPLES_AS_TIME, [*self._rows.values()])


def walked(call: SeenCall) -> tuple[int, int, int] | None:
    """Return the shape of the input of a recurrent layer that walks over its first dimension; None if it may be time.

    A program that gives the layer its first state knows which dimension holds the samples.
    """
    positional, named = call.inputs
    inputs = positional[0] if positional else named.get("input")
    state = positional[1] if len(positional) > 1 else named.get("hx")
    if call.module.batch_first or state is not None or type(inputs) is not Tensor or inputs.dim() != 3:
        return None
    steps, others, width = inputs.shape
    return (steps, others, width) if min(steps, others) > 1 and steps != others else None


def shown_by(walk: SeenCall, shape: tuple[int, int, int], model: SeenCall) -> str | None:
    """Return what shows that a layer inside a model's call walks over samples; None if nothing does.

    The model gets as many samples as the layer takes steps, and returns a result for each of them, but none for the
    other dimension.
    """
    samples, length, _ = shape
    inputs, results = [*tensors_in(model.inputs)], [each for each in tensors_in(model.result) if each.dim()]
    if not inputs:
        return None
    first, *others = inputs
    if first.dim() not in (2, 3) or first.shape[0] != samples or length not in first.shape[1:]:
        return None
    if any(each.dim() and each.shape[0] != samples for each in others):
        return None
    if any(each.shape[0] != samples or length in each.shape[1:] for each in results):
        return None
    if not any(each.requires_grad for each in results):
        return None
    if samples in batch_sizes():
        return BY_LOADER
    is_kept = first.shape[1] == length
    return BY_STATE if is_kept and any(_takes_last(each, samples, length) for each in results) else None


def batch_sizes() -> set[int]:
    """Return the sizes of the batches of data loaders that are in use, and that shuffle and stack single samples."""
    every = (each for each in gc.get_objects() if issubclass(type(each), dataloader._BaseDataLoaderIter))
    stacking = (vars(each).get("_index_sampler") for each in every if vars(each).get("_collate_fn") is default_collate)
    return {
        each.batch_size for each in stacking if isinstance(each, BatchSampler) and isinstance(each.sampler, SHUFFLING)
    }


def _takes_last(result: Tensor, samples: int, length: int) -> bool:
    """Return whether a result is computed from the last of all states along the second dimension."""
    return any(
        node.name().startswith("SelectBackward")
        and node._saved_dim == 1
        and node._saved_index in (LAST, -1, length - 1)
        and tuple(node._saved_self_sym_sizes[:2]) == (samples, length)
        for node in nodes_below(result)
    )
