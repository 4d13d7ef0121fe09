"""Custom torch operators for the two passes of a FlashAttention: a compiled model keeps one graph around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

OPTIONS = "bool causal, int offset, float scale"


def operators(
    name: str, forward: Callable[..., Any], backward: Callable[..., Any], options: str = OPTIONS
) -> tuple[Any, Any]:
    """Register `cs_systems::NAME_forward` and `cs_systems::NAME_backward`, with fake versions for a compiler.

    forward: (q, k, v, *options) → the output, with the layout of q, and the log-sum-exp (..., seq_q), float32.
    backward: (q, k, v, o, lse, do, *options) → the gradients of q, k and v, each with the layout of its tensor.
    options: their types and names, in the notation of torch's schemas.
    """
    inputs = "Tensor q, Tensor k, Tensor v"
    forward_op = torch.library.custom_op(
        f"cs_systems::{name}_forward", forward, mutates_args=(), schema=f"({inputs}, {options}) -> (Tensor, Tensor)"
    )
    backward_op = torch.library.custom_op(
        f"cs_systems::{name}_backward", backward, mutates_args=(),
        schema=f"({inputs}, Tensor o, Tensor lse, Tensor do, {options}) -> (Tensor, Tensor, Tensor)",
    )  # fmt: skip

    @forward_op.register_fake
    def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        return torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)

    @backward_op.register_fake
    def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    return forward_op, backward_op
