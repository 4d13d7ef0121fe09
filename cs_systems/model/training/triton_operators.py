"""Triton kernels of the training step: prepared passes, and operators that a compiled model keeps in its graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from cs_systems.config import RunConfig
from cs_systems.model.kernels.prepared import PreparedPass


def operator(name: str, schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as the operator `cs_systems_parts::NAME`, which a compiled model calls.

    Outside of a compiler the function itself is called, with less host overhead. Selective checkpoints keep the results
    of the operators in `cs_systems`, which are attention's, and recompute these.

    Args:
        name: name of the operator.
        schema: its arguments and results, in the notation of torch's schemas.
        fake: returns empty tensors like the results, for a compiler.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        registered = torch.library.custom_op(f"cs_systems_parts::{name}", function, mutates_args=(), schema=schema)
        registered.register_fake(fake)

        @wraps(function)
        def call(*arguments: Any) -> Any:
            return registered(*arguments) if torch.compiler.is_compiling() else function(*arguments)

        return call

    return register


def prepared(
    launches: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    check: Callable[..., None],
    accepts: Callable[[Tensor], bool],
) -> PreparedPass:
    """Return the pass with the launches `MODULE.FUNCTION` of the Triton kernels, imported at first use."""
    module, _, function = launches.partition(".")

    def found(*arguments: Any) -> Any:
        return getattr(import_module(f"cs_systems.model.kernels.triton.{module}"), function)(*arguments)

    return PreparedPass(inputs, outputs, found, accepts, check)


def has_rows(x: Tensor) -> bool:
    """Return True if the rows of (..., width) have a single stride, and their elements are contiguous."""
    steps = all(x.stride(i) == x.shape[i + 1] * x.stride(i + 1) for i in range(x.ndim - 2))
    return steps and (x.stride(-1) == 1 or x.shape[-1] == 1)


def check_alike(*tensors: Tensor) -> None:
    """Raise ValueError unless the tensors are on one device and have one floating dtype."""
    first = tensors[0]
    check_one_device(*tensors)
    if any(x.dtype != first.dtype or not x.is_floating_point() for x in tensors):
        dtypes = ", ".join(str(x.dtype).removeprefix("torch.") for x in tensors)
        raise ValueError(f"the tensors of a fused kernel have dtypes {dtypes}; cast all of them to one floating dtype")


def check_one_device(*tensors: Tensor) -> None:
    for x in tensors:
        if x.device != tensors[0].device:
            raise ValueError(f"tensors are on {tensors[0].device} and {x.device}; move them to one device")


LEAVE_OUT = "leave the part out of parts"


def unavailable(config: RunConfig, instead: str = LEAVE_OUT) -> str | None:
    """Return the reason why Triton's kernels cannot run in a cell, with the remedy, or None."""
    if find_spec("triton") is None:
        return f"triton is not installed; run pip install triton (Linux), or {instead}"
    from cs_systems.model.kernels.triton.launch import INTERPRETED

    if INTERPRETED:
        return "TRITON_INTERPRET is set, so nothing would run on the GPU; unset it" if _on_gpu(config) else None
    if not _on_gpu(config):
        return f"Triton compiles no kernels for a CPU; {instead}, or set TRITON_INTERPRET=1 (slow)"
    if torch.cuda.is_available() and (capability := torch.cuda.get_device_capability()) < (8, 0):
        have = ".".join(map(str, capability))
        return f"compute capability 8.0 or newer is required, this GPU has {have}; {instead}"
    return None


def unavailable_on_gpu(config: RunConfig, instead: str = LEAVE_OUT) -> str | None:
    """Return the result of `unavailable` for a cell on a GPU; None on a CPU, where torch computes the part."""
    return unavailable(config, instead) if _on_gpu(config) else None


def _on_gpu(config: RunConfig) -> bool:
    return config.device.startswith("cuda") or (config.device == "auto" and torch.cuda.is_available())
