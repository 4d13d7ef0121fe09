# mypy: allow-untyped-defs, allow-incomplete-defs
"""FlashAttention backward for Hopper in Gluon (Triton 3.6, 3.7): one pass over the tiles of keys and values.

A program owns 128 keys. One producer warp loads tiles of q and of the output's gradient by TMA. Two warpgroups of 64
keys each compute the scores transposed, so that weights and their gradients are the left operands of dv and dk in
registers. The gradient of the scores goes through shared memory, each warpgroup computes half of the tile's dq, and TMA
adds it to dq in float32 in L2. Method: Shah et al. 2024, FlashAttention-3.
"""

from __future__ import annotations

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from cs_systems.model.kernels.gluon.parts import async_atomic_add, barriers, following
from cs_systems.model.kernels.gluon.rows import ORDER

SIZES = ("seq_k", "heads", "group", "batch_heads_kv", "heads_in_l2", "offset", "row_tiles", "padded_q")
"""Numbers that no kernel is compiled anew for."""
KEYS = gl.constexpr(64)  # keys of a warpgroup
OWNED = gl.constexpr(128)  # keys of a program
SUMMED = gl.constexpr(ORDER)


@dataclass(frozen=True)
class BackwardPlan:
    """Compile-time constants of the kernel.

    block_m: queries per tile. stages: tiles of q and of the output's gradient in flight. tail: the number of keys is no
    multiple of 128. late: as in BackwardOptions.
    """

    block_m: int
    d_head: int
    stages: int
    causal: bool
    tail: bool
    late: int


@gluon.jit
def _owned(heads_kv, batch_heads_kv, heads_in_l2, seq_k):
    """Return (batch, head of the keys, first key) of this program.

    Keys that more queries see come first, within the heads whose queries fit in the L2 cache together.
    """
    tiles = (seq_k + OWNED - 1) // OWNED
    per_section = heads_in_l2 * tiles
    section = gl.program_id(0) // per_section
    rest = gl.program_id(0) - section * per_section
    first = section * heads_in_l2
    here = gl.minimum(heads_in_l2, batch_heads_kv - first)
    batch_head = first + rest % here
    return batch_head // heads_kv, batch_head % heads_kv, rest // here * OWNED


@gluon.jit
def _first_tile(first_key, offset, row_tiles, C: gl.constexpr):
    """Return the first tile of queries that see some of the keys; at least one remains, whose mask may hide all."""
    first = 0
    if C.causal:
        first = gl.minimum(gl.maximum(first_key - offset, 0) // C.block_m, row_tiles - 1)
    return first


@gluon.jit
def _load(tile, at, rows, row, tiles, numbers, full, stage, C: gl.constexpr):
    """Load a tile of queries and its row of statistics."""
    mbarrier.expect(full.index(stage), C.block_m * C.d_head * 2 + C.block_m * 4)
    view = tiles.index(stage).reshape([1, 1, C.block_m, C.d_head])
    tma.async_copy_global_to_shared(tile, at, full.index(stage), view)
    tma.async_copy_global_to_shared(rows, [row], full.index(stage), numbers.index(stage))


@gluon.jit
def _producer(descriptors, buffers, bars, sizes, C: gl.constexpr):
    q, k, v, do, lse, delta = (
        descriptors[0], descriptors[1], descriptors[2], descriptors[3], descriptors[4], descriptors[5],
    )  # fmt: skip
    qs, ks, vs, dos, lses, deltas = buffers[0], buffers[1], buffers[2], buffers[3], buffers[4], buffers[5]
    kv_full, q_full, do_full, empty = bars[0], bars[1], bars[2], bars[3]
    seq_k, heads, group, batch_heads_kv, heads_in_l2, offset, row_tiles, padded_q = sizes
    batch, head_kv, first_key = _owned(heads // group, batch_heads_kv, heads_in_l2, seq_k)
    first = _first_tile(first_key, offset, row_tiles, C)
    mbarrier.expect(kv_full.index(0), 4 * KEYS * C.d_head * 2)
    for w in gl.static_range(2):
        at = [batch, head_kv, first_key + w * KEYS, 0]
        tma.async_copy_global_to_shared(k, at, kv_full.index(0), ks.index(w).reshape([1, 1, KEYS, C.d_head]))
        tma.async_copy_global_to_shared(v, at, kv_full.index(0), vs.index(w).reshape([1, 1, KEYS, C.d_head]))
    stage = 0
    phase = 0
    for member in range(group):
        head = head_kv * group + member
        for tile in range(first, row_tiles):
            at = [batch, head, tile * C.block_m, 0]
            row = (batch * heads + head) * padded_q + tile * C.block_m
            mbarrier.wait(empty.index(stage), phase ^ 1)  # a fresh barrier counts as released
            _load(q, at, lse, row, qs, lses, q_full, stage, C)
            _load(do, at, delta, row, dos, deltas, do_full, stage, C)
            stage, phase = following(stage, phase, C.stages)


@gluon.jit
def _hide(s, first_key, row, offset, seq_k, C: gl.constexpr):
    """Set transposed scores to −inf where the key lies past the query's diagonal or the last key."""
    COLUMNS: gl.constexpr = gl.SliceLayout(0, s.type.layout)
    hides = C.tail and first_key + KEYS > seq_k
    if C.causal:
        hides = hides or row + offset < first_key + KEYS - 1
    if hides:
        keys = first_key + gl.arange(0, KEYS, gl.SliceLayout(1, s.type.layout))
        limit = gl.full([C.block_m], 0, gl.int32, COLUMNS) + seq_k
        if C.causal:
            limit = gl.minimum(limit, row + gl.arange(0, C.block_m, COLUMNS) + (offset + 1))
        s = gl.where(keys[:, None] < limit[None, :], s, float("-inf"))
    return s


@gluon.jit
def _issue_dq(dss, ks, ds_full, due, W: gl.constexpr, C: gl.constexpr):
    """Issue this warpgroup's half of tile `due`'s dq, from both warpgroups' keys.

    The half is of the head, or of the queries.
    """
    half = due & 1
    mbarrier.wait(ds_full.index(half), (due >> 1) & 1, pred=due >= 0)
    dq = gl.zeros([64, 64], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
    for w in gl.static_range(2):
        if C.block_m == 64:
            left = dss.index(half * 2 + w).permute((1, 0))
            right = ks.index(w).slice(W * 64, 64, dim=1)
        else:
            left = dss.index(half * 2 + w).slice(W * 64, 64, dim=1).permute((1, 0))
            right = ks.index(w)
        dq = warpgroup_mma(left, right, dq, use_acc=w == 1, is_async=True)
    return dq


@gluon.jit
def _add_dq(dq, tile, buffer, place):
    """Add 64 x 64 numbers in the order in which the threads hold them, to avoid bank conflicts: see ORDER."""
    tma.store_wait(0)  # the previous tile has left the buffer
    buffer._reinterpret(gl.float32, [64, 64], gl.SharedLinearLayout(SUMMED)).store(tile)
    fence_async_shared()
    async_atomic_add(dq, [place * 16, 0], buffer)


@gluon.jit
def _place(head, tile, padded_q, W: gl.constexpr, C: gl.constexpr):
    """Return which 64 x 64 numbers this warpgroup adds to: they lie head by head, 64 queries by 64 queries."""
    return (head * (padded_q // C.block_m) + tile) * (C.block_m // 64 * (C.d_head // 64)) + W


@gluon.jit
def _next(head, tile, first, row_tiles):
    """Return the tile after this one: the next head of the group begins where its queries see the keys."""
    last = tile + 1 == row_tiles
    return gl.where(last, head + 1, head), gl.where(last, first, tile + 1)


@gluon.jit
def _write(dk, dv, dk_sum, dv_sum, scale, k, v, batch, head, row, done, d_head: gl.constexpr):
    """Write dk and dv, through the buffers of this warpgroup's keys and values."""
    v.store(dv_sum.to(dv.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(dv, [batch, head, row, 0], v.reshape([1, 1, KEYS, d_head]))
    mbarrier.arrive(done.index(0))
    mbarrier.wait(done.index(0), 0)  # both warpgroups have read the keys for the last time
    k.store((dk_sum * scale).to(dk.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(dk, [batch, head, row, 0], k.reshape([1, 1, KEYS, d_head]))
    tma.store_wait(0)


@gluon.jit
def _consumer(descriptors, buffers, bars, sizes, scale, scale_log2, W: gl.constexpr, C: gl.constexpr):
    dq, dk, dv = descriptors[6], descriptors[7], descriptors[8]
    qs, ks, vs, dos, lses, deltas, dss, dqs = buffers
    kv_full, q_full, do_full, empty, ds_full, done = bars
    seq_k, heads, group, batch_heads_kv, heads_in_l2, offset, row_tiles, padded_q = sizes
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.block_m, 16])
    K_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.d_head, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=K_LAYOUT, k_width=2)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    batch, head_kv, first_key = _owned(heads // group, batch_heads_kv, heads_in_l2, seq_k)
    first = _first_tile(first_key, offset, row_tiles, C)
    nothing = gl.zeros([KEYS, C.block_m], gl.float32, S_LAYOUT)
    dk_sum = gl.zeros([KEYS, C.d_head], gl.float32, K_LAYOUT)
    dv_sum = gl.zeros([KEYS, C.d_head], gl.float32, K_LAYOUT)
    stage, phase = 0, 0
    head, tile = batch * heads + head_kv * group, first
    place_before = head * 0 + (
        1 << 26
    )  # far behind the last element, where additions are dropped: the first tile has no previous one
    stage_before, phase_before = 0, 0
    steps = group * (row_tiles - first)
    mbarrier.wait(kv_full.index(0), 0)
    mbarrier.wait(q_full.index(0), 0)
    s_future = warpgroup_mma(ks.index(W), qs.index(0).permute((1, 0)), nothing, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s_future])
    for i in range(steps):
        half = i & 1
        s = _hide(s, first_key + W * KEYS, tile * C.block_m, offset, seq_k, C)
        mbarrier.wait(do_full.index(stage), phase)
        dp_future = warpgroup_mma(vs.index(W), dos.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
        p = gl.exp2(s * scale_log2 - lses.index(stage).load(COLUMNS)[None, :])
        weights = gl.convert_layout(p.to(dk.dtype), LEFT)
        dv_future = warpgroup_mma(weights, dos.index(stage), dv_sum, is_async=True)
        dp = warpgroup_mma_wait(1, deps=[dp_future])
        ds = (p * (dp - deltas.index(stage).load(COLUMNS)[None, :])).to(dk.dtype)
        if C.late:  # wait until the other warpgroup has read the old contents
            mbarrier.wait(empty.index(stage_before), phase_before, pred=i > 0)
        dss.index(half * 2 + W).store(ds)
        fence_async_shared()
        mbarrier.arrive(ds_full.index(half))
        dk_future = warpgroup_mma(gl.convert_layout(ds, LEFT), qs.index(stage), dk_sum, is_async=True)
        dq_future = _issue_dq(dss, ks, ds_full, i - C.late, W, C)
        dv_sum, dk_sum = warpgroup_mma_wait(2, deps=[dv_future, dk_future])
        stage_before, phase_before = stage, phase
        stage, phase = following(stage, phase, C.stages)
        mbarrier.wait(q_full.index(stage), phase, pred=i + 1 < steps)  # after the last tile, the scores are not used
        s_future = warpgroup_mma(ks.index(W), qs.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
        dq_tile = warpgroup_mma_wait(1, deps=[dq_future])
        mbarrier.arrive(empty.index(stage_before))
        place = _place(head, tile, padded_q, W, C)
        _add_dq(dq, dq_tile, dqs.index(W), place_before if C.late else place)
        place_before = place
        head, tile = _next(head, tile, first, row_tiles)
        s = warpgroup_mma_wait(0, deps=[s_future])
    if C.late:
        dq_future = _issue_dq(dss, ks, ds_full, steps - 1, W, C)
        _add_dq(dq, warpgroup_mma_wait(0, deps=[dq_future]), dqs.index(W), place_before)
    _write(
        dk, dv, dk_sum, dv_sum, scale, ks.index(W), vs.index(W), batch, head_kv, first_key + W * KEYS, done, C.d_head
    )


@gluon.jit(do_not_specialize=SIZES)
def flash_backward_kernel(
    q, k, v, do, lse_log2, delta, summed, dk, dv, seq_k, heads, group, batch_heads_kv, heads_in_l2, offset, row_tiles,
    padded_q, scale, scale_log2, C: gl.constexpr,
):  # fmt: skip
    """Compute dk and dv, and add dq / scale in float32 to the zeros of `summed`.

    q, k, v, do, dk and dv are descriptors of (batch, heads, seq, d_head) with blocks of 64 or block_m rows. lse_log2
    (+∞ where nothing is seen) and delta = Σ o · do are flat, padded_q per head. Query i sees key j if not causal or j
    <= i + offset.
    """
    KV: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, C.d_head], q.dtype)
    DS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, C.block_m], q.dtype)
    ROW: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C.block_m], gl.float32)
    qs = gl.allocate_shared_memory(q.dtype, [C.stages, C.block_m, C.d_head], KV)
    ks = gl.allocate_shared_memory(q.dtype, [2, KEYS, C.d_head], KV)
    vs = gl.allocate_shared_memory(q.dtype, [2, KEYS, C.d_head], KV)
    dos = gl.allocate_shared_memory(q.dtype, [C.stages, C.block_m, C.d_head], KV)
    lses = gl.allocate_shared_memory(gl.float32, [C.stages, C.block_m], ROW)
    deltas = gl.allocate_shared_memory(gl.float32, [C.stages, C.block_m], ROW)
    dss = gl.allocate_shared_memory(q.dtype, [4, KEYS, C.block_m], DS)  # of two tiles, so that no warpgroup waits
    dqs = gl.allocate_shared_memory(gl.float32, [2, 16, 256], summed.layout)
    bars = (
        barriers(1, 1), barriers(C.stages, 1), barriers(C.stages, 1), barriers(C.stages, 2), barriers(2, 2),
        barriers(1, 2),
    )  # fmt: skip
    fence_async_shared()
    descriptors = (q, k, v, do, lse_log2, delta, summed, dk, dv)
    buffers = (qs, ks, vs, dos, lses, deltas, dss, dqs)
    sizes = (seq_k, heads, group, batch_heads_kv, heads_in_l2, offset, row_tiles, padded_q)
    gl.warp_specialize(
        [
            (_consumer, (descriptors, buffers, bars, sizes, scale, scale_log2, 0, C)),
            (_consumer, (descriptors, buffers, bars, sizes, scale, scale_log2, 1, C)),
            (_producer, (descriptors, buffers, bars, sizes, C)),
        ],
        [4, 1],
        [240, 24],
    )
