# mypy: allow-untyped-defs, allow-incomplete-defs
"""Cross-entropy in Triton: a row of logits becomes its loss and, in place, its gradient. Importing it needs triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

LARGEST_SINGLE_BLOCK, BLOCK_OF_LONG_ROWS = 16384, 8192  # fastest of 4096 to 65536 on one H200
SCALED_BLOCK, SCALING_PROGRAMS = 2048, 2112  # 16 programs for each multiprocessor of an H200


@triton.jit
def cross_entropy_kernel(
    logits, row_stride, targets, losses, count, scale, BLOCK: tl.constexpr, HAS_ONE_BLOCK: tl.constexpr
):
    """Replace one row of logits (rows, count) by scale · (softmax − one-hot), and write its loss.

    The grid is (rows,). A row of one block is read once; for a longer row, the second pass reads from the L2 cache.
    """
    row = tl.program_id(0)
    logits += row.to(tl.int64) * row_stride
    target = tl.load(targets + row)
    target_logit = tl.load(logits + target).to(tl.float32)
    columns = tl.arange(0, BLOCK)
    if HAS_ONE_BLOCK:
        x = tl.load(logits + columns, mask=columns < count, other=float("-inf")).to(tl.float32)
        top = tl.max(x, 0)
        weights = tl.exp(x - top)
        total = tl.sum(weights, 0)
    else:
        top, total = float("-inf"), 0.0
        for start in range(0, count, BLOCK):
            i = start + columns
            x = tl.load(logits + i, mask=i < count, other=float("-inf")).to(tl.float32)
            largest = tl.maximum(top, tl.max(x, 0))
            total = total * tl.exp(top - largest) + tl.sum(tl.exp(x - largest), 0)
            top = largest
    tl.store(losses + row, top + tl.log(total) - target_logit)
    tl.debug_barrier()  # read the target's logit before another thread overwrites it
    factor = scale / total
    if HAS_ONE_BLOCK:
        gradient = weights * factor - tl.where(columns == target, scale, 0.0)
        tl.store(logits + columns, gradient.to(logits.dtype.element_ty), mask=columns < count)
    else:
        for start in range(0, count, BLOCK):
            i = start + columns
            x = tl.load(logits + i, mask=i < count, other=float("-inf")).to(tl.float32)
            gradient = tl.exp(x - top) * factor - tl.where(i == target, scale, 0.0)
            tl.store(logits + i, gradient.to(logits.dtype.element_ty), mask=i < count)


@triton.jit
def multiply_kernel(x, factor, count, BLOCK: tl.constexpr):
    """Multiply the elements of x (count,) by a factor in memory; if that is 1, read nothing else."""
    value = tl.load(factor).to(tl.float32)
    if value != 1.0:
        for start in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
            i = start + tl.arange(0, BLOCK)
            product = tl.load(x + i, mask=i < count).to(tl.float32) * value
            tl.store(x + i, product.to(x.dtype.element_ty), mask=i < count)


def gradient_in_place(logits: Tensor, targets: Tensor, losses: Tensor, scale: float) -> None:
    """Replace logits (rows, V) by the gradient of scale · Σ loss; write losses (rows,), float32. One launch."""
    count = logits.shape[1]
    has_one_block = count <= LARGEST_SINGLE_BLOCK
    block = triton.next_power_of_2(count) if has_one_block else BLOCK_OF_LONG_ROWS
    cross_entropy_kernel[(len(logits),)](
        logits,
        logits.stride(0),
        targets,
        losses,
        count,
        scale,
        BLOCK=block,
        HAS_ONE_BLOCK=has_one_block,
        num_warps=16 if block > 4096 else 4,
    )


def multiply_in_place(x: Tensor, factor: Tensor) -> None:
    """Multiply a contiguous x by a scalar on the device, in float32; a factor of 1 costs only a launch."""
    programs = min(SCALING_PROGRAMS, triton.cdiv(x.numel(), SCALED_BLOCK))
    multiply_kernel[(max(1, programs),)](x, factor, x.numel(), BLOCK=SCALED_BLOCK)
