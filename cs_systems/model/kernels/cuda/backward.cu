// FlashAttention's backward on Hopper: dq, dk, dv in one pass over tiles of keys (Shah et al. 2024, FlashAttention-3).
//
// A block owns 128 keys of a head. A producer warp loads tiles of q and of the output's gradient do by TMA, with two
// stages of each; two warpgroups of 64 keys compute sᵀ = k qᵀ and dpᵀ = v doᵀ, so that the weights p and the gradients
// of the scores ds are the left operands of dv += pᵀ do and dk += dsᵀ q in registers. ds also goes to shared memory,
// where each warpgroup reads that of both and computes half of the tile's dq = ds k; the copy engine adds dq to global
// memory in fp32.
//
// The work of a tile differs by d_head, in backward_64.cuh, backward_128.cuh and backward_256.cuh, with the registers,
// of 240 a thread, and the shared memory that it takes. At d_head 256 a block owns 64 keys and its warpgroups divide
// the work otherwise.
//
// Loads from shared memory take hundreds of cycles while products read it, so the rows' statistics are loaded one step
// ahead, several loads together.
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
  const int first;          // this warpgroup's first key of the block
  const u32 row_chunk;      // of this lane in a block of KEYS keys, for stmatrix and ldmatrix
  const u32 column;         // bytes to this thread's first statistics
  const int steps;
  int i = 0, tile;
  int place;       // place of this warp's dq of the previous tile, in units of WARP_DQ; 64 columns are contiguous
  int added = -1;  // place of its last addition

  DEVICE Consumer(u32 shared, const Sizes& z, float* dq, u32* turns)
      : z(z), at(owned(z)), shared(shared), dq(dq), turns(turns), w(uniform(threadIdx.x / 128) - 1),
        warp(uniform(threadIdx.x / 32 % 4)), first(KEYS == 64 ? 0 : w * 64),
        row_chunk(swizzled(first + warp * 16 + lane_id() % 16, lane_id() / 16)), column(lane_id() % 4 * 16),
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

  DEVICE void start_apart() const {
    if (DELAY_NS > 0 && w == 1) __nanosleep(DELAY_NS);
  }
  DEVICE void hide_part(float (&s)[PART / 2], int half) const {
    const int key = at.first_key + first, query = tile * BLOCK_M + half * PART + z.offset;
    if ((CAUSAL && key + 63 > query) || (TAIL && key + 63 >= z.seq_k))
      hide(s, key + warp * 16 + lane_id() / 4, query + lane_id() % 4 * 2, z.seq_k);
  }

#if D == 256
  // Let the next block add to the same place once this warp's additions are in global memory.
  DEVICE void pass_on() {
    __threadfence();
    __syncwarp();
    if (lane_id() == 0 && added >= 0) add_release(turns + added, 1);
  }
  // If DETERMINISTIC, wait until this warp may add.
  DEVICE void take_turn() {
    if (!DETERMINISTIC) return;
    pass_on();
    if (lane_id() == 0) {
      while (load_acquire(turns + place) != at.first_key / KEYS) {
      }
    }
    __syncwarp();
    added = place;
  }
  // Add 64 of this warp's 128 columns of dq to contiguous global memory, in the order in which the threads hold them:
  // four of a thread, the 32 threads, then the threads' next four.
  template <int HALF>
  DEVICE void add_half(const float (&x)[THREAD_DQ]) {
    float* to = dq + (long long)place * WARP_DQ + lane_id() * 4;
#pragma unroll
    for (int j = HALF * 8; j < HALF * 8 + 8; j++)
      add_float4(to + j * 128, x[4 * j], x[4 * j + 1], x[4 * j + 2], x[4 * j + 3]);
  }
  DEVICE void add_dq(const float (&x)[THREAD_DQ]) {
    take_turn();
    add_half<0>(x);
    add_half<1>(x);
  }
#else
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
  DEVICE void add_dq(const float (&x)[THREAD_DQ]) {
    if (WIDTH < D && w * 64 + warp * 16 >= WIDTH) return;  // D is 128, and this warp's 16 columns are padding
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
#endif
  // Advance to the next tile.
  DEVICE void advance() {
    place += tile == at.first_tile ? 8 * (at.first_tile + 1) : 8;
    i++;
    if (++tile == z.row_tiles) tile = at.first_tile;
  }
  // Add dq of the previous tile and advance to the next.
  DEVICE void end_tile(const float (&before)[THREAD_DQ]) {
    if (i > 0) add_dq(before);
    advance();
  }
};

// Write this warp's 16 keys times `scale`, through 2 KiB of shared memory for each 64 columns.
DEVICE void write(const TensorMap& to, const u32 (&buffers)[COLUMN_BLOCKS], const float (&sum)[WIDTH / 2], float scale,
                  const Consumer& c) {
#pragma unroll
  for (int b = 0; b < COLUMN_BLOCKS; b++) {
    u32 a[16];
#pragma unroll
    for (int i = 0; i < 16; i++) {
      const int x = 32 * b + 2 * i;
      a[i] = x < WIDTH / 2 ? pack(sum[x] * scale, sum[x + 1] * scale) : 0;
    }
    store_operand(buffers[b] + swizzled(lane_id() % 16, lane_id() / 16), a);
  }
  fence_shared_async();
  __syncwarp();
  if (lane_id() == 0) {
#pragma unroll
    for (int b = 0; b < COLUMN_BLOCKS; b++)
      tma_store(to, buffers[b], b * 64, c.at.first_key + c.first + c.warp * 16, c.at.head_kv, c.at.batch);
    bulk_commit();
  }
}

#if D != 256
// Write both sums of this warp's keys.
DEVICE void write_keys(Consumer& c, const TensorMap& dk_map, const TensorMap& dv_map, const float (&dk)[WIDTH / 2],
                       const float (&dv)[WIDTH / 2]) {
  named_sync(5 + c.w, 128);  // all warps of the warpgroup must have read the values
  u32 in_values[COLUMN_BLOCKS], in_dq[COLUMN_BLOCKS];
#pragma unroll
  for (int b = 0; b < COLUMN_BLOCKS; b++) {
    in_values[b] = c.shared + V_AT + b * KEY_BLOCK + (c.w * 64 + c.warp * 16) * 128;
    in_dq[b] = c.dq_buffer() + b * 2048;
  }
  write(dv_map, in_values, dv, 1, c);
  if (lane_id() == 0) bulk_wait_read<1>();  // dq must have left its buffer
  __syncwarp();
  write(dk_map, in_dq, dk, c.z.scale, c);
}
#endif

#if D == 64
#include "backward_64.cuh"
#elif D == 128
#include "backward_128.cuh"
#else
#include "backward_256.cuh"
#endif

// Compute dk and dv, and add dq / scale in fp32 to zeros. q, k, v, dout, dk, dv: maps of (batch, heads, seq, d_head)
// with boxes of 64 columns and BLOCK_M, KEYS, KEYS, BLOCK_M, 16, 16 rows. lse (base 2, +∞ where nothing is seen), delta
// = Σ o · do: padded_q a head, as `attend_prepare` ordered them. Query i sees key j if not CAUSAL or j <= i + offset. TAIL:
// seq_k is no multiple of KEYS. turns, zeros for each WARP_DQ numbers of dq: if DETERMINISTIC.
extern "C" __global__ void __launch_bounds__(384, 1)
    attend_backward(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
                    const __grid_constant__ TensorMap v, const __grid_constant__ TensorMap dout,
                    const __grid_constant__ TensorMap dk_map, const __grid_constant__ TensorMap dv_map,
                    const float* lse, const float* delta, float* dq, u32* turns, const __grid_constant__ Sizes z) {
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
  consume(c, dk_map, dv_map);
  if (lane_id() == 0) bulk_wait_read<0>();
  if (DETERMINISTIC) c.pass_on();
}
