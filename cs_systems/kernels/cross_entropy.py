# mypy: allow-untyped-defs, allow-incomplete-defs
"""Cross-entropy in Triton: a row of logits becomes its loss and, in place, its gradient. Importing it needs triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

LARGEST_BLOCK = 16384


@triton.jit
def cross_entropy_kernel(logits, row_stride, targets, losses, count, scale, BLOCK: tl.constexpr):
    """Replace one row of logits (rows, count) by scale · (softmax − one-hot), and write its loss.

    The grid is (rows,). The second pass reads the row from the L2 cache.
    """
    row = tl.program_id(0)
    logits += row.to(tl.int64) * row_stride
    target = tl.load(targets + row)
    columns = tl.arange(0, BLOCK)
    largest, total = tl.full([BLOCK], float("-inf"), tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, count, BLOCK):
        i = start + columns
        x = tl.load(logits + i, mask=i < count, other=float("-inf")).to(tl.float32)
        new = tl.maximum(largest, x)
        shift = tl.where(new == float("-inf"), 0.0, new)  # a column past the end: -inf - -inf would be NaN
        total = total * tl.exp(largest - shift) + tl.exp(x - shift)
        largest = new
    top = tl.max(largest, 0)
    log_sum = top + tl.log(tl.sum(total * tl.exp(largest - top), 0))
    tl.store(losses + row, log_sum - tl.load(logits + target).to(tl.float32))
    tl.debug_barrier()  # the target's logit is read before another thread overwrites it
    for start in range(0, count, BLOCK):
        i = start + columns
        x = tl.load(logits + i, mask=i < count, other=float("-inf")).to(tl.float32)
        gradient = (tl.exp(x - log_sum) - tl.where(i == target, 1.0, 0.0)) * scale
        tl.store(logits + i, gradient.to(logits.dtype.element_ty), mask=i < count)


def gradient_in_place(logits: Tensor, targets: Tensor, losses: Tensor, scale: float) -> None:
    """Replace logits (rows, V) by the gradient of scale · Σ loss; write losses (rows,), float32. One launch."""
    count = logits.shape[1]
    block = min(LARGEST_BLOCK, triton.next_power_of_2(count))
    warps = 16 if block > 4096 else 4
    cross_entropy_kernel[(len(logits),)](
        logits, logits.stride(0), targets, losses, count, scale, BLOCK=block, num_warps=warps
    )
