# mypy: allow-untyped-defs, allow-incomplete-defs
"""FlashAttention forward for Hopper in Gluon (Triton 3.6, 3.7): explicit TMA, wgmma and warp specialization.

One producer warp loads tiles of q, k and v into shared memory by TMA. CONSUMERS warpgroups own 64 query rows each and
walk the keys from the last tile that they see (the only one with a mask) to the first. The scores of the next tile are
issued before the product with v of the current one, so that the exponentials of one overlap the tensor cores' work on
the other; the weights stay in registers. Method: Shah et al. 2024, FlashAttention-3.
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

from cs_systems.model.kernels.gluon.parts import barriers, following

SIZES = ("seq_q", "seq_k", "heads", "group", "batch_heads", "offset", "row_tiles", "heads_in_l2")
"""Numbers that no kernel is compiled anew for."""
ROWS = gl.constexpr(64)  # rows of a warpgroup: the M of wgmma


@dataclass(frozen=True)
class ForwardPlan:
    """Compile-time constants of the kernel.

    consumers: warpgroups of 64 queries. block_n: keys per tile. stages: tiles of k and v in flight. mask_first: the
    last tile of keys may be cut by the diagonal or the end; mask_more: others too. overlap, ping_pong: as in
    ForwardOptions.
    """

    consumers: int
    block_n: int
    d_head: int
    stages: int
    causal: bool
    mask_first: bool
    mask_more: bool
    overlap: bool
    ping_pong: bool


@gluon.jit
def _rounds(tiles):
    """Return how many tiles this program computes: one with a grid of all tiles, several with a persistent grid."""
    programs = gl.num_programs(0)
    full = tiles // programs
    position = gl.program_id(0)
    if full % 2 == 1:
        position = programs - 1 - position
    rest = gl.where(position < tiles - full * programs, 1, 0)
    return full + rest


@gluon.jit
def _locate(round, heads, batch_heads, row_tiles, heads_in_l2):
    """Return (batch, head, row tile) of this program's next tile.

    The longest causal tiles come first, within the heads whose keys and values fit in the L2 cache together. Every
    other round runs in reverse, which evens out a persistent grid.
    """
    programs = gl.num_programs(0)
    position = gl.program_id(0)
    if round % 2 == 1:
        position = programs - 1 - position
    tile = round * programs + position
    per_section = heads_in_l2 * row_tiles
    section = tile // per_section
    rest = tile - section * per_section
    first = section * heads_in_l2
    here = gl.minimum(heads_in_l2, batch_heads - first)
    batch_head = first + rest % here
    return batch_head // heads, batch_head % heads, row_tiles - 1 - rest // here


@gluon.jit
def _key_tiles(last_row, offset, seq_k, C: gl.constexpr):
    """Return how many tiles of keys are seen up to query `last_row`; at least one, whose mask may hide all of it."""
    tiles = (seq_k + C.block_n - 1) // C.block_n
    if C.causal:
        tiles = gl.minimum(tiles, (last_row + offset + C.block_n) // C.block_n)
    return gl.maximum(tiles, 1)


@gluon.jit
def _load(descriptor, batch, head, row, full, empty, buffers, phase, stage, BYTES: gl.constexpr):
    """Load into buffers[stage] after its consumers have released it. A fresh barrier counts as released."""
    mbarrier.wait(empty.index(stage), phase ^ 1)
    mbarrier.expect(full.index(stage), BYTES)
    view = buffers.index(stage).reshape([1, 1, buffers.shape[1], buffers.shape[2]])
    tma.async_copy_global_to_shared(descriptor, [batch, head, row, 0], full.index(stage), view)


@gluon.jit
def _producer(descriptors, buffers, bars, sizes, C: gl.constexpr):
    q, k, v = descriptors[0], descriptors[1], descriptors[2]
    qs, ks, vs = buffers[0], buffers[1], buffers[2]
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars[0], bars[1], bars[2], bars[3], bars[4], bars[5]
    seq_k, heads, group, batch_heads, offset, row_tiles, heads_in_l2 = sizes
    Q_BYTES: gl.constexpr = ROWS * C.d_head * 2
    KV_BYTES: gl.constexpr = C.block_n * C.d_head * 2
    stage = 0
    phase = 0
    for round in range(_rounds(row_tiles * batch_heads)):
        batch, head, row_tile = _locate(round, heads, batch_heads, row_tiles, heads_in_l2)
        row = row_tile * (C.consumers * ROWS)
        last = _key_tiles(row + C.consumers * ROWS - 1, offset, seq_k, C) - 1
        kv_head = head // group
        # The first warpgroup can begin as soon as its queries and the keys are there.
        _load(q, batch, head, row, q_full, q_empty, qs, round & 1, 0, Q_BYTES)
        _load(k, batch, kv_head, last * C.block_n, k_full, k_empty, ks, phase, stage, KV_BYTES)
        for w in gl.static_range(1, C.consumers):
            _load(q, batch, head, row + w * ROWS, q_full, q_empty, qs, round & 1, w, Q_BYTES)
        _load(v, batch, kv_head, last * C.block_n, v_full, v_empty, vs, phase, stage, KV_BYTES)
        stage, phase = following(stage, phase, C.stages)
        for i in range(last):
            key = (last - 1 - i) * C.block_n
            _load(k, batch, kv_head, key, k_full, k_empty, ks, phase, stage, KV_BYTES)
            _load(v, batch, kv_head, key, v_full, v_empty, vs, phase, stage, KV_BYTES)
            stage, phase = following(stage, phase, C.stages)


@gluon.jit
def _visible(s, first_key, limit):
    """Set the scores of keys at or past each row's limit to −inf."""
    keys = first_key + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
    return gl.where(keys[None, :] < limit[:, None], s, float("-inf"))


@gluon.jit
def _softmax(s, m, scale_log2, dtype: gl.constexpr):
    """Return a tile's weights, their sum, the new maximum and the factor for the old sums; base 2, scaled."""
    new = gl.maximum(m, gl.max(s, 1) * scale_log2)
    safe = gl.where(new == float("-inf"), 0.0, new)  # a row that has seen no key yet
    p = gl.exp2(s * scale_log2 - safe[:, None])
    return p.to(dtype), gl.sum(p, 1), new, gl.exp2(m - safe)


@gluon.jit
def _skip(number, stage, phase, bars, C: gl.constexpr):
    """Release tiles of which the other warpgroups see some key, and this one none."""
    for _ in range(number):
        mbarrier.wait(bars[2].index(stage), phase)
        mbarrier.arrive(bars[3].index(stage))
        mbarrier.wait(bars[4].index(stage), phase)
        mbarrier.arrive(bars[5].index(stage))
        stage, phase = following(stage, phase, C.stages)
    return stage, phase


@gluon.jit
def _attend(
    query, buffers, bars, seen, row, limit, offset, scale_log2, round, stage, phase, turn,
    dtype: gl.constexpr, W: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Return the unnormalized output, the weights' sum, the maximum, and the places in the ring and the turns.

    The unnormalized output is the sum of v under unnormalized weights.
    """
    ks, vs = buffers[1], buffers[2]
    q_full, q_empty, k_full, k_empty, v_full, v_empty, turns = bars
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.block_n, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.d_head, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_LAYOUT, k_width=2)
    nothing = gl.full([ROWS, C.block_n], 0.0, gl.float32, S_LAYOUT)
    mbarrier.wait(q_full.index(W), round & 1)
    mbarrier.wait(k_full.index(stage), phase)
    s = warpgroup_mma(query, ks.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(k_empty.index(stage))
    if C.mask_first:
        s = _visible(s, (seen - 1) * C.block_n, limit)
    m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
    p, total, m, kept = _softmax(s, m, scale_log2, dtype)
    weights = gl.convert_layout(p, P_LAYOUT)
    acc = gl.full([ROWS, C.d_head], 0.0, gl.float32, O_LAYOUT)
    for i in range(seen - 1):
        v_stage = stage
        v_phase = phase
        stage, phase = following(stage, phase, C.stages)
        mbarrier.wait(k_full.index(stage), phase)
        if C.ping_pong:
            mbarrier.wait(turns.index(W), turn)
            turn ^= 1
        s_future = warpgroup_mma(query, ks.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(v_stage), v_phase)
        o_future = warpgroup_mma(weights, vs.index(v_stage), acc, is_async=True)
        if C.ping_pong:
            mbarrier.arrive(turns.index((W + 1) % C.consumers))
        s = warpgroup_mma_wait(1, deps=[s_future])
        mbarrier.arrive(k_empty.index(stage))
        if C.mask_more:
            first_key = (seen - 2 - i) * C.block_n
            if first_key + C.block_n > row + offset + 1:
                s = _visible(s, first_key, limit)
        p, added, m, kept = _softmax(s, m, scale_log2, dtype)
        total = total * kept + added
        if C.overlap:
            mbarrier.wait(q_full.index(W), round & 1)  # already complete: ptxas moves no exponential past this branch
        acc, p = warpgroup_mma_wait(0, deps=[o_future, p])
        mbarrier.arrive(v_empty.index(v_stage))
        acc = acc * gl.convert_layout(kept, gl.SliceLayout(1, O_LAYOUT))[:, None]
        weights = gl.convert_layout(p, P_LAYOUT)
    mbarrier.arrive(q_empty.index(W))
    mbarrier.wait(v_full.index(stage), phase)
    o_future = warpgroup_mma(weights, vs.index(stage), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[o_future])
    mbarrier.arrive(v_empty.index(stage))
    stage, phase = following(stage, phase, C.stages)
    return acc, total, m, stage, phase, turn


@gluon.jit
def _consumer(descriptors, buffers, bars, sizes, lse, seq_q, scale_log2, W: gl.constexpr, C: gl.constexpr):
    o, out = descriptors[3], buffers[3].index(W)
    seq_k, heads, batch_heads = sizes[0], sizes[1], sizes[3]
    offset, row_tiles, heads_in_l2 = sizes[4], sizes[5], sizes[6]
    S_ROWS: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.block_n, 16]))
    stage = 0
    phase = 0
    turn = 0
    for round in range(_rounds(row_tiles * batch_heads)):
        batch, head, row_tile = _locate(round, heads, batch_heads, row_tiles, heads_in_l2)
        first_row = row_tile * (C.consumers * ROWS)
        row = first_row + W * ROWS
        rows = row + gl.arange(0, ROWS, S_ROWS)
        limit = gl.full([ROWS], 0, gl.int32, S_ROWS) + seq_k
        if C.causal:
            limit = gl.minimum(limit, rows + (offset + 1))
        seen = _key_tiles(first_row + C.consumers * ROWS - 1, offset, seq_k, C)
        if C.causal and not C.ping_pong:  # taking turns needs the same number of tiles in every warpgroup
            loaded = seen
            seen = _key_tiles(row + ROWS - 1, offset, seq_k, C)
            stage, phase = _skip(loaded - seen, stage, phase, bars, C)
        acc, total, m, stage, phase, turn = _attend(
            buffers[0].index(W), buffers, bars, seen, row, limit, offset, scale_log2, round, stage, phase, turn,
            o.dtype, W, C,
        )  # fmt: skip
        none = m == float("-inf")  # no key is seen
        sums = gl.where(none, float("-inf"), (m + gl.log2(total)) * 0.6931471805599453)
        gl.store(lse + (batch * heads + head).to(gl.int64) * seq_q + rows, sums, mask=rows < seq_q)
        inverse = gl.where(none, 0.0, 1.0 / total)
        acc = acc * gl.convert_layout(inverse, gl.SliceLayout(1, acc.type.layout))[:, None]
        tma.store_wait(0)  # the previous tile has left the buffer
        out.store(acc.to(o.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(o, [batch, head, row, 0], out.reshape([1, 1, ROWS, C.d_head]))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=SIZES)
def flash_forward_kernel(
    q, k, v, o, lse, seq_q, seq_k, heads, group, batch_heads, offset, row_tiles, heads_in_l2, scale_log2,
    C: gl.constexpr,
):  # fmt: skip
    """Compute o and lse (natural logarithm, −inf where no key is seen) of q, k, v.

    All but lse are descriptors of (batch, heads, seq, d_head) with blocks of (1, 1, 64 or block_n, d_head). Query i
    sees key j if not causal or j <= i + offset.
    """
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, C.d_head], q.dtype)
    qs = gl.allocate_shared_memory(q.dtype, [C.consumers, ROWS, C.d_head], TILE)
    os = gl.allocate_shared_memory(q.dtype, [C.consumers, ROWS, C.d_head], TILE)
    ks = gl.allocate_shared_memory(q.dtype, [C.stages, C.block_n, C.d_head], TILE)
    vs = gl.allocate_shared_memory(q.dtype, [C.stages, C.block_n, C.d_head], TILE)
    turns = barriers(C.consumers, 1)
    bars = (
        barriers(C.consumers, 1), barriers(C.consumers, 1), barriers(C.stages, 1), barriers(C.stages, C.consumers),
        barriers(C.stages, 1), barriers(C.stages, C.consumers), turns,
    )  # fmt: skip
    fence_async_shared()
    if C.ping_pong:
        mbarrier.arrive(turns.index(0))
    descriptors = (q, k, v, o)
    buffers = (qs, ks, vs, os)
    sizes = (seq_k, heads, group, batch_heads, offset, row_tiles, heads_in_l2)
    if C.consumers == 2:
        gl.warp_specialize(
            [
                (_consumer, (descriptors, buffers, bars, sizes, lse, seq_q, scale_log2, 0, C)),
                (_consumer, (descriptors, buffers, bars, sizes, lse, seq_q, scale_log2, 1, C)),
                (_producer, (descriptors, buffers, bars, sizes, C)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consumer, (descriptors, buffers, bars, sizes, lse, seq_q, scale_log2, 0, C)),
                (_consumer, (descriptors, buffers, bars, sizes, lse, seq_q, scale_log2, 1, C)),
                (_consumer, (descriptors, buffers, bars, sizes, lse, seq_q, scale_log2, 2, C)),
                (_producer, (descriptors, buffers, bars, sizes, C)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )
