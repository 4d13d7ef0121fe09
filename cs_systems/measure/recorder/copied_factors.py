"""Copies of one tensor that batched products multiply, such as the weights of capsules, stacked for each sample.

The graph below a backward pass shows them: a factor of a batched product is a stack, a concatenation or a repetition
of one and the same tensor along the first dimension, and nothing but views come after it. The broadcasting of matmul
copies, too. Copies that are changed, or that something else reads as well, are left out.

The product is timed after the last step with the copies, and as torch.einsum with the tensor itself.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cs_systems.analysis.comparison.loop_findings import COPIED_FACTORS, CopiedFactorRow
from cs_systems.measure.recorder.graph_size import MOST_NODES, nodes_below, operator_of, shape_of
from cs_systems.measure.recorder.operator_times import compared_s
from cs_systems.measure.recorder.warmup_graphs import WarmupGraphs

FEWEST_ELEMENTS, MOST_ELEMENTS = 1 << 16, 1 << 24  # of all copies; the latter also of the other factor and the result
_VIEWS = {"View", "UnsafeView", "ReshapeAlias", "Unsqueeze", "Squeeze"}  # keep the order of the elements
COPIES: Mapping[str, Callable[[Tensor, int], Tensor]] = {
    "stack": lambda x, count: torch.stack([x] * count),
    "cat": lambda x, count: torch.cat([x] * count),
    "repeat": lambda x, count: x.repeat(count, 1, 1),
    "expand": lambda x, count: x.expand(count, *x.shape).clone(),
}


class _Copies(NamedTuple):
    """Copies of a tensor: how they are made, their number, and the edge of the tensor."""

    how: str
    times: int
    source: tuple[Any, int]


class _Factor(NamedTuple):
    """Product of copies of a tensor of `matrices` by rows and columns with matrices of another width or height."""

    name: str | None
    how: str
    copies: int
    matrices: int
    rows: int
    columns: int
    other: int
    is_first: bool
    needs_other: bool
    dtype: torch.dtype


class CopiedFactors(WarmupGraphs[_Factor]):
    """Observer of the batched products below the backward passes of a few warm-up steps."""

    def _start(self) -> None:
        super()._start()
        self._seen: set[int] = set()  # numbers of the products of this step; a graph may have several passes

    def _look(self, roots: Any) -> None:
        nodes = nodes_below(roots)
        products = [each for each in nodes if operator_of(each) == "Bmm" and each._sequence_nr() not in self._seen]
        if not products or len(nodes) >= MOST_NODES:
            return
        self._seen |= {each._sequence_nr() for each in products}
        readers = Counter(below for node in nodes for below in {each for each, _ in node.next_functions if each})
        for node in products:
            if (found := self._factor(node, readers)) is not None:
                self._here[found] += 1

    def _factor(self, node: Any, readers: Mapping[Any, int]) -> _Factor | None:
        """Return a product of copies; None for one of other factors."""
        dtype = node._input_metadata[0].dtype
        if dtype not in (torch.float32, torch.float64):
            return None
        batch, rows, columns = shape_of(node)
        for place, edge in enumerate(node.next_functions):
            copies = None if edge[0] is None else _copies(edge, readers)
            if copies is None or batch % copies.times:
                continue
            _, first, second = _shape(edge)
            other = rows if place else columns
            sizes = (batch * first * second, batch * rows * columns, batch * other * (first if place else second))
            if sizes[0] < FEWEST_ELEMENTS or max(sizes) > MOST_ELEMENTS:
                continue
            leaf = getattr(copies.source[0], "variable", None)
            name = None if leaf is None else self._subject.name_of(leaf)
            needs_other = node.next_functions[1 - place][0] is not None
            of = (copies.how, copies.times, batch // copies.times, first, second, other)
            return _Factor(name, *of, not place, needs_other, dtype)
        return None

    def end(self) -> None:
        self.keep(COPIED_FACTORS, [self._row(each) for each in self._in_each_step()])
        self._steps.clear()

    def _row(self, factor: _Factor) -> CopiedFactorRow:
        products = min(step[factor] for step in self._steps)
        time_s, shared_s = _times_s(factor)
        size = factor.copies * factor.matrices * factor.rows * factor.columns
        return {
            "tensor": factor.name,
            "how": factor.how,
            "copies": factor.copies,
            "copied_bytes": size * factor.dtype.itemsize,
            "is_first": factor.is_first,
            "products": products,
            "steps": len(self._steps),
            "time_s": products * time_s,
            "shared_s": products * shared_s,
        }


def _shape(edge: tuple[Any, int]) -> tuple[int, ...]:
    return tuple(edge[0]._input_metadata[edge[1]].shape)


def _copies(edge: tuple[Any, int], readers: Mapping[Any, int]) -> _Copies | None:
    """Return the copies that a factor of a batched product consists of, one whole tensor after the other."""
    count, made, shape = 1, list[str](), _shape(edge)
    is_cloned = is_copied = False
    while (name := operator_of(edge[0])) is not None and readers[edge[0]] == 1:
        below = {*edge[0].next_functions}
        if len(below) != 1 or (before := next(iter(below)))[0] is None:
            break
        if name in ("Stack", "Cat"):
            if edge[0]._saved_dim != 0:
                break
            times = len(edge[0].next_functions)
        elif name in ("Repeat", "Expand"):
            if not _is_leading(edge[0], _shape(before)):
                break
            times = math.prod(_shape(edge)) // max(1, math.prod(_shape(before)))
        elif name in _VIEWS or name == "Clone":
            times = 1
        else:
            break
        is_cloned |= name == "Clone"
        if times > 1:
            made.append(name)
            is_copied |= name != "Expand" or is_cloned  # expand() after contiguous() makes no copies
        count, edge = count * times, before
    if count == 1 or not is_copied or math.prod(_shape(edge)) * count != math.prod(shape):
        return None
    how = next((each.lower() for each in made if each.lower() in COPIES), "expand")
    return _Copies(how, count, edge)


def _is_leading(node: Any, before: tuple[int, ...]) -> bool:
    """Return whether a tensor is repeated as a whole, and not each of its parts."""
    after = shape_of(node)
    padded = (1,) * (len(after) - len(before)) + before
    grown = [place for place, (now, then) in enumerate(zip(after, padded, strict=True)) if now != then]
    return all(padded[place] == 1 for place in range(max(grown, default=0)))


def _times_s(of: _Factor) -> tuple[float, float]:
    """Return the times of forward and backward with copies, and with the tensor itself."""
    shared = torch.full((of.matrices, of.rows, of.columns), 0.1, dtype=of.dtype, requires_grad=True)
    sides = (of.columns, of.other) if of.is_first else (of.other, of.rows)
    others = torch.full((of.copies, of.matrices, *sides), 0.1, dtype=of.dtype, requires_grad=of.needs_other)

    def with_copies() -> list[Tensor]:
        copies = COPIES[of.how](shared, of.copies).view(-1, of.rows, of.columns)
        flat = others.view(-1, *sides)
        return [torch.bmm(copies, flat) if of.is_first else torch.bmm(flat, copies)]

    def with_itself() -> list[Tensor]:
        product = "kij,nkjm->nkim" if of.is_first else "nkmi,kij->nkmj"
        return [torch.einsum(product, *((shared, others) if of.is_first else (others, shared))).contiguous()]

    return compared_s(with_copies, with_itself, [shared, others] if of.needs_other else [shared])
