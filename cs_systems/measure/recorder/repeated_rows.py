"""Rows of tensors that an index looks up again and again, such as relative positions for each window.

The graph of backward shows the indices. Where all parts of an index along one of its dimensions are equal, the same
rows are looked up for each of them, and backward adds up the gradients of the copies one by one. Hooks at the operator
time this. The time of forward is measured after the last step.

Only a few warm-up steps on a CPU are observed. An index is not read if anything in the step packs the tensors that
autograd keeps: unpacking one may run forward again, as for torch.utils.checkpoint.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cs_systems.analysis.comparison.loop_findings import REPEATED_ROWS, RepeatedRowsRow
from cs_systems.measure.recorder.graph_size import nodes_below
from cs_systems.measure.recorder.operator_times import OperatorTimer
from cs_systems.measure.recorder.warmup_graphs import FEWEST_STEPS, WarmupGraphs

FEWEST_LOOKUPS = 1024  # of an index, in elements; fewer take no time
MOST_LOOKUPS = 64  # of a pass that are looked at, the largest first
FEWEST_ROUNDS, MOST_ROUNDS, ROUNDS_S = 2, 10, 0.05  # of a measured lookup; the fastest counts
_INDEX, _EMBEDDING = "IndexBackward", "EmbeddingBackward"


class Lookup(NamedTuple):
    """Index of a tensor with parts that are equal along some of its dimensions.

    copies: how often each part is there. parts: the shape of the index. result: the shape of what is looked up.
    """

    name: str | None  # of the tensor, if it is a parameter
    table: tuple[int, ...]
    result: tuple[int, ...]
    parts: tuple[int, ...]
    copies: int
    dtype: torch.dtype


class RepeatedRows(WarmupGraphs[Lookup]):
    """Observer of the indices in a few warm-up steps."""

    def restart(self) -> None:
        self._backward_s: list[dict[Lookup, float]] = []
        self._timers: list[tuple[Lookup, OperatorTimer]] = []
        self._indices: dict[Lookup, Sequence[Tensor | None]] = {}
        super().restart()

    def _start(self) -> None:
        super()._start()
        while self._timers:
            self._timers.pop()[1].remove()

    def _look(self, roots: Any) -> None:
        if self._may_read():
            for node, lookup, indices in self._lookups(roots):
                self._here[lookup] += 1
                self._timers.append((lookup, OperatorTimer(node)))
                self._indices.setdefault(lookup, [each if each is None else each.clone() for each in indices])

    def _step_ends(self) -> None:
        super()._step_ends()
        self._backward_s.append({each: self._timed_s(each) for each in self._here})

    def _timed_s(self, lookup: Lookup) -> float:
        return sum(timer.time_s for each, timer in self._timers if each == lookup)

    def _lookups(self, roots: Any) -> Iterator[tuple[Any, Lookup, Sequence[Tensor | None]]]:
        nodes = [node for node in nodes_below(roots) if node.name().startswith((_INDEX, _EMBEDDING))]
        for node in sorted(nodes, key=lambda each: -math.prod(each._input_metadata[0].shape))[:MOST_LOOKUPS]:
            result = node._input_metadata[0]
            if math.prod(result.shape) < FEWEST_LOOKUPS:
                return
            is_embedding = node.name().startswith(_EMBEDDING)
            if is_embedding and (node._saved_sparse or node._saved_scale_grad_by_freq):
                continue
            indices: Sequence[Tensor | None] = [node._saved_indices] if is_embedding else node._saved_indices
            copies, shape = _copies(indices)
            if copies > 1:
                width = tuple(result.shape)[-1:]
                rows = node._saved_weight_sym_argsize_0 if is_embedding else None
                table = (rows, *width) if rows is not None else tuple(node._saved_self_sym_sizes)
                of, sizes = self._name_of(node), tuple(result.shape)
                yield node, Lookup(of, table, sizes, shape, copies, result.dtype), indices

    def _name_of(self, node: Any) -> str | None:
        leaf = getattr(node.next_functions[0][0], "variable", None)
        return None if leaf is None else self._subject.name_of(leaf)

    def end(self) -> None:
        if len(self._steps) >= FEWEST_STEPS:
            in_each = [each for each in self._indices if all(step[each] for step in self._steps)]
            self.keep(REPEATED_ROWS, [self._row(each) for each in in_each])
        self._steps.clear()
        self._backward_s.clear()
        self._indices.clear()

    def _row(self, lookup: Lookup) -> RepeatedRowsRow:
        lookups = min(step[lookup] for step in self._steps)
        return {
            "tensor": lookup.name,
            "shape": _text(lookup.table),
            "index": _text(lookup.parts),
            "copies": lookup.copies,
            "lookups": lookups,
            "steps": len(self._steps),
            "forward_s": lookups * _fastest_s(lookup, self._indices[lookup]),
            "backward_s": median(each[lookup] for each in self._backward_s),
        }


def _copies(indices: Sequence[Tensor | None]) -> tuple[int, tuple[int, ...]]:
    """Return (how often each part of an index is there because it is equal along dimensions, the index's shape)."""
    known = [each for each in indices if each is not None]
    if not known or any(type(each) is not Tensor or each.dtype not in (torch.int64, torch.int32) for each in known):
        return 1, ()
    shape = torch.broadcast_shapes(*(each.shape for each in known))
    if 0 in shape:
        return 1, ()
    whole = [each.expand(shape) for each in known]
    same = (
        size
        for dim, size in enumerate(shape)
        if size > 1 and all(bool((each == each.narrow(dim, 0, 1)).all()) for each in whole)
    )
    return math.prod(same), tuple(shape)


def _fastest_s(lookup: Lookup, indices: Sequence[Tensor | None]) -> float:
    """Return the shortest of a few times of the lookup."""
    table, times_s = torch.zeros(lookup.table, dtype=lookup.dtype), list[float]()
    while len(times_s) < FEWEST_ROUNDS or (len(times_s) < MOST_ROUNDS and sum(times_s) < ROUNDS_S):
        begin_s = time.perf_counter()
        torch.ops.aten.index(table, indices)
        times_s.append(time.perf_counter() - begin_s)
    return min(times_s)


def _text(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape))
