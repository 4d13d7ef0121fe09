"""User's own attention, in the forms that students write, converted to the call of a backend.

`path.py:name` names a function with the arguments of a backend; a `torch.autograd.Function` with `apply(q, k, v,
is_causal)` on tensors (batch, seq, d_head); a function without arguments that returns one, such as
`get_flashattention_autograd_function_pytorch` of a course's adapters; or a function (q, k, v, mask), whose mask is True
where a query may see a key.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cs_systems.core import plugins
from cs_systems.core.validation import ConfigError
from cs_systems.model.attention import AttentionBackend

_MASKS = ("mask", "attn_mask", "attention_mask")


def as_backend(name: str, made: Any) -> Any:
    """Return a user's own object as a function with the arguments of a backend, if it has one of the forms.

    Anything else is returned unchanged. Raises ConfigError for a Function if its forward takes other arguments.
    """
    if isinstance(made, AttentionBackend) or not callable(made):
        return made
    if not isinstance(made, type) and plugins.signature(made) and not inspect.signature(made).parameters:
        made = made()
    if isinstance(made, type) and issubclass(made, torch.autograd.Function):
        if not plugins.takes(made.forward, None, *"qkv", False):
            raise ConfigError(
                f"{name} has forward{plugins.signature(made.forward)}; define forward(ctx, q, k, v, is_causal=False)"
            )
        return _of_function(name, made.apply)
    parameters = [*inspect.signature(made).parameters.values()] if plugins.signature(made) else []
    if len(parameters) > 3 and parameters[3].name in _MASKS and plugins.takes(made, *"qkv", None):
        return _of_masked(made)
    return made


def _of_function(name: str, apply: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def attend(
        q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None, align: str = "upper_left"
    ) -> Tensor:
        if scale is not None or (align == "lower_right" and q.shape[-2] != k.shape[-2]):
            raise ConfigError(f"{name} takes neither scale nor align; leave out both, or define a function that does")
        out = apply(*(x.flatten(0, -3) for x in (q, k, v)), causal)
        return out.view(*q.shape[:-1], v.shape[-1])

    return attend


def _of_masked(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    masks: dict[tuple[Any, ...], Tensor] = {}  # made once, because a model has one mask for all of its layers

    def attend(
        q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None, align: str = "upper_left"
    ) -> Tensor:
        if scale is not None:
            raise ConfigError("attention (q, k, v, mask) takes no scale; define a function with the argument scale")
        if not causal:
            return function(q, k, v, None)
        rows, columns = q.shape[-2], k.shape[-2]
        key = (rows, columns, align, q.device)
        if key not in masks:
            diagonal = columns - rows if align == "lower_right" else 0
            masks[key] = torch.ones(rows, columns, dtype=torch.bool, device=q.device).tril(diagonal)
        return function(q, k, v, masks[key])

    return attend
