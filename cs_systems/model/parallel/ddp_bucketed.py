"""Gradients in buckets, each sent as soon as backward has filled it (Li et al. 2020, sections 3.2.2 and 3.2.3).

Each rank sends 2 Ψ (N−1)/N bytes, most of them overlapped with the rest of backward, with one latency per bucket. A
bucket is a group of tensors that NCCL takes in one launch, in place, without copies. Buckets hold parameters in reverse
order of registration, which is about the order in which backward reaches them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from cs_systems.formulas.communication import averaging_bytes
from cs_systems.model.parallel import ParallelStrategy
from cs_systems.model.parallel._collectives import communicator, dtype_of
from cs_systems.model.parallel._data_parallel import DataParallel, by_size, finish_gradients
from cs_systems.model.parallel._mesh import data_group
from cs_systems.model.parallel._narrowed import NarrowedDataParallel


def wrap(
    model: nn.Module,
    bucket_size_mb: float = 100.0,
    comm_dtype: str | torch.dtype | None = None,
    max_ctas: int | None = None,
    high_priority: bool = False,
    tp_degree: int = 1,
    send_thread: bool = True,
    last_bucket_mb: float | None = None,
) -> DataParallel:
    """Return the model wrapped in DataParallel with these buckets.

    bucket_size_mb: the size that closes a bucket, in 2²⁰ bytes as in PyTorch's DDP.
    last_bucket_mb: the size of the last bucket, which is sent without overlap. Each bucket may be twice as large as the
        next one. None for the size of the others.
    comm_dtype: bf16 or fp16, in which the gradients are sent; None for their own dtype.
    max_ctas, high_priority: as in `communicator`.
    send_thread: as in `DataParallel`; not with tp, which sends during backward too.
    """
    last_bytes = None if last_bucket_mb is None else last_bucket_mb * 2**20
    buckets = partial(by_size, size_bytes=bucket_size_mb * 2**20, last_bytes=last_bytes)
    group = communicator(data_group(tp_degree), max_ctas, high_priority)
    options: dict[str, Any] = {"overlap": True, "group": group, "send_thread": send_thread and tp_degree == 1}
    if (dtype := dtype_of("comm_dtype", comm_dtype)) is None:
        return DataParallel(model, buckets, **options)
    return NarrowedDataParallel(model, buckets, **options, dtype=dtype)


STRATEGY = ParallelStrategy(
    overlaps=True,
    wrap=wrap,
    finish_gradients=finish_gradients,
    sent_bytes=averaging_bytes,
    options={
        "bucket_size_mb": "size",
        "last_bucket_mb": "size",
        "comm_dtype": ("bf16", "fp16"),
        "max_ctas": "count for NCCL",
        "high_priority": "flag for NCCL",
        "tp_degree": "count",
        "send_thread": "flag",
    },
    compared=4,
)
