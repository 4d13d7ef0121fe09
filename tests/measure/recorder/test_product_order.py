"""Products of three matrices in the costlier order, and others that have no cheaper one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from cs_systems.analysis.comparison.loop_findings import PRODUCT_ORDERS
from cs_systems.measure.recorder.product_order import Order, Use, costly_orders
from tests.measure.recorder.test_training import recorded
from tests.measure.recorder.trainings import attention

ROWS, WIDTH = 96, 8  # of each matrix
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def matrices(*sizes: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(*sizes, ROWS, WIDTH, requires_grad=True) for _ in range(3)]


def orders(loss: Loss, *sizes: int) -> list[Order]:
    return [*costly_orders(loss(*matrices(*sizes)).square().mean(), may_read=True)]


def normalised(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = q @ k.transpose(-2, -1)
    return (weights @ v) / weights.sum(-1, keepdim=True)


def in_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bnm,bme->bne", torch.einsum("bnd,bmd->bnm", q, k), v)


def scaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((0.5 * (q @ k.transpose(-2, -1))) / ROWS) @ v


def with_a_temperature(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    temperature = torch.tensor(2.0, requires_grad=True)
    return (temperature * (q @ k.transpose(-2, -1)) / temperature) @ v


COSTLY: dict[str, Loss] = {
    "attention": lambda q, k, v: q @ k.transpose(-2, -1) @ v,
    "normalised": normalised,
    "einsum": in_einsum,
    "scaled": scaled,
    "temperature": with_a_temperature,
    "transposed": lambda q, k, v: (q @ k.transpose(-2, -1)).transpose(-2, -1) @ v,
    "right_factor": lambda q, k, v: v.transpose(-2, -1) @ (q @ k.transpose(-2, -1)),
    "values_for_all_batches": lambda q, k, v: q @ k.transpose(-2, -1) @ v[0],
    "keys_for_all_batches": lambda q, k, v: q @ k[0].t() @ v,
    "constant_values": lambda q, k, v: q @ k.transpose(-2, -1) @ v.detach(),
    "contiguous": lambda q, k, v: (q @ k.transpose(-2, -1)).transpose(0, 1).contiguous().transpose(0, 1) @ v,
}


@pytest.mark.parametrize("name", COSTLY)
def test_costlier_order_is_found(name: str) -> None:
    (order,) = orders(COSTLY[name], 2)
    (use,) = (each for each in order.uses if each.width)
    assert (order.inner, order.summed, use.width) == (WIDTH, ROWS, WIDTH)
    assert use.batches * use.rows == 2 * ROWS


def test_heads_of_an_attention_are_batches() -> None:
    (order,) = orders(normalised, 2, 3)
    assert (order.batches, order.rows, order.inner, order.summed) == (6, ROWS, WIDTH, ROWS)
    assert {*order.uses} == {Use(6, ROWS, WIDTH, True, False), Use(6, ROWS, 0, False, True)}


def low_rank(
    use: Callable[[Tensor, Tensor], Tensor], rank: int = 4, *, needs: bool = True
) -> Callable[[], list[Order]]:
    def found() -> list[Order]:
        torch.manual_seed(0)
        up, down = torch.randn(96, rank, requires_grad=True), torch.randn(rank, 80, requires_grad=True)
        inputs = torch.randn(64, 80, requires_grad=needs)
        return [*costly_orders(use(inputs.tanh(), up @ down).square().mean(), may_read=True)]

    return found


@pytest.mark.parametrize("needs", [True, False])
@pytest.mark.parametrize("bias", [torch.zeros(96), None])
def test_weight_made_of_two_factors_is_found(needs: bool, bias: Tensor | None) -> None:
    (order,) = low_rank(lambda inputs, weight: functional.linear(inputs, weight, bias), needs=needs)()
    assert (order.rows, order.inner, order.summed, order.uses[0].width) == (96, 4, 80, 64)


def test_weight_of_two_factors_used_twice_is_found() -> None:
    (order,) = low_rank(lambda inputs, weight: inputs[:32] @ weight.t() + inputs[32:] @ weight.t())()
    assert [use.width for use in order.uses] == [32, 32]


def test_matrix_times_a_vector_is_found() -> None:
    (order,) = low_rank(lambda inputs, weight: weight @ inputs[0])()
    assert order.uses[0].width == 1


def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1)).tril() @ v


def masked_by_a_product(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1) * torch.ones(ROWS, ROWS).tril()) @ v


def decayed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    at = torch.arange(ROWS)
    return (q @ k.transpose(-2, -1) * 0.9 ** (at[:, None] - at).abs()) @ v


def with_bias(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.addmm(torch.zeros(ROWS, requires_grad=True), q[0], k[0].t()) @ v[0]


def heads_merged(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    # sums over heads and columns at once
    mixed = (q @ k.transpose(-2, -1)).transpose(0, 1).reshape(ROWS, 2 * ROWS)
    return mixed @ v.reshape(2 * ROWS, WIDTH)


def other_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1)).reshape(2, ROWS * 2, ROWS // 2) @ v[:, : ROWS // 2]


SOUND: dict[str, Loss] = {
    "other_order": lambda q, k, v: q @ (k.transpose(-2, -1) @ v),
    "softmax": lambda q, k, v: (q @ k.transpose(-2, -1)).softmax(-1) @ v,
    "masked": masked,
    "masked_by_a_product": masked_by_a_product,
    "decayed": decayed,
    "gated_rows": lambda q, k, v: (q @ k.transpose(-2, -1) * v[..., :1]) @ v,
    "dropout": lambda q, k, v: functional.dropout(q @ k.transpose(-2, -1), 0.1) @ v,
    "squared_relu": lambda q, k, v: (q @ k.transpose(-2, -1)).relu().square() @ v,
    "normalised_by_its_size": lambda q, k, v: functional.normalize(q @ k.transpose(-2, -1), dim=-1) @ v,
    "added_position": lambda q, k, v: (q @ k.transpose(-2, -1) + torch.eye(ROWS)) @ v,
    "bias": with_bias,
    "heads_merged": heads_merged,
    "other_rows": other_rows,
    "part_of_the_rows": lambda q, k, v: (q @ k.transpose(-2, -1))[:, :, : ROWS // 2] @ v[:, : ROWS // 2],
    "used_by_a_penalty": lambda q, k, v: ((w := q @ k.transpose(-2, -1)) @ v).sum() + w.abs().mean(),
    "sum_of_all": lambda q, k, v: ((w := q @ k.transpose(-2, -1)) @ v).sum() + w.sum(),
    "matrix_is_the_loss": lambda q, k, v: q @ k.transpose(-2, -1),
    "sums_alone": lambda q, k, v: (q @ k.transpose(-2, -1)).sum(-1),
    "times_itself": lambda q, k, v: (w := q @ k.transpose(-2, -1)) @ w,
    "few_rows": lambda q, k, v: q[:, :4] @ k.transpose(-2, -1) @ v,
    "exponent": lambda q, k, v: (q @ k.transpose(-2, -1)).exp() @ v,
    "divides_a_number": lambda q, k, v: (1 / (q @ k.transpose(-2, -1))) @ v,
}


@pytest.mark.parametrize("name", SOUND)
def test_product_without_a_cheaper_order_is_left_out(name: str) -> None:
    assert orders(SOUND[name], 2) == []


def test_matrix_that_is_a_root_itself_is_left_out() -> None:
    q, k, v = matrices(2)
    weights = q @ k.transpose(-2, -1)
    assert [*costly_orders([weights, weights @ v])] == []
    assert [*costly_orders([(weights @ v).sum()])]


def test_low_rank_adapters_are_left_out() -> None:
    def added(inputs: Tensor, update: Tensor) -> Tensor:
        return functional.linear(inputs, torch.ones(96, 80) + update)

    assert low_rank(added)() == []
    q, k, v = matrices(1)
    assert [*costly_orders(((q[0].tanh() @ k[0, :8]) @ v[0, :8].t()).sum())] == []


def test_layers_in_a_row_are_left_out() -> None:
    layers = nn.Sequential(nn.Linear(16, 128, bias=False), nn.Linear(128, 16, bias=False))
    assert [*costly_orders(layers(torch.randn(512, 16)).sum())] == []


def test_small_matrices_are_left_out() -> None:
    q, k, v = (torch.randn(60, 4, requires_grad=True) for _ in range(3))
    assert [*costly_orders((q @ k.t() @ v).sum())] == []


def test_half_of_the_arithmetic_is_needed() -> None:
    def shares(rows: int, width: int) -> list[Order]:
        q, k, v = (torch.randn(rows, width, requires_grad=True) for _ in range(3))
        return [*costly_orders((q @ k.t() @ v).sum())]

    assert shares(96, 50) == []
    (order,) = shares(96, 48)
    now, other = order.flops()
    assert now == 6 * 96 * 96 * 48
    assert other == 6 * 96 * 48 * 48


def test_kept_tensor_is_not_read_unless_allowed() -> None:
    assert [*costly_orders(scaled(*matrices(2)).sum())] == []
    unpacked = list[Tensor]()

    def unpack(kept: Tensor) -> Tensor:
        unpacked.append(kept)
        return kept

    with saved_tensors_hooks(lambda kept: kept, unpack):
        loss = scaled(*matrices(2)).sum()
    assert [*costly_orders(loss)] == []
    assert unpacked == []


def test_time_that_the_other_order_saves_is_measured(tmp_path: Path) -> None:
    recorder = recorded(tmp_path, attention(normalised, 384))
    (row,) = PRODUCT_ORDERS.of(recorder.records[0].results)
    assert (row["batches"], row["rows"], row["inner"], row["summed"], row["width"]) == (2, 384, 8, 384, 8)
    assert (row["products"], row["steps"]) == (1, 3)
    assert 0 < 2 * row["other_s"] < row["time_s"]


@pytest.mark.parametrize("use", [SOUND["softmax"], SOUND["other_order"]])
def test_other_attention_has_no_row(use: Loss, tmp_path: Path) -> None:
    assert "product_orders" not in recorded(tmp_path, attention(use)).records[0].results


def test_checkpointed_product_is_not_computed_again(tmp_path: Path) -> None:
    calls = list[int]()

    def counted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        calls.append(1)
        return scaled(q, k, v)

    def use(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result: Tensor = checkpoint(counted, q, k, v, use_reentrant=False)
        return result

    steps = 40
    assert "product_orders" not in recorded(tmp_path, attention(use, 96), steps).records[0].results
    assert len(calls) == 2 * steps
