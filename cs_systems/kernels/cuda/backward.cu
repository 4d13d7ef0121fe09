// FlashAttention's backward on Hopper: dq, dk, dv in one pass over tiles of keys (Shah et al. 2024, FlashAttention-3).
//
// A block owns 128 keys of a head. A producer warp loads tiles of q and of the output's gradient do by TMA, with two
// stages of each; two warpgroups of 64 keys compute sᵀ = k qᵀ and dpᵀ = v doᵀ, so that the weights p and the gradients
// of the scores ds are the left operands of dv += pᵀ do and dk += dsᵀ q in registers. ds also goes to shared memory,
// where each warpgroup reads that of both and computes half of the tile's dq = ds k; the copy engine adds dq to global
// memory in fp32.
//
// d_head 64: tiles of 128 queries, computed in halves (a and b) of 64 queries x 64 keys per warpgroup, with 32
// registers per thread. Work of the tensor cores and of a warp at the same time, products in the order of their issue:
//
//   tensor cores  | dp a, s b   | dv a | dk a, dp b, dq of the tile before | dv b      | dk b | s a of the next tile
//   this warp     | exp2 of s a | ds a | exp2 of s b                       | ds b, out | dq out
//
// Products are therefore always queued while a warp computes, and a warpgroup needs the other's ds only half a tile
// later.
//
// d_head 128: tiles of 80 queries, 40 registers per thread. Products of 64 queries with both operands in shared memory
// read it during all of their time, products of 80 queries during nine tenths. 80 rows of dq are not a multiple of 64,
// so dq is computed transposed, and ds has the queries as rows. No registers are left for products during ds:
//
//   tensor cores  | s   | dp          |          | dv, dq of the tile before | dk     | s of the next tile
//   this warp     |     | exp2 of s   | ds, p    | ds out                    | dq out |
//
// While one warpgroup waits, the other computes.
//
// Loads from shared memory take hundreds of cycles while products read it, so the rows' statistics are loaded one step
// ahead, several loads together.
//
// Registers, of 240. d_head 64: dk and dv 32 each, s 2 x 32, dp 32, p and ds 16 together, v 16, statistics 16; dq
// reuses those of s a. d_head 128: dk and dv 64 each, s 40, dp 40, statistics 12; p, ds and dq reuse those of s and dp.
// Shared memory in KiB, per tile: k, v, q, do 16 each at d_head 64; 32, 32, 20, 20 at 128; ds two tiles; dq 32 or 40.
// In total 192 or 224.
//
// A tile's dq is summed in the order in which blocks arrive or, if DETERMINISTIC, in the order of their keys: a warp
// waits for its turn, which the previous block passes on one tile later. Blocks of earlier keys start earlier, so there
// is no deadlock.
#include "backward_tiles.cuh"

#ifndef DETERMINISTIC  // a tile's dq is summed in the order of the keys
#define DETERMINISTIC 0
#endif

struct Sizes {
  int seq_k, heads, group, batch_heads_kv, heads_in_l2, offset, row_tiles, padded_q;
  float scale, scale_log2;
};

struct Place {
  int batch, head_kv, first_key, first_tile;
};

// Keys of this block: first those that most queries see, within the heads whose queries fit the L2 cache together. At
// least one tile of queries remains, and its mask may hide all of it.
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
      if (i == 0) {
        barrier_expect(shared + V_FULL, KEY_TILE);
        for (int c = 0; c < COLUMN_BLOCKS; c++)
          tma_load(shared + V_AT + c * KEY_BLOCK, v, shared + V_FULL, c * 64, at.first_key, at.head_kv, at.batch);
        grid_wait();  // the previous kernel writes the statistics
      }
      bulk_load(shared + LSE_AT + stage * BLOCK_M * 4, lse + statistics, BLOCK_M * 4, q_full);
      barrier_expect(do_full, QUERY_TILE + BLOCK_M * 4);
      for (int c = 0; c < COLUMN_BLOCKS; c++)
        tma_load(shared + DO_AT + stage * QUERY_TILE + c * QUERY_BLOCK, dout, do_full, c * 64, row, head, at.batch);
      bulk_load(shared + DELTA_AT + stage * BLOCK_M * 4, delta + statistics, BLOCK_M * 4, do_full);
    }
  }
}

// State of a consumer: its warpgroup, the place of its lane's rows, its progress. i counts tiles over all heads of the
// group.
struct Consumer {
  const Sizes& z;
  const Place at;
  const u32 shared;
  float* const dq;
  u32* const turns;
  const int w, warp;        // number of the warpgroup, and of the warp in it
  const u32 row_chunk;      // of this lane in a block of 128 keys, for stmatrix and ldmatrix
  const u32 column;         // bytes to this thread's first statistics
  const int steps;
  int i = 0, tile;
  int place;       // place of this warp's dq of the previous tile, in units of WARP_DQ; 64 columns are contiguous
  int added = -1;  // place of its last addition

  DEVICE Consumer(u32 shared, const Sizes& z, float* dq, u32* turns)
      : z(z), at(owned(z)), shared(shared), dq(dq), turns(turns), w(uniform(threadIdx.x / 128) - 1),
        warp(uniform(threadIdx.x / 32 % 4)),
        row_chunk(swizzled(w * 64 + warp * 16 + lane_id() % 16, lane_id() / 16)), column(lane_id() % 4 * 16),
        steps(z.group * (z.row_tiles - at.first_tile)), tile(at.first_tile),
        place(((at.batch * z.heads + at.head_kv * z.group) * z.row_tiles - 1) * 8 + w * 4 + warp) {}

  DEVICE u32 stage(u32 first, u32 bytes, int i) const { return shared + first + i % STAGES * bytes; }
  DEVICE u32 q(int i) const { return stage(Q_AT, QUERY_TILE, i); }
  DEVICE u32 dout(int i) const { return stage(DO_AT, QUERY_TILE, i); }
  DEVICE u32 lse(int half) const { return stage(LSE_AT, BLOCK_M * 4, i) + half * PART * 4 + column; }
  DEVICE u32 delta(int half) const { return stage(DELTA_AT, BLOCK_M * 4, i) + half * PART * 4 + column; }
  DEVICE u32 ds(int i, int half) const { return shared + DS_AT + i % 2 * DS_TILE + half * KEY_BLOCK; }
  DEVICE u32 dq_buffer() const { return shared + DQ_AT + (w * 4 + warp) * WARP_DQ * 4; }
  DEVICE void wait(u32 full, int i) const { barrier_wait(shared + full + 8 * (i % STAGES), i / STAGES & 1); }
  DEVICE void give_back(int i) const { release(shared + EMPTY + 8 * (i % STAGES)); }
  // Signal that this warpgroup has written its ds of tile i and has read that of the previous tile.
  DEVICE void ds_written(int i) const {
    fence_shared_async();
    named_arrive(1 + 2 * (1 - w) + i % 2, 256);
  }
  DEVICE void wait_for_ds(int i) const { named_sync(1 + 2 * w + i % 2, 256); }

  DEVICE void hide_part(float (&s)[PART / 2], int half) const {
    const int key = at.first_key + w * 64, query = tile * BLOCK_M + half * PART + z.offset;
    if ((CAUSAL && key + 63 > query) || (TAIL && key + 63 >= z.seq_k))
      hide(s, key + warp * 16 + lane_id() / 4, query + lane_id() % 4 * 2, z.seq_k);
  }

  // Let the next block add to the same place once this warp's addition is in global memory.
  DEVICE void pass_on() {
    if (lane_id() == 0 && added >= 0) {
      bulk_wait<0>();
      fence_async();
      add_release(turns + added, 1);
    }
  }
  // Add this warp's 16 x PART elements of dq to contiguous global memory, in the order in which the threads hold them:
  // four of a thread, the 32 threads, then the threads' next four. Stores then have no bank conflicts and need no
  // barrier between warps.
  DEVICE void add_dq(const float (&x)[PART / 2]) {
    if (DETERMINISTIC)
      pass_on();
    else if (lane_id() == 0)
      bulk_wait_read<0>();  // the copy of the previous tile has left the buffer
    __syncwarp();
#pragma unroll
    for (int j = 0; j < PART / 8; j++)
      store_float4(dq_buffer() + j * 512 + lane_id() * 16, x[4 * j], x[4 * j + 1], x[4 * j + 2], x[4 * j + 3]);
    fence_shared_async();
    __syncwarp();
    if (lane_id() == 0) {
      if (DETERMINISTIC) {
        while (load_acquire(turns + place) != at.first_key / KEYS) {
        }
        fence_async();
        added = place;
      }
      bulk_add_f32(dq + (long long)place * WARP_DQ, dq_buffer(), WARP_DQ * 4);
      bulk_commit();
    }
  }
  // Add dq of the previous tile and advance to the next.
  DEVICE void end_tile(const float (&before)[PART / 2]) {
    if (i > 0) add_dq(before);
    place += tile == at.first_tile ? 8 * (at.first_tile + 1) : 8;
    i++;
    if (++tile == z.row_tiles) tile = at.first_tile;
  }
};

#if D == 64
// If p and ds share registers, all statistics can be loaded ahead of their use; otherwise only those of the first
// half's ds. On one H200, sharing is up to 11% faster for causal attention; not sharing is 2 to 5% faster without a
// mask.
constexpr bool SHARE = CAUSAL;

struct Work {
  float dk[32], dv[32], dp[32];
  u32 p[16], ds[16], values[16];
};

// Compute one tile up to the issue of its last product. In flight at the beginning: dv b and dk b of the previous tile,
// s a, dp a; at the end: dq (in sa), dv b, dk b.
DEVICE void work(Consumer& c, Work& r, float (&sa)[32], float (&sb)[32]) {
  const u64 keys = describe(c.shared + K_AT + c.w * 64 * 128), all_keys = describe(c.shared + K_AT);
  const u64 q_a = describe(c.q(c.i)), do_a = describe(c.dout(c.i)), q_b = q_a + (8192 >> 4), do_b = do_a + (8192 >> 4);
  Statistics statistics;
  u32(&ds)[16] = SHARE ? r.p : r.ds;
  c.wait(DO_FULL, c.i);
  issue_scores(r.dp, r.values, do_a);
  issue_scores(sb, keys, q_b);
  if (SHARE) statistics.load(c.lse(0));
  mma_wait<2>();
  hold(sa);
  if (c.i > 0) c.give_back(c.i - 1);
  if (!SHARE) statistics.load(c.lse(0));
  c.hide_part(sa, 0);
  weigh(sa, statistics, c.z.scale_log2);
  to_operand(r.p, sa);
  statistics.load(c.delta(0));
  issue_sum(r.dv, r.p, do_a);
  mma_wait<2>();
  hold(r.dp);
  differentiate(sa, r.dp, statistics);
  if (SHARE) mma_wait<0>(), hold(r.p);
  to_operand(ds, r.dp);
  if (SHARE) statistics.load(c.lse(1));
  if (c.i > 0) c.wait_for_ds(c.i - 1);
  store_operand(c.ds(c.i, 0) + c.row_chunk, ds);
  issue_sum(r.dk, ds, q_a);
  issue_scores(r.dp, r.values, do_b);
  issue_dq(sa, describe(c.ds(c.i - 1, c.w)), all_keys);
  mma_wait<3>();
  hold(sb);
  if (!SHARE) statistics.load(c.lse(1));
  c.hide_part(sb, 1);
  weigh(sb, statistics, c.z.scale_log2);
  if (SHARE) mma_wait<2>(), hold(r.p);
  to_operand(r.p, sb);
  if (SHARE) statistics.load(c.delta(1));
  issue_sum(r.dv, r.p, do_b);
  mma_wait<2>();
  hold(r.dp);
  if (!SHARE) statistics.load(c.delta(1));
  differentiate(sb, r.dp, statistics);
  if (SHARE) mma_wait<0>(), hold(r.p);
  to_operand(ds, r.dp);
  store_operand(c.ds(c.i, 1) + c.row_chunk, ds);
  issue_sum(r.dk, ds, q_b);
}
DEVICE void consume(Consumer& c, float (&dk)[32], float (&dv)[32]) {
  const u64 keys = describe(c.shared + K_AT + c.w * 64 * 128);
  Work r;
  float sa[32], sb[32];
#pragma unroll
  for (int i = 0; i < 32; i++) r.dk[i] = r.dv[i] = 0;
  hold(r.dk);  // the zeros must be written before any product begins
  hold(r.dv);
  barrier_wait(c.shared + K_FULL, 0);
  c.wait(Q_FULL, 0);
  issue_scores(sa, keys, describe(c.q(0)));
  barrier_wait(c.shared + V_FULL, 0);
  load_operand(r.values, c.shared + V_AT + c.row_chunk);
  while (true) {
    work(c, r, sa, sb);
    mma_wait<2>();
    hold(sa);
    c.ds_written(c.i);
    c.end_tile(sa);
    if (c.i == c.steps) break;
    c.wait(Q_FULL, c.i);
    issue_scores(sa, keys, describe(c.q(c.i)));
  }
  c.wait_for_ds(c.i - 1);
  issue_dq(sa, describe(c.ds(c.i - 1, c.w)), describe(c.shared + K_AT));
  mma_wait<0>();
  hold(sa);
  c.add_dq(sa);
  hold(r.dk);
  hold(r.dv);
#pragma unroll
  for (int i = 0; i < 32; i++) dk[i] = r.dk[i], dv[i] = r.dv[i];
}
#else
DEVICE void consume(Consumer& c, float (&dk)[64], float (&dv)[64]) {
  const u64 keys = describe(c.shared + K_AT + c.w * 64 * 128), values = keys + (KEY_TILE >> 4);
  const u64 columns = describe(c.shared + K_AT + c.w * KEY_BLOCK);
  const u32 lane = lane_id();
  const u32 query_chunk = c.w * QUERY_BLOCK + swizzled(lane / 16 * 8 + lane % 8, c.warp * 2 + lane / 8 % 2);
  float s[PART / 2], dp[PART / 2];
  u32 p[PART / 4], ds[PART / 4];
  Statistics statistics;
#pragma unroll
  for (int i = 0; i < 64; i++) dk[i] = dv[i] = 0;
  hold(dk);  // the zeros must be written before any product begins
  hold(dv);
  barrier_wait(c.shared + K_FULL, 0);
  c.wait(Q_FULL, 0);
  issue_scores(s, keys, describe(c.q(0), QUERY_BLOCK));
  barrier_wait(c.shared + V_FULL, 0);
  while (true) {  // s is in flight
    const u64 queries = describe(c.q(c.i), QUERY_BLOCK), gradients = describe(c.dout(c.i), QUERY_BLOCK);
    c.wait(DO_FULL, c.i);
    issue_scores(dp, values, gradients);
    statistics.load(c.lse(0));
    mma_wait<1>();
    hold(s);
    c.hide_part(s, 0);
    weigh(s, statistics, c.z.scale_log2);
    statistics.load(c.delta(0));
    mma_wait<0>();
    hold(dp);
    differentiate(s, dp, statistics);
    to_operand(p, s);
    to_operand(ds, dp);
    issue_sum(dv, p, gradients);
    if (c.i > 0) c.wait_for_ds(c.i - 1);
    issue_dq(dp, describe(c.ds(c.i - 1, 0)), columns);
    store_transposed(c.ds(c.i, 0) + query_chunk, ds);
    issue_sum(dk, ds, queries);
    mma_wait<1>();
    hold(dp);
    c.ds_written(c.i);
    if (c.i + 1 == c.steps) break;  // before the next product: ptxas must see no product with an unused result
    c.end_tile(dp);
    c.wait(Q_FULL, c.i);
    mma_wait<0>();
    c.give_back(c.i - 1);
    issue_scores(s, keys, describe(c.q(c.i), QUERY_BLOCK));
  }
  c.end_tile(dp);
  c.wait_for_ds(c.i - 1);
  issue_dq(dp, describe(c.ds(c.i - 1, 0)), columns);
  mma_wait<0>();
  hold(dp);
  hold(dk);
  hold(dv);
  c.add_dq(dp);
}
#endif

// Write this warp's 16 keys times `scale`, through 2 KiB of shared memory for each 64 columns.
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

// Compute dk and dv, and add dq / scale in fp32 to zeros. q, k, v, dout, dk, dv: maps of (batch, heads, seq, d_head)
// with boxes of 64 columns and BLOCK_M, 128, 128, BLOCK_M, 16, 16 rows. lse (base 2, +∞ where nothing is seen), delta =
// Σ o · do: padded_q a head, as `prepare` ordered them. Query i sees key j if not CAUSAL or j <= i + offset. TAIL:
// seq_k is no multiple of 128. turns, zeros for each WARP_DQ numbers of dq: if DETERMINISTIC.
extern "C" __global__ void __launch_bounds__(384, 1)
    backward(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
             const __grid_constant__ TensorMap v, const __grid_constant__ TensorMap dout, const __grid_constant__ TensorMap dk_map,
             const __grid_constant__ TensorMap dv_map, const float* lse, const float* delta, float* dq,
             u32* turns, const __grid_constant__ Sizes z) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const u32 shared = shared_address(memory);
  grid_launch_next();
  if (threadIdx.x == 32) {
    for (const TensorMap* map : {&q, &k, &v, &dout, &dk_map, &dv_map}) tma_prefetch_map(*map);
  }
  if (threadIdx.x == 0) {
    barrier_init(shared + K_FULL, 1);
    barrier_init(shared + V_FULL, 1);
    for (int stage = 0; stage < STAGES; stage++) {
      barrier_init(shared + Q_FULL + 8 * stage, 1);
      barrier_init(shared + DO_FULL + 8 * stage, 1);
      barrier_init(shared + EMPTY + 8 * stage, 8 * WARP_ARRIVALS);
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
  grid_wait();  // the previous kernel writes zeros to dq
  Consumer c(shared, z, dq, turns);
  float dk[D / 2], dv[D / 2];
  consume(c, dk, dv);
  named_sync(5 + c.w, 128);  // all warps of the warpgroup must have read the values
  u32 in_values[COLUMN_BLOCKS], in_dq[COLUMN_BLOCKS];
#pragma unroll
  for (int b = 0; b < COLUMN_BLOCKS; b++) {
    in_values[b] = shared + V_AT + b * KEY_BLOCK + (c.w * 64 + c.warp * 16) * 128;
    in_dq[b] = c.dq_buffer() + b * 2048;
  }
  write(dv_map, in_values, dv, 1, c);
  if (lane_id() == 0) bulk_wait_read<1>();  // dq must have left its buffer
  __syncwarp();
  write(dk_map, in_dq, dk, z.scale, c);
  if (lane_id() == 0) bulk_wait_read<0>();
  if (DETERMINISTIC) c.pass_on();
}
