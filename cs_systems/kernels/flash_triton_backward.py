"""FlashAttention-2 backward (Dao 2023, algorithm 2) in Triton, split in two so that no gradient is added to by two programs:
dq_kernel owns queries and walks the keys, dkdv_kernel owns keys and walks the queries. Each recomputes the scores from the
log-sum-exp, 3 + 4 score-sized products instead of the 5 of one kernel with atomics; the result does not depend on the order.

dq_kernel runs first: it has o and do at hand, so it also makes delta = rowsum(do · o), which dkdv_kernel reads.
"""

import triton
import triton.language as tl

from cs_systems.kernels.flash_triton_tiles import head_pointer, key_range, load_tile, store_tile, visible_keys

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _dq_loop(
    dq, q, do, lse_log2, delta, queries, k_matrix, k_strides, v_matrix, v_strides, begin, end, seq_k, offset, scale_log2,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the keys begin … end to dq (BLOCK_M, BLOCK_D), which lacks the scale."""
    for start in range(begin, end, BLOCK_N):
        k = load_tile(k_matrix, k_strides, start, seq_k, BLOCK_N, D, BLOCK_D, MASKED)
        v = load_tile(v_matrix, v_strides, start, seq_k, BLOCK_N, D, BLOCK_D, MASKED)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2 - lse_log2[:, None]
        if MASKED:
            keys = (start + tl.arange(0, BLOCK_N))[None, :]
            s = tl.where(visible_keys(queries[:, None], keys, seq_k, offset, CAUSAL), s, float("-inf"))
        p = tl.exp2(s)
        dp = tl.dot(do, tl.trans(v), input_precision="ieee")
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    return dq


@triton.jit
def dq_kernel(
    q, q_strides, k, k_strides, v, v_strides, o, o_strides, do, do_strides, dq, dq_strides, lse, delta,
    heads, group, seq_q, seq_k, offset, scale, scale_log2,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """dq and delta; grid (batch · heads, tiles of queries)."""
    index = tl.program_id(0)
    batch, head = index // heads, index % heads
    start = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M  # the longest programs first
    queries = start + tl.arange(0, BLOCK_M)
    statistics = tl.cast(index, tl.int64) * seq_q + queries
    o_tile = load_tile(head_pointer(o, o_strides, batch, head), o_strides, start, seq_q, BLOCK_M, D, BLOCK_D, True)
    do_tile = load_tile(head_pointer(do, do_strides, batch, head), do_strides, start, seq_q, BLOCK_M, D, BLOCK_D, True)
    delta_rows = tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), 1)
    tl.store(delta + statistics, delta_rows, mask=queries < seq_q)
    lse_log2 = tl.load(lse + statistics, mask=queries < seq_q, other=0.0) * LOG2E
    q_tile = load_tile(head_pointer(q, q_strides, batch, head), q_strides, start, seq_q, BLOCK_M, D, BLOCK_D, True)
    k_matrix = head_pointer(k, k_strides, batch, head // group)
    v_matrix = head_pointer(v, v_strides, batch, head // group)

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    full, end = key_range(start, seq_k, offset, BLOCK_M, BLOCK_N, CAUSAL)
    acc = _dq_loop(
        acc, q_tile, do_tile, lse_log2, delta_rows, queries, k_matrix, k_strides, v_matrix, v_strides, 0, full, seq_k,
        offset, scale_log2, D, BLOCK_D, BLOCK_N, CAUSAL, False,
    )  # fmt: skip
    acc = _dq_loop(
        acc, q_tile, do_tile, lse_log2, delta_rows, queries, k_matrix, k_strides, v_matrix, v_strides, full, end, seq_k,
        offset, scale_log2, D, BLOCK_D, BLOCK_N, CAUSAL, True,
    )  # fmt: skip
    dq_matrix = head_pointer(dq, dq_strides, batch, head)
    store_tile(dq_matrix, dq_strides, start, seq_q, acc * scale, BLOCK_M, D, BLOCK_D)


@triton.jit
def _dkdv_loop(
    dk, dv, k, v, keys, q_matrix, q_strides, do_matrix, do_strides, lse, delta, begin, end, seq_q, seq_k, offset, scale_log2,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the queries begin … end to dk (which lacks the scale) and dv, both (BLOCK_N, BLOCK_D).

    The scores are made transposed, (keys, queries), so that p and ds enter the products with do and q from registers.
    Queries past seq_q are read as 0, with log-sum-exp and delta 0, and so add nothing.
    """
    for start in range(begin, end, BLOCK_M):
        queries = start + tl.arange(0, BLOCK_M)
        q = load_tile(q_matrix, q_strides, start, seq_q, BLOCK_M, D, BLOCK_D, True)
        lse_log2 = tl.load(lse + queries, mask=queries < seq_q, other=0.0) * LOG2E
        s = tl.dot(k, tl.trans(q), input_precision="ieee") * scale_log2 - lse_log2[None, :]
        if MASKED:
            s = tl.where(visible_keys(queries[None, :], keys[:, None], seq_k, offset, CAUSAL), s, float("-inf"))
        p = tl.exp2(s)
        do = load_tile(do_matrix, do_strides, start, seq_q, BLOCK_M, D, BLOCK_D, True)
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
        dp = tl.dot(v, tl.trans(do), input_precision="ieee")
        delta_rows = tl.load(delta + queries, mask=queries < seq_q, other=0.0)
        ds = p * (dp - delta_rows[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit
def dkdv_kernel(
    q, q_strides, k, k_strides, v, v_strides, do, do_strides, dk, dk_strides, dv, dv_strides, lse, delta,
    heads_kv, seq_q, seq_k, offset, scale, scale_log2, GROUP: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """dk and dv, summed over the GROUP query heads that share a key head; grid (batch · heads_kv, tiles of keys)."""
    index = tl.program_id(0)
    batch, head_kv = index // heads_kv, index % heads_kv
    start = (
        tl.program_id(1) * BLOCK_N
    )  # causal: the first keys are seen by most queries, the longest programs come first
    keys = start + tl.arange(0, BLOCK_N)
    k_tile = load_tile(head_pointer(k, k_strides, batch, head_kv), k_strides, start, seq_k, BLOCK_N, D, BLOCK_D, True)
    v_tile = load_tile(head_pointer(v, v_strides, batch, head_kv), v_strides, start, seq_k, BLOCK_N, D, BLOCK_D, True)

    # Queries before `begin` see none of these keys, from `full` on all of them. A tile with keys past seq_k is masked throughout.
    begin = 0
    full = 0
    if CAUSAL:
        begin = tl.minimum(seq_q, tl.maximum(0, start - offset) // BLOCK_M * BLOCK_M)
        full = tl.minimum(seq_q, tl.cdiv(tl.maximum(0, start + BLOCK_N - 1 - offset), BLOCK_M) * BLOCK_M)
    full = tl.where(start + BLOCK_N > seq_k, seq_q, full)

    dk_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for member in range(GROUP):
        head = head_kv * GROUP + member
        q_matrix = head_pointer(q, q_strides, batch, head)
        do_matrix = head_pointer(do, do_strides, batch, head)
        row = tl.cast(index * GROUP + member, tl.int64) * seq_q
        dk_acc, dv_acc = _dkdv_loop(
            dk_acc, dv_acc, k_tile, v_tile, keys, q_matrix, q_strides, do_matrix, do_strides, lse + row, delta + row,
            begin, full, seq_q, seq_k, offset, scale_log2, D, BLOCK_D, BLOCK_M, CAUSAL, True,
        )  # fmt: skip
        dk_acc, dv_acc = _dkdv_loop(
            dk_acc, dv_acc, k_tile, v_tile, keys, q_matrix, q_strides, do_matrix, do_strides, lse + row, delta + row,
            full, seq_q, seq_q, seq_k, offset, scale_log2, D, BLOCK_D, BLOCK_M, CAUSAL, False,
        )  # fmt: skip
    dk_matrix = head_pointer(dk, dk_strides, batch, head_kv)
    dv_matrix = head_pointer(dv, dv_strides, batch, head_kv)
    store_tile(dk_matrix, dk_strides, start, seq_k, dk_acc * scale, BLOCK_N, D, BLOCK_D)
    store_tile(dv_matrix, dv_strides, start, seq_k, dv_acc, BLOCK_N, D, BLOCK_D)
