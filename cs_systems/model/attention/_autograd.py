"""Autograd functions with less host overhead: torch's own Python code takes half of the time of a small call."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import unwrap_if_dead
from torch.autograd.function import Function, once_differentiable


def applied(function: type[Function]) -> Callable[..., Any]:
    """Return a faster `function.apply` for three tensors and options.

    torch's own method inspects the signature and every argument. Here that method is called only while torch.compile
    traces, and inside functorch's transforms.
    """
    direct = super(Function, function).apply  # type: ignore[misc]

    def apply(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Any:
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return function.apply(q, k, v, *options)
        return direct(unwrap_if_dead(q), unwrap_if_dead(k), unwrap_if_dead(v), *options)

    return apply


def without_second_derivative(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return `once_differentiable(backward)` that calls backward directly unless a graph of gradients is recorded."""
    recorded = once_differentiable(backward)

    @wraps(backward)
    def run(ctx: Any, gradient: Tensor) -> Any:
        return recorded(ctx, gradient) if torch.is_grad_enabled() else backward(ctx, gradient)

    return run
