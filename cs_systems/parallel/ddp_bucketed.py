"""Gradients in buckets, each sent as soon as backward has filled it (Li et al. 2020, sections 3.2.2 and 3.2.3).

2 Ψ (N−1)/N bytes, most of them behind the rest of backward; as many latencies as buckets; a copy of Ψ bytes. Buckets
hold parameters in reverse order of registration, which is about the order in which backward reaches them.
"""

from __future__ import annotations

from functools import partial

from torch import nn

from cs_systems.config import ConfigError
from cs_systems.parallel import ParallelStrategy
from cs_systems.parallel._data_parallel import DataParallel, by_size, finish_gradients
from cs_systems.parallel._mesh import data_group
from cs_systems.parallel_cost import averaging_bytes


def wrap(model: nn.Module, bucket_size_mb: float = 25.0, tp_degree: int = 1) -> DataParallel:
    """bucket_size_mb: the size that closes a bucket, in 2²⁰ bytes as in PyTorch's DDP."""
    if not bucket_size_mb > 0:
        raise ConfigError(f"bucket_size_mb is {bucket_size_mb}: it must be above 0")
    return DataParallel(
        model, partial(by_size, size_bytes=bucket_size_mb * 2**20), overlap=True, group=data_group(tp_degree)
    )


STRATEGY = ParallelStrategy(
    wrap=wrap, finish_gradients=finish_gradients, sent_bytes=averaging_bytes, options=("bucket_size_mb", "tp_degree")
)
