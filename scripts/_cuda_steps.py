"""The steps of the CUDA ladder as attention backends and workloads: `--attention scripts/_cuda_steps.py:padded`.

One head: (batch, heads, n, d) is a batch of batch × heads. Not causal, forward only; the output is always fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cs_systems.config import AttentionShape, ConfigError, RunConfig
from cs_systems.machine.device import Device
from cs_systems.model.kernels.cuda_steps.launch import (
    LEFT_OUT,
    STEPS,
    attend,
    attend_from_host,
    attend_reference,
    step_named,
)

COPIED = "tensor_cores"  # what computes between the copies


def _backend(function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    def call(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, **_: Any) -> Tensor:
        if causal:
            raise ConfigError(
                "the kernels of scripts/_cuda_steps.py have no causal mask; use them in workload attention with "
                "causal false"
            )
        flat = (tensor.flatten(0, 1).contiguous() for tensor in (q, k, v))
        return function(*flat).unflatten(0, q.shape[:2])

    return call


reference = _backend(attend_reference)
globals().update({name: _backend(partial(attend, name)) for name in (*STEPS, *LEFT_OUT)})


def _from_host(config: RunConfig, device: Device, streams: int) -> Callable[[], None]:
    if not device.is_cuda:
        raise ConfigError(
            f"one_stream and four_streams copy to a GPU, and the device is {device.torch}; use device cuda"
        )
    shape, dtype = config.shape or AttentionShape(), step_named(COPIED).dtype
    size = (shape.batch * shape.heads, shape.seq, shape.d_head)
    q, k, v = (torch.randn(size, dtype=dtype).pin_memory() for _ in range(3))
    out = torch.empty(size).pin_memory()
    return lambda: attend_from_host(COPIED, q, k, v, out, streams)


def one_stream(config: RunConfig, device: Device) -> Callable[[], None]:
    """Copy in, compute, copy out, batch after batch."""
    return _from_host(config, device, 1)


def four_streams(config: RunConfig, device: Device) -> Callable[[], None]:
    """The same with the batches on four streams in turn."""
    return _from_host(config, device, 4)
