"""Constant matrices with hardly any number but 0 in products, and other matrices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from cs_systems.analysis.comparison.loop_findings import SPARSE_FACTORS, SparseFactorRow
from cs_systems.machine.device import resolve
from cs_systems.measure.recorder.observers import Period
from cs_systems.measure.recorder.sparse_factors import SparseFactors, as_sparse
from cs_systems.measure.recorder.subject import Subject
from tests.measure.recorder.test_training import recorded
from tests.measure.recorder.trainings import adjacency, over_a_graph

NODES = 512
Loss = Callable[[Tensor, Tensor], Tensor]


def rows(loss: Callable[[int], Tensor], steps: int = 3) -> list[SparseFactorRow]:
    """Return what the observer finds in some steps; the number of the step gives the loss."""
    observer = SparseFactors(Subject("loop", resolve("cpu"), [], [], None, 1), lambda: 0)
    observer.begins(Period.WARMUP)
    try:
        for number in range(steps):
            root = loss(number)
            observer.look_before_backward(root)
            root.backward()
            observer.look_after_step()
    finally:
        observer.stop_looking()
    observer.end()
    return [*SPARSE_FACTORS.of(observer.kept)]


def of_matrix(use: Loss, matrix: Tensor | None = None, *, width: int = 16) -> Callable[[int], Tensor]:
    matrix = adjacency(NODES) if matrix is None else matrix
    torch.manual_seed(0)
    inputs = torch.randn(len(matrix), width, requires_grad=True)
    return lambda _: use(matrix, inputs.tanh()).square().mean()


USES: dict[str, Loss] = {
    "left": lambda matrix, x: matrix @ x,
    "right": lambda matrix, x: x.t() @ matrix,
    "transposed": lambda matrix, x: matrix.t() @ x,
    "of_a_batch": lambda matrix, x: matrix @ x.reshape(NODES, 4, -1).transpose(0, 1),
    "batch_of_one": lambda matrix, x: torch.bmm(matrix[None], x[None]),
    "einsum": lambda matrix, x: torch.einsum("nm,me->ne", matrix, x),
    "with_a_bias": lambda matrix, x: torch.addmm(torch.zeros(16), matrix, x),
}


@pytest.mark.parametrize("name", USES)
def test_product_with_a_matrix_of_zeros_is_found(name: str) -> None:
    matrix = adjacency(NODES)
    (row,) = rows(of_matrix(USES[name], matrix))
    assert (row["rows"], row["columns"], row["products"], row["steps"]) == (NODES, NODES, 1, 3)
    assert row["nonzeros"] == int(matrix.count_nonzero())
    assert row["time_s"] > 0
    assert row["sparse_s"] > 0


def test_products_of_one_matrix_are_one_row() -> None:
    (row,) = rows(of_matrix(lambda matrix, x: matrix @ (matrix @ x[:, :4]).tanh() + (matrix @ x)[:, :4]))
    assert row["products"] == 3


def test_product_with_the_rows_of_a_table_is_found() -> None:
    matrix, table = adjacency(NODES), nn.Embedding(NODES, 16)
    (row,) = rows(lambda _: (matrix @ table.weight).square().mean())
    assert row["products"] == 1


def written_in_place(matrix: Tensor) -> Callable[[int], Tensor]:
    inputs = torch.randn(NODES, 16, requires_grad=True)

    def loss(number: int) -> Tensor:
        matrix[0, number] += 1
        return (matrix @ inputs.tanh()).square().mean()

    return loss


def made_anew(matrix: Tensor) -> Callable[[int], Tensor]:
    inputs = torch.randn(NODES, 16, requires_grad=True)
    return lambda _: (matrix.clone() @ inputs.tanh()).square().mean()


def with_a_gradient(matrix: Tensor) -> Callable[[int], Tensor]:
    weight, inputs = nn.Parameter(matrix), torch.randn(NODES, 16, requires_grad=True)
    return lambda _: (weight @ inputs.tanh()).square().mean()


def activations(_: Tensor) -> Callable[[int], Tensor]:
    layer, other = nn.Linear(16, NODES), torch.randn(NODES, 16, requires_grad=True)
    return lambda _: ((layer(torch.randn(NODES, 16)) - 9).relu() @ other).mean()


def inputs_of_a_layer(matrix: Tensor) -> Callable[[int], Tensor]:
    layer = nn.Linear(NODES, 16)
    return lambda _: layer(matrix).square().mean()


def sparse_already(matrix: Tensor) -> Callable[[int], Tensor]:
    return of_matrix(lambda sparse, x: sparse @ x, matrix.to_sparse())


def masks(matrix: Tensor) -> Callable[[int], Tensor]:
    weight, inputs = torch.randn(NODES, NODES, requires_grad=True), torch.randn(NODES, 16, requires_grad=True)
    return lambda _: ((weight * matrix) @ inputs).square().mean()


def in_one_step(matrix: Tensor) -> Callable[[int], Tensor]:
    inputs = torch.randn(NODES, 16, requires_grad=True)
    return lambda number: (matrix @ inputs if number == 1 else 2 * inputs).square().mean()


@pytest.mark.parametrize(
    "loss",
    [written_in_place, made_anew, with_a_gradient, activations, inputs_of_a_layer, sparse_already, masks, in_one_step],
)
def test_other_factor_has_no_row(loss: Callable[[Tensor], Callable[[int], Tensor]]) -> None:
    assert rows(loss(adjacency(NODES))) == []


def diagonals(count: int) -> Tensor:
    return torch.stack([torch.eye(NODES).roll(shift, 1) for shift in range(count)]).sum(0)


@pytest.mark.parametrize(
    "matrix",
    [torch.eye(NODES), 3 * torch.eye(NODES), torch.eye(NODES)[torch.randperm(NODES)], torch.eye(NODES).roll(1, 0),
     torch.zeros(NODES, NODES), torch.ones(NODES, NODES).tril(), torch.randn(NODES, NODES), diagonals(11),
     torch.block_diag(*[torch.ones(16, 16)] * 32)],
)  # fmt: skip
def test_matrix_is_dense_or_has_one_number_in_each_row_and_column(matrix: Tensor) -> None:
    assert as_sparse(matrix) is None


@pytest.mark.parametrize("matrix", [diagonals(2), diagonals(10), torch.eye(NODES)[torch.arange(NODES) // 2]])
def test_matrix_with_few_numbers_is_sparse(matrix: Tensor) -> None:
    sparse = as_sparse(matrix)
    assert sparse is not None
    assert torch.equal(sparse.to_dense(), matrix)


def test_small_matrix_has_no_row() -> None:
    assert rows(of_matrix(USES["left"], adjacency(NODES)[:, : NODES - 1][: NODES - 1])) == []


def test_single_step_has_no_row() -> None:
    assert rows(of_matrix(USES["left"]), steps=1) == []


def test_matrix_is_not_read_while_tensors_are_packed() -> None:
    unpacked = list[Tensor]()
    loss = of_matrix(USES["left"])

    def unpack(kept: Tensor) -> Tensor:
        unpacked.append(kept)
        return kept

    def packed(number: int) -> Tensor:
        with saved_tensors_hooks(lambda kept: kept, unpack):
            return loss(number)

    observer = SparseFactors(Subject("loop", resolve("cpu"), [], [], None, 1), lambda: 0)
    observer.begins(Period.WARMUP)
    observer.look_before_backward(packed(0))
    observer.stop_looking()
    assert unpacked == []


def test_checkpointed_product_is_not_computed_again(tmp_path: Path) -> None:
    calls = list[int]()

    def product(matrix: Tensor, x: Tensor) -> Tensor:
        calls.append(1)
        return (matrix @ x).relu()

    step = over_a_graph(lambda matrix, x: checkpoint(product, matrix, x, use_reentrant=False))
    assert "sparse_factors" not in recorded(tmp_path, step, 40).records[0].results
    assert len(calls) == 80


def test_dense_adjacency_is_measured(tmp_path: Path) -> None:
    (row,) = SPARSE_FACTORS.of(recorded(tmp_path, over_a_graph(torch.matmul)).records[0].results)
    assert (row["products"], row["steps"]) == (1, 3)
    assert 0 < 2 * row["sparse_s"] < row["time_s"]


def test_dropout_of_a_matrix_has_no_row() -> None:
    assert rows(of_matrix(lambda matrix, x: functional.dropout(matrix, 0.5) @ x)) == []


def test_product_whose_graph_has_several_passes_is_counted_once() -> None:
    observer = SparseFactors(Subject("loop", resolve("cpu"), [], [], None, 1), lambda: 0)
    observer.begins(Period.WARMUP)
    loss = of_matrix(USES["left"])
    for number in range(3):
        root = loss(number)
        for _ in range(4):
            observer.look_before_backward(root)
            root.backward(retain_graph=True)
        observer.look_after_step()
    observer.stop_looking()
    observer.end()
    (row,) = SPARSE_FACTORS.of(observer.kept)
    assert row["products"] == 1


def test_matrix_that_is_written_through_numpy_is_not_constant() -> None:
    matrix = adjacency(NODES)
    loss = of_matrix(USES["left"], torch.from_numpy(matrix.numpy()))

    def changed(number: int) -> Tensor:
        matrix.numpy()[0, number] += 1.0
        return loss(number)

    assert rows(changed) == []
