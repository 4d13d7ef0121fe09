"""Autograd functions at a low host cost: torch's own Python takes half of the time of a small call."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import unwrap_if_dead
from torch.autograd.function import Function, once_differentiable


def applied(function: type[Function]) -> Callable[..., Any]:
    """Return `function.apply` for three tensors and options, without its steps for other arguments.

    torch's own method looks at the signature and at every argument. While torch.compile traces, and inside functorch's
    transforms, it is called.
    """
    direct = super(Function, function).apply  # type: ignore[misc]

    def apply(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Any:
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return function.apply(q, k, v, *options)
        return direct(unwrap_if_dead(q), unwrap_if_dead(k), unwrap_if_dead(v), *options)

    return apply


def without_second_derivative(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return `once_differentiable(backward)`, which takes its detour only where a graph of gradients is recorded."""
    recorded = once_differentiable(backward)

    @wraps(backward)
    def run(ctx: Any, gradient: Tensor) -> Any:
        return recorded(ctx, gradient) if torch.is_grad_enabled() else backward(ctx, gradient)

    return run
