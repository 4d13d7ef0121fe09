"""Products with a large constant matrix of which hardly any number differs from 0, such as a dense adjacency.

The graph below a backward pass shows the products, and which factors get no gradient. Such a factor is read, in a few
warm-up steps on a CPU, unless anything in the step packs the tensors that autograd keeps. It counts if it is the same
unchanged tensor in each step. Inputs of linear layers are left out, and matrices with at most one number per row and
per column, such as an identity or a permutation.

The products are timed after the last step, with the dense matrix and with a sparse one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cs_systems.analysis.comparison.loop_findings import SPARSE_FACTORS, SparseFactorRow
from cs_systems.measure.recorder.graph_size import is_weight_of_a_layer, nodes_below
from cs_systems.measure.recorder.operator_times import compared_s
from cs_systems.measure.recorder.warmup_graphs import WarmupGraphs

# Sparse products are faster from about this size on: at this share for other factors of 64 columns and more, at half
# of it for all. Both products are measured for each matrix.
MOST_SHARE, FEWEST_ELEMENTS = 0.02, 1 << 18
MOST_ELEMENTS = 1 << 26  # that are read
MOST_MATRICES = 8  # that are kept for the steps that are looked at
# Nodes by their names before "Backward", with the numbers of their factors and the names under which these are kept.
_FACTORS = {
    "Mm": ((0, "self"), (1, "mat2")),
    "Bmm": ((0, "self"), (1, "mat2")),
    "Addmm": ((1, "mat1"), (2, "mat2")),
    "Mv": ((0, "self"), (1, "vec")),
}
_Key = tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...], int]


class _Product(NamedTuple):
    """Product with a constant matrix. is_left: the matrix is the left factor. width: of the other one."""

    matrix: _Key
    is_left: bool
    width: int


class SparseFactors(WarmupGraphs[_Product]):
    """Observer of the constant factors of products in a few warm-up steps."""

    def restart(self) -> None:
        super().restart()
        self._sparse: dict[_Key, Tensor | None] = {}  # None for those with too many numbers that are not 0
        self._held: dict[_Key, Tensor] = {}  # while looking, so that no other tensor gets the same address

    def _start(self) -> None:
        super()._start()
        self._seen: set[int] = set()  # numbers of the products of this step; a graph may have several passes
        self._checked: set[_Key] = set()

    def _look(self, roots: Any) -> None:
        if self._may_read():
            self._here.update(self._products(roots))

    def stop_looking(self) -> None:
        super().stop_looking()
        self._held = {}

    def _products(self, roots: Any) -> Iterator[_Product]:
        for node in nodes_below(roots):
            name = node.name().partition("Backward")[0]
            if name not in _FACTORS:
                continue
            if node._sequence_nr() in self._seen:
                continue
            self._seen.add(node._sequence_nr())
            (left, of_left), (right, of_right) = _FACTORS[name]
            following = [each for each, _ in node.next_functions]
            is_left = following[left] is None
            if is_left == (following[right] is None) or (is_left and is_weight_of_a_layer(following[right])):
                continue
            matrix = _matrix(getattr(node, f"_saved_{of_left if is_left else of_right}"))
            if matrix is None or not self._is_sparse(key := _key(matrix), matrix):
                continue
            shape = node._input_metadata[0].shape
            yield _Product(key, is_left, math.prod(shape) // matrix.shape[0 if is_left else 1])

    def _is_sparse(self, key: _Key, matrix: Tensor) -> bool:
        """Return whether hardly any number of a matrix differs from 0; keep it, so that it is read once."""
        if key not in self._held:
            if len(self._held) >= MOST_MATRICES:
                return False
            self._held[key] = matrix
            self._sparse[key] = as_sparse(matrix)
        elif key not in self._checked and (known := self._sparse[key]) is not None and not _is_same(matrix, known):
            self._sparse[key] = None  # written without a new version, such as through NumPy
        self._checked.add(key)
        return self._sparse[key] is not None

    def end(self) -> None:
        products = [each for each in self._in_each_step() if self._sparse[each.matrix] is not None]
        matrices = dict.fromkeys(each.matrix for each in products)
        self.keep(SPARSE_FACTORS, [self._row(key, [p for p in products if p.matrix == key]) for key in matrices])
        self._steps.clear()
        self._sparse.clear()

    def _row(self, key: _Key, products: list[_Product]) -> SparseFactorRow:
        sparse = self._sparse[key]
        assert sparse is not None
        counts = {each: min(step[each] for step in self._steps) for each in products}
        times = {each: times_s(sparse, each.width, is_left=each.is_left) for each in products}
        return {
            "rows": sparse.shape[0],
            "columns": sparse.shape[1],
            "nonzeros": sparse._nnz(),
            "products": sum(counts.values()),
            "steps": len(self._steps),
            "time_s": sum(counts[each] * times[each][0] for each in products),
            "sparse_s": sum(counts[each] * times[each][1] for each in products),
        }


def _matrix(factor: Any) -> Tensor | None:
    """Return a large constant factor as a matrix; None for others, and for a batch of several matrices."""
    if type(factor) is not Tensor or factor.layout is not torch.strided or factor.requires_grad:
        return None
    if factor.dim() == 3 and (factor.shape[0] == 1 or factor.stride(0) == 0):
        factor = factor[0]
    is_large = factor.dim() == 2 and FEWEST_ELEMENTS <= factor.numel() <= MOST_ELEMENTS
    return factor if is_large and factor.dtype in (torch.float32, torch.float64) else None


def _key(matrix: Tensor) -> _Key:
    version = -1 if matrix.is_inference() else matrix._version
    return matrix.data_ptr(), matrix.dtype, tuple(matrix.shape), tuple(matrix.stride()), version


def _is_same(matrix: Tensor, known: Tensor) -> bool:
    """Return whether a matrix has the same numbers as when it was read."""
    rows, columns = known.indices()
    return int(matrix.count_nonzero()) == known._nnz() and torch.equal(matrix.detach()[rows, columns], known.values())


def as_sparse(matrix: Tensor) -> Tensor | None:
    """Return a matrix as a sparse tensor; None if too many numbers are not 0, or one in each row and column at most."""
    matrix = matrix.detach()
    some = matrix[:: max(1, len(matrix) // 16)]
    if int(some.count_nonzero()) > 4 * MOST_SHARE * some.numel():  # a quick look at dense ones
        return None
    rows, columns = matrix.count_nonzero(dim=1), matrix.count_nonzero(dim=0)
    count = int(rows.sum())
    if not count or count > MOST_SHARE * matrix.numel() or int(rows.max()) <= 1 >= int(columns.max()):
        return None
    return matrix.to_sparse().coalesce()


def times_s(sparse: Tensor, width: int, *, is_left: bool) -> tuple[float, float]:
    """Return the times of forward and backward of a product, with the dense matrix and with the sparse one."""
    dense = sparse.to_dense()
    other_way = sparse if is_left else sparse.t().coalesce()
    shape = (dense.shape[1], width) if is_left else (width, dense.shape[0])
    other = torch.full(shape, 0.5, dtype=dense.dtype, requires_grad=True)

    def by_sparse() -> list[Tensor]:
        product: Tensor = torch.sparse.mm(other_way, other if is_left else other.t())
        return [product if is_left else product.t()]

    return compared_s(lambda: [dense @ other if is_left else other @ dense], by_sparse, [other])
