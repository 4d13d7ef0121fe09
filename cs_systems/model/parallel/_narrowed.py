"""Gradient averaging in a narrower dtype than the gradients have, as PyTorch's `bf16_compress_hook` does.

For fp32 gradients in bf16 it sends half of the bytes, and adds two casts. Each rank's gradients are rounded, and so is
their mean: one more rounding per rank than in one process. On a GPU the casts run on separate streams, so that they
also overlap backward: one stream before the collective and one after it, because a cast that waits for its collective
must not delay the next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cs_systems.config import ConfigError
from cs_systems.model.parallel._data_parallel import DataParallel


@dataclass(frozen=True)
class _Handle:
    wait: Callable[[], Any]


class NarrowedDataParallel(DataParallel):
    """DataParallel that casts buckets to `dtype`, averages them, and casts them back into the gradients."""

    def __init__(self, *arguments: Any, dtype: torch.dtype, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if kind := next((p.dtype for p in self._params if p.is_complex()), None):
            raise ConfigError(f"comm_dtype does not support complex gradients, got {kind}; leave out comm_dtype")
        self._dtype = dtype
        on_gpu = self._device().type == "cuda"
        self._streams = (torch.cuda.Stream(self._device()), torch.cuda.Stream(self._device())) if on_gpu else None

    def _start(self, index: int, grads: list[Tensor]) -> tuple[Any, Any]:
        if self._streams is None:
            handle, flat, parts = self._narrow(index, grads)

            def widen() -> None:
                handle.wait()
                torch._foreach_copy_(grads, parts)

            return _Handle(widen), flat
        before, after = self._streams
        before.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(before):
            handle, flat, parts = self._narrow(index, grads)
        with torch.cuda.stream(after):
            handle.wait()
            torch._foreach_copy_(grads, parts)
        # keep the tensors until the stream that frees them has waited for the last stream that uses them
        return _Handle(lambda: torch.cuda.current_stream().wait_stream(after)), flat

    def _narrow(self, index: int, grads: list[Tensor]) -> tuple[Any, Tensor, list[Tensor]]:
        """Start averaging in `dtype`; return (handle, sent tensor, its parts in the shapes of the gradients)."""
        sizes = [grad.numel() for grad in grads]
        flat = torch.empty(sum(sizes), dtype=self._dtype, device=grads[0].device)
        parts = [part.view(grad.shape) for part, grad in zip(flat.split(sizes), grads, strict=True)]
        torch._foreach_copy_(parts, grads)
        return self._average[index]([flat]), flat, parts
