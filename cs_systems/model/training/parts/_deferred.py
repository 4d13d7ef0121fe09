"""Products with a backward that keeps the factors of the weight's gradient for an update, instead of computing it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cs_systems.model.training.triton_operators import operator

_kept: dict[int, tuple[Tensor, Tensor]] = {}
_numbers = itertools.count()


@dataclass(frozen=True)
class Place:
    """Place where the backward of one layer keeps its input and the gradient of its output.

    Attributes:
        token: a tensor of one element for this layer only. It gets an unused gradient when the layer's backward is
            done, so that a hook on it runs then.
        number: number of the layer, on the CPU.
    """

    token: Tensor
    number: Tensor

    @classmethod
    def of(cls, weight: Tensor) -> Place:
        token = torch.zeros(1, device=weight.device, dtype=weight.dtype, requires_grad=True)
        return cls(token, torch.tensor(next(_numbers)))

    def taken(self) -> tuple[Tensor, Tensor]:
        """Remove and return the kept tensors: the gradient of the output (tokens, out), and the input (tokens, in)."""
        self.token.grad = None
        d_out, x = _kept.pop(int(self.number))
        return d_out.flatten(0, -2), x.flatten(0, -2)


@operator("keep_for_update", "(Tensor d_out, Tensor x, Tensor number) -> Tensor", lambda d_out, *_: d_out.new_empty(1))
def keep(d_out: Tensor, x: Tensor, number: Tensor) -> Tensor:
    """Keep the factors of a weight's gradient, and return the gradient of its place's token.

    A compiled block must not write to these tensors afterwards: see `Part.keeps_buffers`.
    """
    _kept[int(number)] = d_out, x
    return d_out.new_empty(1)  # Inductor would drop an operator with an empty result


class Deferred(torch.autograd.Function):
    """Autograd function `apply(x, weight, token, number)`: x weightᵀ, with a gradient only for x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, token: Tensor, number: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, number)
        return nn.functional.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, number = ctx.saved_tensors
        (d_out,) = gradients
        return d_out @ weight, None, keep(d_out, x, number), None


def linear(x: Tensor, weight: Tensor, *, place: Place) -> Any:
    """Return x weightᵀ: (..., in) → (..., out)."""
    return Deferred.apply(x, weight, place.token, place.number)
