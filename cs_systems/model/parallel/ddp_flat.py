"""One all-reduce of all gradients in one tensor, after backward (Li et al. 2020, section 3.2.2, without overlap).

Each rank sends 2 Ψ (N−1)/N bytes, all of them exposed, with the latency of one collective, and copies Ψ bytes. Each
dtype of parameters has its own tensor.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cs_systems.formulas.communication import averaging_bytes
from cs_systems.model.parallel import ParallelStrategy
from cs_systems.model.parallel._data_parallel import DataParallel, by_size, finish_gradients
from cs_systems.model.parallel._mesh import data_group


class OneTensor(DataParallel):
    """DataParallel that copies a bucket into one tensor; its gradients are views of that tensor from then on."""

    def _start(self, index: int, grads: list[Tensor]) -> tuple[Any, Tensor]:
        bucket, flat = self._buckets[index], torch.cat([grad.reshape(-1) for grad in grads])
        for p, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
            p.grad = part.view(p.shape)
        return self._average[index]([flat]), flat


def wrap(model: nn.Module, tp_degree: int = 1) -> DataParallel:
    return OneTensor(model, partial(by_size, size_bytes=math.inf), overlap=False, group=data_group(tp_degree))


STRATEGY = ParallelStrategy(
    wrap=wrap,
    finish_gradients=finish_gradients,
    sent_bytes=averaging_bytes,
    options={"tp_degree": "count"},
    gradient_copies=1.0,
    compared=2,
)
