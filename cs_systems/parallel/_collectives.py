"""The collectives of our own strategies, started here and nowhere else, so that what they send can be counted.

Bytes sent by a rank, of n bytes in the whole tensor and N ranks in a ring (Patarasuk & Yuan 2009, which is optimal):
all-reduce 2 n (N−1)/N; reduce-scatter and all-gather n (N−1)/N; broadcast n (N−1)/N in the mean over the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Call:
    """One collective: its name and the bytes of the whole tensor, on all ranks together."""

    collective: str
    whole_bytes: int

    def sent_bytes(self, world_size: int) -> float:
        share = (world_size - 1) / world_size * self.whole_bytes
        return 2 * share if self.collective == "all_reduce" else share


_listeners: list[list[Call]] = []


@contextmanager
def counting() -> Iterator[list[Call]]:
    """The collectives that this rank starts inside, in order."""
    calls: list[Call] = []
    _listeners.append(calls)
    try:
        yield calls
    finally:
        _listeners.remove(calls)


def _note(collective: str, whole_bytes: int) -> None:
    for calls in _listeners:
        calls.append(Call(collective, whole_bytes))


def average(flat: Tensor) -> Any:
    """Start the mean of `flat` over the ranks, in place; the handle's `wait()` ends it.

    NCCL divides as it sums. Elsewhere we divide before: fp16 would overflow in a sum that is divided afterwards.
    """
    _note("all_reduce", flat.nbytes)
    return dist.all_reduce(flat, _divided(flat), async_op=True)


def average_shard(flat: Tensor, shard: Tensor) -> Any:
    """Start the mean of `flat` over the ranks, of which this rank gets its N-th part in `shard`; `flat` is used up."""
    _note("reduce_scatter", flat.nbytes)
    return dist.reduce_scatter_tensor(shard, flat, _divided(flat), async_op=True)


def gather_shards(flat: Tensor, shard: Tensor) -> Any:
    """Start to fill `flat` with the shards of all ranks, one after the other; `shard` may be this rank's part of it."""
    _note("all_gather", flat.nbytes)
    return dist.all_gather_into_tensor(flat, shard, async_op=True)


def _divided(flat: Tensor) -> Any:
    """The operation after which the sum of what `flat` holds now is a mean."""
    if dist.get_backend() == "nccl":
        return dist.ReduceOp.AVG
    flat.div_(dist.get_world_size())
    return dist.ReduceOp.SUM


def maximum(flat: Tensor) -> Any:
    """Start the element-wise maximum of `flat` over the ranks, in place."""
    _note("all_reduce", flat.nbytes)
    return dist.all_reduce(flat, dist.ReduceOp.MAX, async_op=True)


def broadcast(tensor: Tensor, source: int) -> Any:
    """Start to overwrite `tensor` (contiguous) with that of rank `source`."""
    _note("broadcast", tensor.nbytes)
    return dist.broadcast(tensor, source, async_op=True)
