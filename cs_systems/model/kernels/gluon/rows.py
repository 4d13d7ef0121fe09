# mypy: allow-untyped-defs, allow-incomplete-defs
"""Kernels before and after the Gluon backward, in plain Triton: row sums, and dq out of float32."""

from __future__ import annotations

import triton
import triton.language as tl

ORDER = [[0, 1], [8, 0], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0], [16, 0], [32, 0], [0, 8], [0, 16], [0, 32]]
"""Memory order of a 64 x 64 tile of dq: the (row, column) step of each bit of an element's offset, lowest bit first.

The bits count 4 elements of a thread, then the threads of a warp, the warps, and the thread's next 4 elements.
"""


@triton.jit
def flash_prepare_kernel(
    o, do, lse, lse_log2, delta, summed, o_strides, do_strides, heads, seq_q, padded_q, blocks,
    D: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Compute delta = Σ o · do and lse_log2 = lse / ln 2, and set summed to 0.

    lse_log2 is +∞ where no key is seen, so that its weights are 0.
    """
    batch_head = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    batch, head = batch_head // heads, batch_head % heads
    rows = block * ROWS + tl.arange(0, ROWS)
    depth = tl.arange(0, DEPTH)
    valid = rows < seq_q
    mask = valid[:, None] & (depth < D)[None, :]
    row = rows.to(tl.int64)[:, None]
    at = batch * o_strides[0] + head * o_strides[1] + row * o_strides[2] + depth[None, :] * o_strides[3]
    out = tl.load(o + at, mask=mask, other=0.0).to(tl.float32)
    at = batch * do_strides[0] + head * do_strides[1] + row * do_strides[2] + depth[None, :] * do_strides[3]
    grad = tl.load(do + at, mask=mask, other=0.0).to(tl.float32)
    padded = batch_head * padded_q + rows
    tl.store(delta + padded, tl.sum(out * grad, 1))
    natural = tl.load(lse + batch_head * seq_q + rows, mask=valid, other=float("-inf"))
    tl.store(lse_log2 + padded, tl.where(natural == float("-inf"), float("inf"), natural * 1.4426950408889634))
    at = (batch_head * padded_q + block * ROWS) * DEPTH + tl.arange(0, ROWS * DEPTH)
    tl.store(summed + at, tl.zeros([ROWS * DEPTH], tl.float32))


@triton.jit
def flash_finish_kernel(
    summed, dq, dq_strides, heads, seq_q, padded_q, blocks, scale,
    D: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Compute dq = scale · summed, in dq's dtype and layout.

    Each 64 x 64 tile of `summed` is contiguous, in ORDER. The bits of an element's offset are, from the highest: 3 of
    the column, 2 of the row, 3 of the row, 2 of the column, 1 of the row, 1 of the column.
    """
    COLUMNS: tl.constexpr = DEPTH // 64
    column = tl.program_id(0) % COLUMNS
    block = tl.program_id(0) // COLUMNS % blocks
    batch_head = (tl.program_id(0) // COLUMNS // blocks).to(tl.int64)
    batch, head = batch_head // heads, batch_head % heads
    tile = (batch_head * (padded_q // ROWS) + block) * COLUMNS + column
    gradient = tl.load(summed + tile * (ROWS * 64) + tl.arange(0, ROWS * 64)) * scale
    gradient = tl.reshape(gradient, (8, 4, 8, 4, 2, 2)).permute(1, 4, 2, 0, 3, 5).reshape(ROWS, 64)
    rows = block * ROWS + tl.arange(0, ROWS)
    depth = column * 64 + tl.arange(0, 64)
    mask = (rows < seq_q)[:, None] & (depth < D)[None, :]
    at = batch * dq_strides[0] + head * dq_strides[1] + rows.to(tl.int64)[:, None] * dq_strides[2]
    tl.store(dq + at + depth[None, :] * dq_strides[3], gradient.to(dq.dtype.element_ty), mask=mask)
