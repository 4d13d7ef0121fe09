"""Prepared passes of the training step's CUDA kernels for Hopper (product.cuh), and checks of their requirements."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cs_systems.config import RunConfig
from cs_systems.machine.device import resolve
from cs_systems.model.kernels.cuda.driver import missing
from cs_systems.model.kernels.cuda.launch_product import BLOCK
from cs_systems.model.kernels.prepared import Launches, PreparedPass
from cs_systems.model.training.triton_operators import has_rows


def product_pass(
    inputs: Sequence[str],
    outputs: Sequence[str],
    launches: Launches,
    check: Callable[..., None] = lambda *inputs: None,
) -> PreparedPass:
    """Return the pass of a kernel on matrices (rows, width).

    check: raises ValueError for inputs that this kernel rejects in addition to those that all reject.
    """

    def check_all(*tensors: Tensor) -> None:
        _check(*tensors)
        check(*tensors)

    return PreparedPass(inputs, outputs, launches, _accepted, check_all)


def _accepted(x: Tensor) -> bool:
    """Return True if TMA, the copy engine, can read the rows of a tensor."""
    return has_rows(x) and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0


def _check(*tensors: Tensor) -> None:
    if tensors[0].dtype is not torch.bfloat16:
        raise ValueError(
            f"the fused matrix products take bfloat16 tensors, got {tensors[0].dtype}; cast them to bfloat16"
        )
    for x in tensors:
        if x.ndim == 2 and x.shape[1] % BLOCK:
            raise ValueError(
                f"a tensor of shape {tuple(x.shape)} has a last dimension that is not a multiple of {BLOCK}; choose "
                f"d_model and d_ff as multiples of {BLOCK}"
            )


def products_unavailable(config: RunConfig, instead: str) -> str | None:
    """Return the reason why the kernels cannot run in a cell, with the remedy, or None."""
    if config.model.d_model % BLOCK or config.model.d_ff % BLOCK:
        sizes = f"d_model {config.model.d_model} and d_ff {config.model.d_ff}"
        return f"{sizes} must be multiples of {BLOCK}; use {instead}"
    device = resolve(config.device)
    if not device.is_cuda or torch.cuda.get_device_capability(device.torch) != (9, 0):
        return f"a Hopper GPU is required; use {instead}"
    return missing()
