"""Tensor layout and order of work for the FlashAttention kernels on Hopper."""

from __future__ import annotations

import math

from torch import Tensor


def padded_d_head(d_head: int) -> int:
    return 64 if d_head <= 64 else 128 if d_head <= 128 else 256


def computed_d_head(d_head: int) -> int:
    """Return the number of columns that flash_cuda's products compute, out of `padded_d_head` in memory.

    Only its product for dq computes all of them.
    """
    return next((width for width in (80, 96) if 64 < d_head <= width), padded_d_head(d_head))


def takes_layout(tensor: Tensor) -> bool:
    """Return True if TMA can read the tensor: unit stride innermost, the others positive multiples of 16 bytes."""
    aligned = all(
        stride > 0 and stride * tensor.element_size() % 16 == 0
        for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
        if size > 1
    )
    return aligned and tensor.stride(-1) == 1 and tensor.data_ptr() % 16 == 0


def heads_together(q: Tensor, k: Tensor, causal: bool, l2_bytes: int) -> int:
    """Return the number of key heads, over all batches, that backward processes together so that queries fit l2_bytes.

    This evens out the lengths of causal blocks. The heads are divided into equal groups if possible, because a last
    group with few heads would have few, long blocks.
    """
    batch, heads, seq_q, d_head = q.shape
    batch_heads_kv, group = batch * k.shape[1], heads // k.shape[1]
    head_bytes = seq_q * padded_d_head(d_head) * (2 * q.element_size() + 4) * group
    if not causal or l2_bytes < head_bytes:
        return 1
    parts = math.ceil(batch_heads_kv / (l2_bytes // head_bytes))
    parts = next((n for n in range(parts, 2 * parts) if batch_heads_kv % n == 0), parts)
    return math.ceil(batch_heads_kv / parts)
