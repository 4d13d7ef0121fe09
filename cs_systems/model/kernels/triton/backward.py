# mypy: allow-untyped-defs, allow-incomplete-defs
"""FlashAttention-2 backward (Dao 2023, algorithm 2) in Triton, in two kernels, so that no two programs add to one sum.

A program of flash_dq_kernel has a tile of queries and loops over the keys; a program of flash_dkdv_kernel has a tile of
keys and loops over the queries. Each recomputes the scores from the log-sum-exp: 3 + 4 score-sized products instead of
5 in one kernel with atomics, and the same result every time.

flash_dq_kernel runs first. It loads o and do, so it also computes delta = rowsum(do · o), which flash_dkdv_kernel
reads, and the log-sum-exp in units of log2, which flash_dkdv_kernel would otherwise convert for each tile of keys.
"""

import triton
import triton.language as tl

from cs_systems.model.kernels.triton.tiles import (
    key_range,
    load_row,
    load_tile,
    row_range,
    shifted,
    store_row,
    store_tile,
    visible_keys,
)

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _dq_loop(
    dq, q, do, lse_log2, delta, queries, k, k_strides, v, v_strides, batch, head, begin, end, seq_k, offset, window,
    scale_log2, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the keys begin … end to dq (BLOCK_M, BLOCK_D), which lacks the scale."""
    for start in range(begin, end, BLOCK_N):
        k_tile = load_tile(k, k_strides, batch, head, start, seq_k, BLOCK_N, D, BLOCK_D, MASKED)
        v_tile = load_tile(v, v_strides, batch, head, start, seq_k, BLOCK_N, D, BLOCK_D, MASKED)
        s = tl.dot(q, tl.trans(k_tile), input_precision="ieee") * scale_log2 - lse_log2[:, None]
        if MASKED:
            keys = (start + tl.arange(0, BLOCK_N))[None, :]
            visible = visible_keys(queries[:, None], keys, seq_k, offset, window, CAUSAL, WINDOWED)
            s = tl.where(visible, s, float("-inf"))
        p = tl.exp2(s)
        dp = tl.dot(do, tl.trans(v_tile), input_precision="ieee")
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision="ieee")
    return dq


@triton.jit
def flash_dq_kernel(
    q, q_strides, k, k_strides, v, v_strides, o, o_strides, do, do_strides, dq, dq_strides, lse, lse_log2, delta,
    starts_q, starts_k, heads, group, seq_q, seq_k, total_q, offset, window, scale, scale_log2,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr, PACKED: tl.constexpr, LOWER_RIGHT: tl.constexpr,
):  # fmt: skip
    """Compute dq, delta and lse · log2 e; grid (batch · heads, tiles of queries)."""
    index = tl.program_id(0)
    batch, head = index // heads, index % heads
    start = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M  # longest programs first
    queries = start + tl.arange(0, BLOCK_M)
    head_kv = head // group
    row, row_stride = index, seq_q
    if PACKED:
        first_q, seq_q = row_range(starts_q, batch)
        first_k, seq_k = row_range(starts_k, batch)
        if LOWER_RIGHT:
            offset = seq_k - seq_q
        seq_k = tl.where(start < seq_q, seq_k, 0)  # a tile past the end of its sequence has nothing to do
        q, o = shifted(q, q_strides, first_q), shifted(o, o_strides, first_q)
        do, dq = shifted(do, do_strides, first_q), shifted(dq, dq_strides, first_q)
        k, v = shifted(k, k_strides, first_k), shifted(v, v_strides, first_k)
        batch, row, row_stride = 0, head, total_q
        lse, lse_log2, delta = lse + first_q, lse_log2 + first_q, delta + first_q
    o_tile = load_tile(o, o_strides, batch, head, start, seq_q, BLOCK_M, D, BLOCK_D, True)
    do_tile = load_tile(do, do_strides, batch, head, start, seq_q, BLOCK_M, D, BLOCK_D, True)
    delta_rows = tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), 1)
    lse_rows = load_row(lse, row, row_stride, start, seq_q, BLOCK_M) * LOG2E
    store_row(delta, row, row_stride, start, seq_q, delta_rows, BLOCK_M)
    store_row(lse_log2, row, row_stride, start, seq_q, lse_rows, BLOCK_M)
    q_tile = load_tile(q, q_strides, batch, head, start, seq_q, BLOCK_M, D, BLOCK_D, True)

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    begin, full, full_end, end = key_range(start, seq_k, offset, window, BLOCK_M, BLOCK_N, CAUSAL, WINDOWED)
    if WINDOWED:
        acc = _dq_loop(
            acc, q_tile, do_tile, lse_rows, delta_rows, queries, k, k_strides, v, v_strides, batch, head_kv, begin,
            full, seq_k, offset, window, scale_log2, D, BLOCK_D, BLOCK_N, CAUSAL, WINDOWED, True,
        )  # fmt: skip
    acc = _dq_loop(
        acc, q_tile, do_tile, lse_rows, delta_rows, queries, k, k_strides, v, v_strides, batch, head_kv, full,
        full_end, seq_k, offset, window, scale_log2, D, BLOCK_D, BLOCK_N, CAUSAL, WINDOWED, False,
    )  # fmt: skip
    acc = _dq_loop(
        acc, q_tile, do_tile, lse_rows, delta_rows, queries, k, k_strides, v, v_strides, batch, head_kv, full_end,
        end, seq_k, offset, window, scale_log2, D, BLOCK_D, BLOCK_N, CAUSAL, WINDOWED, True,
    )  # fmt: skip
    store_tile(dq, dq_strides, batch, head, start, seq_q, acc * scale, BLOCK_M, D, BLOCK_D)


@triton.jit
def _dkdv_loop(
    dk, dv, k, v, keys, q, q_strides, do, do_strides, lse_log2, delta, batch, head, row, row_stride, begin, end, seq_q,
    seq_k, offset, window, scale_log2,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Add the queries begin … end to dk (which lacks the scale) and dv, both (BLOCK_N, BLOCK_D).

    The scores are computed transposed, (keys, queries), so that p and ds enter the products with do and q from
    registers. Queries past seq_q are read as 0, with log-sum-exp and delta 0, and so add nothing.
    """
    for start in range(begin, end, BLOCK_M):
        queries = start + tl.arange(0, BLOCK_M)
        q_tile = load_tile(q, q_strides, batch, head, start, seq_q, BLOCK_M, D, BLOCK_D, True)
        lse_rows = load_row(lse_log2, row, row_stride, start, seq_q, BLOCK_M)
        s = tl.dot(k, tl.trans(q_tile), input_precision="ieee") * scale_log2 - lse_rows[None, :]
        if MASKED:
            visible = visible_keys(queries[None, :], keys[:, None], seq_k, offset, window, CAUSAL, WINDOWED)
            s = tl.where(visible, s, float("-inf"))
        p = tl.exp2(s)
        do_tile = load_tile(do, do_strides, batch, head, start, seq_q, BLOCK_M, D, BLOCK_D, True)
        dv = tl.dot(p.to(do_tile.dtype), do_tile, dv, input_precision="ieee")
        dp = tl.dot(v, tl.trans(do_tile), input_precision="ieee")
        delta_rows = load_row(delta, row, row_stride, start, seq_q, BLOCK_M)
        ds = p * (dp - delta_rows[None, :])
        dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk, input_precision="ieee")
    return dk, dv


@triton.jit
def flash_dkdv_kernel(
    q, q_strides, k, k_strides, v, v_strides, do, do_strides, dk, dk_strides, dv, dv_strides, lse_log2, delta,
    starts_q, starts_k, heads_kv, seq_q, seq_k, total_q, offset, window, scale, scale_log2, GROUP: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr, PACKED: tl.constexpr, LOWER_RIGHT: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv, summed over the GROUP query heads of a key head; grid (batch · heads_kv, tiles of keys)."""
    index = tl.program_id(0)
    batch, head_kv = index // heads_kv, index % heads_kv
    start = tl.program_id(1) * BLOCK_N  # most queries see the first keys: longest programs first
    keys = start + tl.arange(0, BLOCK_N)
    first_row, row_stride = index * GROUP, seq_q
    if PACKED:
        first_q, seq_q = row_range(starts_q, batch)
        first_k, seq_k = row_range(starts_k, batch)
        if LOWER_RIGHT:
            offset = seq_k - seq_q
        seq_q = tl.where(start < seq_k, seq_q, 0)
        q, do = shifted(q, q_strides, first_q), shifted(do, do_strides, first_q)
        k, v = shifted(k, k_strides, first_k), shifted(v, v_strides, first_k)
        dk, dv = shifted(dk, dk_strides, first_k), shifted(dv, dv_strides, first_k)
        batch, first_row, row_stride = 0, head_kv * GROUP, total_q
        lse_log2, delta = lse_log2 + first_q, delta + first_q
    k_tile = load_tile(k, k_strides, batch, head_kv, start, seq_k, BLOCK_N, D, BLOCK_D, True)
    v_tile = load_tile(v, v_strides, batch, head_kv, start, seq_k, BLOCK_N, D, BLOCK_D, True)

    # Queries before `begin` and from `end` on see none of these keys, those from `full` to before `full_end` all; keys
    # past seq_k are masked for every query.
    begin = 0
    full = 0
    full_end = seq_q
    end = seq_q
    if CAUSAL:
        begin = tl.minimum(seq_q, tl.maximum(0, start - offset) // BLOCK_M * BLOCK_M)
        full = tl.minimum(seq_q, tl.cdiv(tl.maximum(0, start + BLOCK_N - 1 - offset), BLOCK_M) * BLOCK_M)
    full = tl.where(start + BLOCK_N > seq_k, seq_q, full)
    if WINDOWED:
        end = tl.maximum(0, tl.minimum(seq_q, start + BLOCK_N - 1 - offset + window))
        last = tl.cdiv(end, BLOCK_M) * BLOCK_M
        full = tl.minimum(full, last)
        full_end = tl.maximum(full, tl.minimum(last, tl.maximum(0, start - offset + window) // BLOCK_M * BLOCK_M))

    dk_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for member in range(GROUP):
        head = head_kv * GROUP + member
        row = first_row + member
        dk_acc, dv_acc = _dkdv_loop(
            dk_acc, dv_acc, k_tile, v_tile, keys, q, q_strides, do, do_strides, lse_log2, delta, batch, head, row,
            row_stride, begin, full, seq_q, seq_k, offset, window, scale_log2, D, BLOCK_D, BLOCK_M, CAUSAL, WINDOWED,
            True,
        )  # fmt: skip
        dk_acc, dv_acc = _dkdv_loop(
            dk_acc, dv_acc, k_tile, v_tile, keys, q, q_strides, do, do_strides, lse_log2, delta, batch, head, row,
            row_stride, full, full_end, seq_q, seq_k, offset, window, scale_log2, D, BLOCK_D, BLOCK_M, CAUSAL, WINDOWED,
            False,
        )  # fmt: skip
        if WINDOWED:
            dk_acc, dv_acc = _dkdv_loop(
                dk_acc, dv_acc, k_tile, v_tile, keys, q, q_strides, do, do_strides, lse_log2, delta, batch, head, row,
                row_stride, full_end, end, seq_q, seq_k, offset, window, scale_log2, D, BLOCK_D, BLOCK_M, CAUSAL,
                WINDOWED, True,
            )  # fmt: skip
    store_tile(dk, dk_strides, batch, head_kv, start, seq_k, dk_acc * scale, BLOCK_N, D, BLOCK_D)
    store_tile(dv, dv_strides, batch, head_kv, start, seq_k, dv_acc, BLOCK_N, D, BLOCK_D)
