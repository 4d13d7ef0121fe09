"""Tests of the faster autograd functions that bypass torch's own Python code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cs_systems.model.attention._autograd import applied, without_second_derivative


class Product(torch.autograd.Function):
    """q k v, times a factor."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.factor = factor
        return q * k * v * factor

    @staticmethod
    @without_second_derivative
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        scaled = gradient * ctx.factor
        return scaled * k * v, scaled * q * v, scaled * q * k, None


apply = applied(Product)


@pytest.fixture
def inputs() -> list[Tensor]:
    return [torch.randn(4, dtype=torch.float64, requires_grad=True) for _ in range(3)]


def test_output_and_gradients_equal_autograd_apply(inputs: list[Tensor]) -> None:
    assert torch.autograd.gradcheck(lambda *qkv: apply(*qkv, 3.0), inputs)
    assert torch.equal(apply(*inputs, 3.0), Product.apply(*inputs, 3.0))
    with torch.no_grad():
        assert not apply(*inputs, 3.0).requires_grad


def test_second_derivative_raises(inputs: list[Tensor]) -> None:
    gradient = torch.autograd.grad((apply(*inputs, 3.0) ** 2).sum(), inputs[0], create_graph=True)[0]
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.sum().backward()


def test_functorch_transform_raises_as_for_apply(inputs: list[Tensor]) -> None:
    with pytest.raises(RuntimeError, match="must override the setup_context"):
        torch.func.grad(lambda q: apply(q, *inputs[1:], 3.0).sum())(inputs[0])


def test_tensor_that_outlived_its_transform_is_unwrapped(inputs: list[Tensor]) -> None:
    kept: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x * 2)
        return x.sum()

    torch.func.grad(keep)(inputs[0])
    assert torch.equal(apply(kept[0], *inputs[1:], 3.0), 2 * inputs[0] * inputs[1] * inputs[2] * 3)
