"""Selection of modules that compute in a lower dtype, and norms between them that keep their weights in fp32."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch
from torch import Tensor, nn

# On CUDA the first two raise an error if input and weights differ in dtype; on a CPU they do not. RMSNorm then loses
# its fused kernel and warns. BatchNorm accepts different dtypes everywhere.
OF_ONE_DTYPE = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def casts(module: nn.Module) -> bool:
    """Return whether the module computes in the compute dtype: it has a weight of several dimensions and is not a norm.

    That is true of linear layers, embeddings, convolutions, experts and recurrent layers.
    """
    return not isinstance(module, OF_ONE_DTYPE) and any(p.ndim > 1 for p in module.parameters(recurse=False))


def take_any_dtype(module: nn.Module, cast: Set[nn.Parameter]) -> None:
    """Make the norms in `module` accept inputs of any dtype on any device.

    They compute in the dtype of their weights and return the dtype of their input.

    cast: the weights in the compute dtype.
    """
    for m in module.modules():
        own = next(m.parameters(recurse=False), None)
        if isinstance(m, OF_ONE_DTYPE) and own is not None and own not in cast:
            _take_any_dtype(m, own.dtype)


def _take_any_dtype(norm: nn.Module, dtype: torch.dtype) -> None:
    given: list[torch.dtype] = []  # dtype of the input in this call

    def widen(module: nn.Module, inputs: Any, options: Any) -> tuple[Any, Any] | None:
        given[:] = [x.dtype for x in (*inputs, *options.values()) if isinstance(x, Tensor)]
        return cast(dtype, inputs, options)

    def narrow(module: nn.Module, inputs: Any, output: Any) -> Any:
        return output.to(given[0]) if isinstance(output, Tensor) else output

    norm.register_forward_pre_hook(widen, with_kwargs=True)
    norm.register_forward_hook(narrow)


def cast(dtype: torch.dtype, inputs: Any, options: Any) -> tuple[Any, Any] | None:
    """Return the arguments with floating-point tensors cast to `dtype`, or None if they have it already.

    The result has the form that a forward pre-hook returns.
    """

    def is_other(x: Any) -> bool:
        return isinstance(x, Tensor) and x.dtype is not dtype and x.is_floating_point()

    if not any(map(is_other, [*inputs, *options.values()])):
        return None
    changed = {key: x.to(dtype) if is_other(x) else x for key, x in options.items()}
    return tuple(x.to(dtype) if is_other(x) else x for x in inputs), changed
