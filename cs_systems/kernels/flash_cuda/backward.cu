// FlashAttention's backward on Hopper: dq, dk, dv in one pass over tiles of 128 keys (Shah et al. 2024, FlashAttention-3).
//
// A block owns 128 keys of a head. A producer warp brings tiles of q and of the output's gradient do by TMA, two stages of
// each; two warpgroups of 64 keys compute sᵀ = k qᵀ and dpᵀ = v doᵀ, so that the weights p and the gradients of the scores
// ds are the left operands of dv += pᵀ do and dk += dsᵀ q in registers. ds also goes to shared memory, where each
// warpgroup takes both warpgroups' for half of the tile's dq = ds k; the copy engine adds dq to global memory in fp32.
//
// Everything is worked on in halves of 64 queries x 64 keys a warpgroup: 32 registers a thread. What runs beside what, d_head
// 64, tiles of 128 queries, halves a and b, products in the order of their issue:
//
//   tensor cores  | dp a, s b   | dv a | dk a, dp b, dq of the tile before | dv b      | dk b | s a of the next tile
//   this warp     | exp2 of s a | ds a | exp2 of s b                       | ds b, out | dq out
//
// so products are always queued while a warp computes, and the two warpgroups need not be in step: one needs the other's ds
// half a tile later. d_head 128: tiles of 64 queries, one half; dq of the tile before and the next s run beside ds, dk and dp
// beside exp2.
//
// Registers, of 240: dk and dv 32 each (64 at d_head 128), s 2 x 32 (32), dp 32, p and ds 16 each, v 16 (none). dq lies where s a was
// (dp at d_head 128). Shared memory: k, v, q and do 16 KiB a tile at 64, 32, 32, 16, 16 at 128; ds two tiles; dq 32 KiB: 192 KiB.
#include "hopper.cuh"

#ifndef STAMPS  // of each tile: where the time goes, in cycles, read by cuda_kernels.py
#define STAMPS 0
#endif

constexpr int BLOCK_M = D == 64 ? 128 : 64;  // queries of a tile
constexpr int HALVES = BLOCK_M / 64;
constexpr int KEYS = 128;
constexpr int STAGES = 2;
constexpr int COLUMN_BLOCKS = D / 64;
constexpr u32 KEY_BLOCK = KEYS * 128, QUERY_BLOCK = BLOCK_M * 128;  // bytes of 64 columns
constexpr u32 KEY_TILE = COLUMN_BLOCKS * KEY_BLOCK, QUERY_TILE = COLUMN_BLOCKS * QUERY_BLOCK;
constexpr u32 K_AT = 0, V_AT = K_AT + KEY_TILE, Q_AT = V_AT + KEY_TILE, DO_AT = Q_AT + STAGES * QUERY_TILE,
              DS_AT = DO_AT + STAGES * QUERY_TILE, DQ_AT = DS_AT + 2 * HALVES * KEY_BLOCK, LSE_AT = DQ_AT + 8 * 4096,
              DELTA_AT = LSE_AT + STAGES * BLOCK_M * 4, BARRIERS_AT = DELTA_AT + STAGES * BLOCK_M * 4;
constexpr u32 K_FULL = BARRIERS_AT, V_FULL = K_FULL + 8, Q_FULL = V_FULL + 8, DO_FULL = Q_FULL + 8 * STAGES,
              EMPTY = DO_FULL + 8 * STAGES;
static_assert(EMPTY + 8 * STAGES <= SHARED_BYTES, "what the launch asks for");

struct Sizes {
  int seq_k, heads, group, batch_heads_kv, heads_in_l2, offset, row_tiles, padded_q;
  float scale, scale_log2;
};

struct Place {
  int batch, head_kv, first_key, first_tile;
};

// What this block owns: those keys first that the most queries see, within the heads whose queries fit the L2 cache together.
// At least one tile of queries remains, whose mask may hide all.
DEVICE Place owned(const Sizes& z) {
  const int tiles = (z.seq_k + KEYS - 1) / KEYS;
  const int section = blockIdx.x / (z.heads_in_l2 * tiles), rest = blockIdx.x - section * z.heads_in_l2 * tiles;
  const int first = section * z.heads_in_l2, here = min(z.heads_in_l2, z.batch_heads_kv - first);
  const int batch_head = first + rest % here, heads_kv = z.heads / z.group, first_key = rest / here * KEYS;
  const int first_tile = CAUSAL ? min(max(first_key - z.offset, 0) / BLOCK_M, z.row_tiles - 1) : 0;
  return {batch_head / heads_kv, batch_head % heads_kv, first_key, first_tile};
}

DEVICE void produce(u32 shared, const TensorMap& q, const TensorMap& k, const TensorMap& v, const TensorMap& dout,
                    const float* lse, const float* delta, const Sizes& z) {
  const Place at = owned(z);
  barrier_expect(shared + K_FULL, KEY_TILE);
  for (int c = 0; c < COLUMN_BLOCKS; c++)
    tma_load(shared + K_AT + c * KEY_BLOCK, k, shared + K_FULL, c * 64, at.first_key, at.head_kv, at.batch);
  for (int member = 0, i = 0; member < z.group; member++) {
    const int head = at.head_kv * z.group + member;
    for (int tile = at.first_tile; tile < z.row_tiles; tile++, i++) {
      const int stage = i % STAGES, row = tile * BLOCK_M;
      const long long statistics = (long long)(at.batch * z.heads + head) * z.padded_q + row;
      barrier_wait(shared + EMPTY + 8 * stage, (i / STAGES & 1) ^ 1);
      const u32 q_full = shared + Q_FULL + 8 * stage, do_full = shared + DO_FULL + 8 * stage;
      barrier_expect(q_full, QUERY_TILE + BLOCK_M * 4);
      for (int c = 0; c < COLUMN_BLOCKS; c++)
        tma_load(shared + Q_AT + stage * QUERY_TILE + c * QUERY_BLOCK, q, q_full, c * 64, row, head, at.batch);
      bulk_load(shared + LSE_AT + stage * BLOCK_M * 4, lse + statistics, BLOCK_M * 4, q_full);
      if (i == 0) {
        barrier_expect(shared + V_FULL, KEY_TILE);
        for (int c = 0; c < COLUMN_BLOCKS; c++)
          tma_load(shared + V_AT + c * KEY_BLOCK, v, shared + V_FULL, c * 64, at.first_key, at.head_kv, at.batch);
      }
      barrier_expect(do_full, QUERY_TILE + BLOCK_M * 4);
      for (int c = 0; c < COLUMN_BLOCKS; c++)
        tma_load(shared + DO_AT + stage * QUERY_TILE + c * QUERY_BLOCK, dout, do_full, c * 64, row, head, at.batch);
      bulk_load(shared + DELTA_AT + stage * BLOCK_M * 4, delta + statistics, BLOCK_M * 4, do_full);
    }
  }
}

// ---- products of a warpgroup, each one group of wgmma: issued here, waited for where the result is needed ----

// s = a bᵀ of 64 keys, described, and 64 queries.
DEVICE void issue_scores(float (&s)[32], u64 keys, u64 queries) {
  forget(s);
  mma_fence();
#pragma unroll
  for (int k = 0; k < D / 16; k++)
    mma<0, 0>(s, keys + k / 4 * (KEY_BLOCK >> 4) + k % 4 * 2, queries + k / 4 * (QUERY_BLOCK >> 4) + k % 4 * 2, k > 0);
  mma_commit();
}
// The same with the keys in registers.
DEVICE void issue_scores(float (&s)[32], const u32 (&keys)[16], u64 queries) {
  forget(s);
  mma_fence();
#pragma unroll
  for (int k = 0; k < 4; k++) mma<0>(s, keys, 4 * k, queries + k * 2, k > 0);
  mma_commit();
}
// sum += aᵀ b over 64 queries: a in registers, b described.
DEVICE void issue_sum(float (&sum)[D / 2], const u32 (&a)[16], u64 b) {
  mma_fence();
#pragma unroll
  for (int k = 0; k < 4; k++) mma<1>(sum, a, 4 * k, b + k * 128, 1);
  mma_commit();
}
// dq = ds k of 64 queries and 64 columns, over all keys.
DEVICE void issue_dq(float (&dq)[32], u64 ds, u64 keys) {
  forget(dq);
  mma_fence();
#pragma unroll
  for (int k = 0; k < KEYS / 16; k++) mma<1, 1>(dq, ds + k * 128, keys + k * 128, k > 0);
  mma_commit();
}

// ---- what threads do between the products ----

// Scores of hidden keys become −inf. `key` and `query`: of this thread's first score, the latter less the offset.
DEVICE void hide(float (&s)[32], int key, int query, int seq_k) {
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int row = key + 8 * h;
    const int hidden = row >= seq_k ? 64 : CAUSAL ? row - query : 0;  // columns left of this one are
#pragma unroll
    for (int j = 0; j < 8; j++)
#pragma unroll
      for (int l = 0; l < 2; l++)
        if (8 * j + l < hidden) s[4 * j + 2 * h + l] = __int_as_float(0xff800000);
  }
}
// s becomes p. `lse`: shared address of this thread's first of 64 queries.
DEVICE void weigh(float (&s)[32], u32 lse, float scale_log2) {
#pragma unroll
  for (int j = 0; j < 8; j++) {
    const float2 sum = load_float2(lse + 32 * j);
#pragma unroll
    for (int h = 0; h < 4; h += 2) {
      s[4 * j + h] = exp2_fast(__fmaf_rn(s[4 * j + h], scale_log2, -sum.x));
      s[4 * j + h + 1] = exp2_fast(__fmaf_rn(s[4 * j + h + 1], scale_log2, -sum.y));
    }
  }
}
DEVICE void to_operand(u32 (&a)[16], const float (&x)[32]) {
#pragma unroll
  for (int i = 0; i < 16; i++) a[i] = pack(x[2 * i], x[2 * i + 1]);
}
// ds = p (dp − delta), as left operand.
DEVICE void differentiate(u32 (&ds)[16], const float (&p)[32], const float (&dp)[32], u32 delta) {
#pragma unroll
  for (int j = 0; j < 8; j++) {
    const float2 sum = load_float2(delta + 32 * j);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int i = 4 * j + 2 * h;
      ds[2 * j + h] = pack(p[i] * (dp[i] - sum.x), p[i + 1] * (dp[i + 1] - sum.y));
    }
  }
}
// 16 rows x 64 columns of this warp into a block. `at`: of this lane's row and chunk.
DEVICE void store_operand(u32 at, const u32 (&a)[16]) {
#pragma unroll
  for (int k = 0; k < 4; k++) store_matrix(at ^ (k << 5), a[4 * k], a[4 * k + 1], a[4 * k + 2], a[4 * k + 3]);
}
// Add this warp's 16 x 64 numbers of dq to 4 KiB of global memory, in the order in which the threads hold them: four of a
// thread, the 32 threads, then the threads' next four. So stores meet no bank twice, and no barrier between warps is needed.
DEVICE void add_dq(u32 buffer, float* to, const float (&dq)[32]) {
  if (lane_id() == 0) bulk_wait_read<0>();  // the tile before has left the buffer
  __syncwarp();
#pragma unroll
  for (int j = 0; j < 8; j++)
    store_float4(buffer + j * 512 + lane_id() * 16, dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]);
  fence_shared_async();
  __syncwarp();
  if (lane_id() == 0) {
    bulk_add_f32(to, buffer, 4096);
    bulk_commit();
  }
}

// A consumer's place: its warpgroup, where its lane's rows lie, how far it has come. i counts tiles, over all heads of the group.
struct Consumer {
  const Sizes& z;
  const Place at;
  const u32 shared;
  const int w, warp;        // warpgroup; warp in it
  const u32 row_chunk;      // of this lane in a block of 128 keys, for stmatrix and ldmatrix
  const u32 column;         // bytes to this thread's first column of a row of statistics
  const int steps;
  int i = 0, tile, head;    // head: of all batches
  float* dq_before = nullptr;

  DEVICE Consumer(u32 shared, const Sizes& z)
      : z(z), at(owned(z)), shared(shared), w(uniform(threadIdx.x / 128) - 1), warp(uniform(threadIdx.x / 32 % 4)),
        row_chunk(swizzled(w * 64 + warp * 16 + lane_id() % 16, lane_id() / 16)), column(lane_id() % 4 * 8),
        steps(z.group * (z.row_tiles - at.first_tile)), tile(at.first_tile),
        head(at.batch * z.heads + at.head_kv * z.group) {}

  DEVICE u32 stage(u32 first, u32 bytes, int i) const { return shared + first + i % STAGES * bytes; }
  DEVICE u32 q(int i) const { return stage(Q_AT, QUERY_TILE, i); }
  DEVICE u32 dout(int i) const { return stage(DO_AT, QUERY_TILE, i); }
  DEVICE u32 lse(int half) const { return stage(LSE_AT, BLOCK_M * 4, i) + half * 256 + column; }
  DEVICE u32 delta(int half) const { return stage(DELTA_AT, BLOCK_M * 4, i) + half * 256 + column; }
  DEVICE u32 ds(int i, int half) const { return shared + DS_AT + (i % 2 * HALVES + half) * KEY_BLOCK; }
  DEVICE void wait(u32 full, int i) const { barrier_wait(shared + full + 8 * (i % STAGES), i / STAGES & 1); }
  DEVICE void give_back(int i) const {
    if (lane_id() == 0) barrier_arrive(shared + EMPTY + 8 * (i % STAGES));
  }
  // Both warpgroups have written ds of tile i, and have read that of the tile before it.
  DEVICE void ds_written(int i) const { named_arrive(1 + 2 * (1 - w) + i % 2, 256); }
  DEVICE void wait_for_ds(int i) const { named_sync(1 + 2 * w + i % 2, 256); }

  DEVICE void hide_half(float (&s)[32], int half) const {
    const int key = at.first_key + w * 64, query = tile * BLOCK_M + half * 64 + z.offset;
    if ((CAUSAL && key + 63 > query) || (TAIL && key + 63 >= z.seq_k))
      hide(s, key + warp * 16 + lane_id() / 4, query + lane_id() % 4 * 2, z.seq_k);
  }
  // Where this warp adds its part of the present tile's dq: 64 x 64 numbers lie together, head by head.
  DEVICE float* dq_place(float* dq) const {
    const long long block = (long long)head * (z.padded_q / BLOCK_M) + tile;
    return dq + (block * 2 + w) * 4096 + warp * 1024;
  }
  DEVICE void stamp(int k) const {
    if (STAMPS && warp == 0 && lane_id() == 0 && i < 64)
      asm volatile("{ .reg .u32 t; mov.u32 t, %%clock; st.shared.u32 [%0], t; }"
                   ::"r"(shared + SHARED_BYTES + (w * 64 + i) * 64 + k * 4) : "memory");
  }
  DEVICE u32 dq_buffer() const { return shared + DQ_AT + (w * 4 + warp) * 4096; }
  // Add dq of the tile before, and go on to the next.
  DEVICE void end_tile(float* dq, const float (&before)[32]) {
    if (i > 0) add_dq(dq_buffer(), dq_before, before);
    dq_before = dq_place(dq);
    i++;
    if (++tile == z.row_tiles) tile = at.first_tile, head++;
  }
};

#if D == 64
DEVICE void consume(Consumer& c, float (&dk)[32], float (&dv)[32], float* dq) {
  const u64 keys = describe(c.shared + K_AT + c.w * 64 * 128), all_keys = describe(c.shared + K_AT);
  float sa[32], sb[32], dp[32];
  u32 p[16], ds[16], values[16];
  hold(dk);  // their zeros are written before any product begins
  hold(dv);
  barrier_wait(c.shared + K_FULL, 0);
  c.wait(Q_FULL, 0);
  issue_scores(sa, keys, describe(c.q(0)));
  barrier_wait(c.shared + V_FULL, 0);
#pragma unroll
  for (int k = 0; k < 4; k++)
    load_matrix(c.shared + V_AT + (c.row_chunk ^ k << 5), values[4 * k], values[4 * k + 1], values[4 * k + 2],
                values[4 * k + 3]);
  while (true) {  // in flight: dv b and dk b of the tile before, s a
    const u64 q_a = describe(c.q(c.i)), do_a = describe(c.dout(c.i)), q_b = q_a + (8192 >> 4), do_b = do_a + (8192 >> 4);
    c.stamp(0);
    c.wait(DO_FULL, c.i);
    issue_scores(dp, values, do_a);
    issue_scores(sb, keys, q_b);
    c.stamp(1);
    mma_wait<2>();
    hold(sa);
    if (c.i > 0) c.give_back(c.i - 1);
    c.stamp(2);
    c.hide_half(sa, 0);
    weigh(sa, c.lse(0), c.z.scale_log2);
    to_operand(p, sa);
    issue_sum(dv, p, do_a);
    c.stamp(3);
    mma_wait<2>();
    hold(dp);
    c.stamp(4);
    differentiate(ds, sa, dp, c.delta(0));
    c.stamp(5);
    if (c.i > 0) c.wait_for_ds(c.i - 1);
    c.stamp(6);
    store_operand(c.ds(c.i, 0) + c.row_chunk, ds);
    issue_sum(dk, ds, q_a);
    issue_scores(dp, values, do_b);
    issue_dq(sa, describe(c.ds(c.i - 1, c.w)), all_keys);
    c.stamp(7);
    mma_wait<3>();
    hold(sb);
    c.stamp(8);
    c.hide_half(sb, 1);
    weigh(sb, c.lse(1), c.z.scale_log2);
    to_operand(p, sb);
    issue_sum(dv, p, do_b);
    c.stamp(9);
    mma_wait<2>();
    hold(dp);
    c.stamp(10);
    differentiate(ds, sb, dp, c.delta(1));
    store_operand(c.ds(c.i, 1) + c.row_chunk, ds);
    fence_shared_async();
    issue_sum(dk, ds, q_b);
    c.stamp(11);
    mma_wait<2>();
    hold(sa);
    c.stamp(12);
    c.ds_written(c.i);
    c.end_tile(dq, sa);
    if (c.i == c.steps) break;
    c.wait(Q_FULL, c.i);
    issue_scores(sa, keys, describe(c.q(c.i)));
  }
  c.wait_for_ds(c.i - 1);
  issue_dq(sa, describe(c.ds(c.i - 1, c.w)), all_keys);
  mma_wait<0>();
  hold(sa);
  hold(dk);
  hold(dv);
  add_dq(c.dq_buffer(), c.dq_before, sa);
}
#else
DEVICE void consume(Consumer& c, float (&dk)[64], float (&dv)[64], float* dq) {
  const u64 keys = describe(c.shared + K_AT + c.w * 64 * 128), values = keys + (KEY_TILE >> 4);
  const u64 columns = describe(c.shared + K_AT + c.w * KEY_BLOCK);
  float s[32], dp[32];
  u32 p[16], ds[16];
  hold(dk);  // their zeros are written before any product begins
  hold(dv);
  barrier_wait(c.shared + K_FULL, 0);
  c.wait(Q_FULL, 0);
  issue_scores(s, keys, describe(c.q(0), QUERY_BLOCK));
  barrier_wait(c.shared + V_FULL, 0);
  while (true) {  // in flight: dk of the tile before, s
    const u64 queries = describe(c.q(c.i), QUERY_BLOCK), gradients = describe(c.dout(c.i), QUERY_BLOCK);
    c.stamp(0);
    c.wait(DO_FULL, c.i);
    issue_scores(dp, values, gradients);
    c.stamp(1);
    mma_wait<1>();
    hold(s);
    if (c.i > 0) c.give_back(c.i - 1);
    c.stamp(2);
    c.hide_half(s, 0);
    weigh(s, c.lse(0), c.z.scale_log2);
    to_operand(p, s);
    issue_sum(dv, p, gradients);
    c.stamp(3);
    mma_wait<1>();
    hold(dp);
    c.stamp(4);
    differentiate(ds, s, dp, c.delta(0));
    c.stamp(5);
    if (c.i > 0) c.wait_for_ds(c.i - 1);
    c.stamp(6);
    store_operand(c.ds(c.i, 0) + c.row_chunk, ds);
    fence_shared_async();
    issue_dq(dp, describe(c.ds(c.i - 1, 0)), columns);
    issue_sum(dk, ds, queries);
    c.stamp(7);
    mma_wait<1>();
    hold(dp);
    c.stamp(8);
    c.ds_written(c.i);
    if (c.i + 1 == c.steps) break;  // before the next product: ptxas wants none in flight whose result is not used
    c.wait(Q_FULL, c.i + 1);
    issue_scores(s, keys, describe(c.q(c.i + 1), QUERY_BLOCK));
    c.end_tile(dq, dp);
  }
  c.end_tile(dq, dp);
  c.wait_for_ds(c.i - 1);
  issue_dq(dp, describe(c.ds(c.i - 1, 0)), columns);
  mma_wait<0>();
  hold(dp);
  hold(dk);
  hold(dv);
  add_dq(c.dq_buffer(), c.dq_before, dp);
}
#endif

// This warp's 16 keys, times scale, through 2 KiB of shared memory for each 64 columns.
DEVICE void write(const TensorMap& to, const u32 (&buffers)[COLUMN_BLOCKS], const float (&sum)[D / 2], float scale,
                  const Consumer& c) {
#pragma unroll
  for (int b = 0; b < COLUMN_BLOCKS; b++) {
    u32 a[16];
#pragma unroll
    for (int i = 0; i < 16; i++) a[i] = pack(sum[32 * b + 2 * i] * scale, sum[32 * b + 2 * i + 1] * scale);
    store_operand(buffers[b] + swizzled(lane_id() % 16, lane_id() / 16), a);
  }
  fence_shared_async();
  __syncwarp();
  if (lane_id() == 0) {
#pragma unroll
    for (int b = 0; b < COLUMN_BLOCKS; b++)
      tma_store(to, buffers[b], b * 64, c.at.first_key + c.w * 64 + c.warp * 16, c.at.head_kv, c.at.batch);
    bulk_commit();
  }
}

// dk, dv, and dq / scale added in fp32 to zeros. q, k, v, dout, dk, dv: maps of (batch, heads, seq, d_head) with boxes of 64
// columns and BLOCK_M, 128, 128, BLOCK_M, 16, 16 rows. lse (base 2, +∞ where nothing is seen), delta = Σ o · do: padded_q a
// head. Query i sees key j if not CAUSAL or j <= i + offset. TAIL: seq_k is no multiple of 128.
extern "C" __global__ void __launch_bounds__(384, 1)
    backward(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v,
             const __grid_constant__ TensorMap dout, const __grid_constant__ TensorMap dk_map,
             const __grid_constant__ TensorMap dv_map, const float* lse, const float* delta, float* dq,
             const __grid_constant__ Sizes z, u32* stamps) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const u32 shared = shared_address(memory);
  if (threadIdx.x == 0) {
    barrier_init(shared + K_FULL, 1);
    barrier_init(shared + V_FULL, 1);
    for (int stage = 0; stage < STAGES; stage++) {
      barrier_init(shared + Q_FULL + 8 * stage, 1);
      barrier_init(shared + DO_FULL + 8 * stage, 1);
      barrier_init(shared + EMPTY + 8 * stage, 8);  // warps
    }
    barrier_init_done();
  }
  __syncthreads();
  if (uniform(threadIdx.x / 128) == 0) {
    registers_less<24>();
    if (threadIdx.x == 0) produce(shared, q, k, v, dout, lse, delta, z);
    return;
  }
  registers_more<240>();
  Consumer c(shared, z);
  float dk[D / 2], dv[D / 2];
#pragma unroll
  for (int i = 0; i < D / 2; i++) dk[i] = dv[i] = 0;
  consume(c, dk, dv, dq);
  named_sync(5 + c.w, 128);  // all warps of the warpgroup have read the values
  u32 in_values[COLUMN_BLOCKS], in_dq[COLUMN_BLOCKS];
#pragma unroll
  for (int b = 0; b < COLUMN_BLOCKS; b++) {
    in_values[b] = shared + V_AT + b * KEY_BLOCK + (c.w * 64 + c.warp * 16) * 128;
    in_dq[b] = c.dq_buffer() + b * 2048;
  }
  write(dv_map, in_values, dv, 1, c);
  if (lane_id() == 0) bulk_wait_read<1>();  // dq has left its buffer
  __syncwarp();
  write(dk_map, in_dq, dk, z.scale, c);
  if (lane_id() == 0) bulk_wait_read<0>();
  if (STAMPS && blockIdx.x == gridDim.x / 2 && c.warp == 0)
    for (int k = lane_id(); k < 1024; k += 32)
      stamps[c.w * 1024 + k] = __float_as_uint(load_float(shared + SHARED_BYTES + c.w * 4096 + k * 4));
}
