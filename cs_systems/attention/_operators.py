"""Custom torch operators for the two passes of a FlashAttention: a compiled model keeps one graph around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def operators(name: str, forward: Callable[..., Any], backward: Callable[..., Any]) -> tuple[Any, Any]:
    """Register `cs_systems::NAME_forward` and `cs_systems::NAME_backward`, with fake versions for a compiler.

    forward: (q, k, v, causal, offset, scale) → the output, laid out as q, and the log-sum-exp (..., seq_q), float32.
    backward: (q, k, v, o, lse, do, causal, offset, scale) → the gradients of q, k and v, each laid out as its tensor.
    """

    @torch.library.custom_op(f"cs_systems::{name}_forward", mutates_args=())
    def forward_op(q: Tensor, k: Tensor, v: Tensor, causal: bool, offset: int, scale: float) -> tuple[Tensor, Tensor]:
        return forward(q, k, v, causal, offset, scale)  # type: ignore[no-any-return]

    @forward_op.register_fake
    def _(q: Tensor, k: Tensor, v: Tensor, causal: bool, offset: int, scale: float) -> tuple[Tensor, Tensor]:
        return torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)

    @torch.library.custom_op(f"cs_systems::{name}_backward", mutates_args=())
    def backward_op(
        q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, causal: bool, offset: int, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        return backward(q, k, v, o, lse, do, causal, offset, scale)  # type: ignore[no-any-return]

    @backward_op.register_fake
    def _(
        q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, causal: bool, offset: int, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    return forward_op, backward_op
