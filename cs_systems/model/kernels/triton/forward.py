# mypy: allow-untyped-defs, allow-incomplete-defs
"""FlashAttention-2 forward (Dao 2023, algorithm 1) in Triton: a program has BLOCK_M queries, and loops over keys.

Scores are kept in units of log2, with the scale folded in, because the hardware's exponential is exp2. Key tiles that
every query of the tile sees need no mask and run in a separate loop; tiles that no query sees are skipped. With a
window, the tiles at its beginning need a mask too, and run in a third loop.
"""

import triton
import triton.language as tl

from cs_systems.model.kernels.triton.tiles import (
    key_range,
    load_tile,
    row_range,
    shifted,
    store_row,
    store_tile,
    visible_keys,
)

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _attend(
    acc, row_max, row_sum, q, queries, k, k_strides, v, v_strides, batch, head, begin, end, seq_k, offset, window,
    scale_log2, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the keys begin … end to the running softmax: acc (BLOCK_M, BLOCK_D), row_max and row_sum (BLOCK_M,)."""
    for start in range(begin, end, BLOCK_N):
        k_tile = load_tile(k, k_strides, batch, head, start, seq_k, BLOCK_N, D, BLOCK_D, MASKED)
        s = tl.dot(q, tl.trans(k_tile), input_precision="ieee")
        if MASKED:
            keys = (start + tl.arange(0, BLOCK_N))[None, :]
            visible = visible_keys(queries[:, None], keys, seq_k, offset, window, CAUSAL, WINDOWED)
            s = tl.where(visible, s * scale_log2, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(s, 1))
            # A query that has seen no key yet: -inf - -inf would be NaN.
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)
            p = tl.exp2(s - shift[:, None])
        else:
            new_max = tl.maximum(row_max, tl.max(s, 1) * scale_log2)
            shift = new_max
            p = tl.exp2(s * scale_log2 - shift[:, None])
        correction = tl.exp2(row_max - shift)
        row_sum = row_sum * correction + tl.sum(p, 1)
        row_max = new_max
        v_tile = load_tile(v, v_strides, batch, head, start, seq_k, BLOCK_N, D, BLOCK_D, MASKED)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * correction[:, None], input_precision="ieee")
    return acc, row_max, row_sum


@triton.jit
def flash_forward_kernel(
    q, q_strides, k, k_strides, v, v_strides, o, o_strides, lse, starts_q, starts_k, heads, group, seq_q,
    seq_k, total_q, offset, window, scale_log2,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr, NEGATE: tl.constexpr, PACKED: tl.constexpr, LOWER_RIGHT: tl.constexpr,
):  # fmt: skip
    """Compute o = softmax(scale q kᵀ) v and its log-sum-exp.

    The grid is (batch · heads, tiles of queries). NEGATE: scale < 0. PACKED: the sequences of the batch are packed one
    after the other, from the rows starts_q and starts_k on, and seq_q and seq_k are the largest lengths; lse is then
    (heads, total_q).
    """
    index = tl.program_id(0)
    batch, head = index // heads, index % heads
    # The last queries see most keys: start the longest programs first, so that short ones fill the end of the launch.
    start = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M
    queries = start + tl.arange(0, BLOCK_M)
    row, row_stride = index, seq_q
    if PACKED:
        first_q, seq_q = row_range(starts_q, batch)
        first_k, seq_k = row_range(starts_k, batch)
        if LOWER_RIGHT:
            offset = seq_k - seq_q
        seq_k = tl.where(start < seq_q, seq_k, 0)  # a tile past the end of its sequence has nothing to do
        q, o = shifted(q, q_strides, first_q), shifted(o, o_strides, first_q)
        k, v = shifted(k, k_strides, first_k), shifted(v, v_strides, first_k)
        batch, row, row_stride, lse = 0, head, total_q, lse + first_q
    q_tile = load_tile(q, q_strides, batch, head, start, seq_q, BLOCK_M, D, BLOCK_D, True)
    if NEGATE:  # the maximum is taken before scaling, and a negative scale would reverse the order
        q_tile = -q_tile
    head_kv = head // group

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    begin, full, full_end, end = key_range(start, seq_k, offset, window, BLOCK_M, BLOCK_N, CAUSAL, WINDOWED)
    if WINDOWED:
        acc, row_max, row_sum = _attend(
            acc, row_max, row_sum, q_tile, queries, k, k_strides, v, v_strides, batch, head_kv, begin, full, seq_k,
            offset, window, scale_log2, D, BLOCK_D, BLOCK_N, CAUSAL, WINDOWED, True,
        )  # fmt: skip
    acc, row_max, row_sum = _attend(
        acc, row_max, row_sum, q_tile, queries, k, k_strides, v, v_strides, batch, head_kv, full, full_end, seq_k,
        offset, window, scale_log2, D, BLOCK_D, BLOCK_N, CAUSAL, WINDOWED, False,
    )  # fmt: skip
    acc, row_max, row_sum = _attend(
        acc, row_max, row_sum, q_tile, queries, k, k_strides, v, v_strides, batch, head_kv, full_end, end, seq_k,
        offset, window, scale_log2, D, BLOCK_D, BLOCK_N, CAUSAL, WINDOWED, True,
    )  # fmt: skip

    empty = row_sum == 0.0  # rows that see no key: output 0, log-sum-exp -inf
    safe_sum = tl.where(empty, 1.0, row_sum)
    store_tile(o, o_strides, batch, head, start, seq_q, acc / safe_sum[:, None], BLOCK_M, D, BLOCK_D)
    # Round once, not twice: float32's resolution at scores of 10⁴ is 10⁻³. row_max is -inf in an empty row.
    store_row(lse, row, row_stride, start, seq_q, tl.fma(row_max, LN2, tl.log(safe_sum)), BLOCK_M)
