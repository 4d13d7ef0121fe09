// AdamW of several weights, inside the products that make their gradients: w (rows, columns) is updated with d_outᵀ x,
// where d_out is (tokens, rows) and x is (tokens, columns). No gradient of a weight is written to memory. Method: the
// persistent, warp-specialised product of CUTLASS for Hopper (TMA, wgmma), with the update as the work of warps of its own.
//
// A block computes tiles of ROWS x COLUMNS, PROBLEMS weights one after the other. One lane of warpgroup 0 loads d_out
// and x, TOKENS at a time, into a ring of STAGES buffers. Warpgroups 1 and 2 own 64 rows each and sum over all tokens;
// then they write the gradient, rounded to bfloat16, to shared memory, and begin the next tile. The other warps of
// warpgroup 0 update the weight from there, so that the bytes of the update move while the tensor cores compute.
//
// CLUSTER = 2: two blocks of one cluster compute tiles one below the other, which need the same columns of x: each loads
// half of them for both.
//
// Each warp of the update has every UPDATERS-th row of a tile. The copy engine loads weight, remainder and moments of its
// next AHEAD rows into shared memory, ahead of their gradients: loads into registers would share one scoreboard, so that
// a wait for the oldest would be one for all.
//
// Registers per thread of a product: COLUMNS / 2 for its sum. Shared memory: a stage (ROWS + COLUMNS) · TOKENS · 2 bytes,
// the gradient ROWS · COLUMNS · 2, and UPDATERS · AHEAD rows of COLUMNS · 12 bytes (8 with moments in bfloat16).
#include "hopper.cuh"

constexpr int ROWS = 128, COLUMNS = 256, WARPGROUP = 128, PRODUCTS = 2, UPDATERS = 3;
constexpr int PRODUCT_ROWS = ROWS / PRODUCTS;  // the m of wgmma
constexpr u32 BOX_BYTES = TOKENS * 128;        // 64 rows or columns, TOKENS tokens
constexpr u32 LEFT_BYTES = ROWS / 64 * BOX_BYTES, STAGE_BYTES = LEFT_BYTES + COLUMNS / 64 * BOX_BYTES;
constexpr u32 GRADIENT_BLOCK_BYTES = PRODUCT_ROWS * 128, GRADIENT_BYTES = COLUMNS / 64 * GRADIENT_BLOCK_BYTES;
constexpr u32 MOMENT_BYTES = BF16_STATE ? 2 : 4, ROW_BYTES = COLUMNS * (2 + 2 + 2 * MOMENT_BYTES);
constexpr int PARTS = COLUMNS / 128;  // of a row: a lane updates four columns of every 128

struct Weight {
  u16* upper;    // the weight, rounded to bfloat16
  short* lower;  // what its bits in float32 lack
  void *first, *second;  // moments
  int rows, columns;
  int first_tile;  // number of its first tile
  int down;        // its tiles (of a cluster) below each other
  int across;      // beside each other
  int together;    // of those beside each other, computed together, for the sake of the L2 cache
};

struct Weights {
  TensorMap d_out[PROBLEMS], x[PROBLEMS];
  Weight weight[PROBLEMS];
  int tokens, tiles;
};

struct Tile {
  int weight, row, column;
};

// Position in a ring of buffers, and the parity of its barriers' phase.
template <int SIZE>
struct Place {
  int stage = 0;
  u32 phase = 0;
  DEVICE void advance() {
    stage += 1;
    if (stage == SIZE) stage = 0, phase ^= 1;
  }
};

struct Shared {
  u32 base;
  DEVICE u32 left(int stage) const { return base + stage * STAGE_BYTES; }
  DEVICE u32 right(int stage) const { return left(stage) + LEFT_BYTES; }
  DEVICE u32 gradient(int w) const { return left(STAGES) + w * GRADIENT_BYTES; }
  DEVICE u32 full(int stage) const { return row(UPDATERS, 0) + 8 * stage; }
  DEVICE u32 empty(int stage) const { return full(STAGES + stage); }
  DEVICE u32 summed(int w) const { return full(2 * STAGES + w); }       // the gradient of product w is there
  DEVICE u32 updated(int w) const { return summed(PRODUCTS + w); }      // and has been read
  DEVICE u32 row(int warp, int slot) const { return gradient(PRODUCTS) + (warp * AHEAD + slot) * ROW_BYTES; }
  DEVICE u32 row_full(int warp, int slot) const { return updated(PRODUCTS + warp * AHEAD + slot); }
};

DEVICE int least(int a, int b) { return a < b ? a : b; }

DEVICE u32 cluster_rank() {
  u32 x;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(x));
  return x;
}

DEVICE Tile located(int number, const Weights& all, u32 rank) {
  int i = 0;
  while (i + 1 < PROBLEMS && number >= all.weight[i + 1].first_tile) i++;
  const Weight& w = all.weight[i];
  const int rest = number - w.first_tile, per_section = w.together * w.down, section = rest / per_section;
  const int within = rest - section * per_section, here = least(w.together, w.across - section * w.together);
  const int down = within / here, across = section * w.together + within - down * here;
  return {i, (down * CLUSTER + static_cast<int>(rank)) * ROWS, across * COLUMNS};
}

// ---- loading ----

// Load columns of x into this block and, with CLUSTER = 2, into the same place of both blocks. `column` counts by 64.
DEVICE void load_for_cluster(u32 to, const TensorMap& map, u32 barrier, int column, int row) {
#if CLUSTER == 2
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%4, %3, %5, %4}], [%2], %6;"
      ::"r"(to), "l"(&map), "r"(barrier), "r"(row), "r"(0), "r"(column), "h"((u16)3)
      : "memory");
#else
  tma_load(to, map, barrier, 0, row, column, 0);
#endif
}

DEVICE void produce(const Weights& all, Shared at, int first, int step, u32 rank) {
  Place<STAGES> place;
  for (int number = first; number < all.tiles; number += step) {
    const Tile tile = located(number, all, rank);
    const TensorMap &d_out = all.d_out[tile.weight], &x = all.x[tile.weight];
    for (int token = 0; token < all.tokens; token += TOKENS) {
      barrier_wait(at.empty(place.stage), place.phase ^ 1);
      const u32 full = at.full(place.stage);
      barrier_expect(full, STAGE_BYTES);
      tma_load(at.left(place.stage), d_out, full, 0, token, tile.row / 64, 0);
      const int part = rank * (COLUMNS / 64 / CLUSTER);
      load_for_cluster(at.right(place.stage) + part * BOX_BYTES, x, full, tile.column / 64 + part, token);
      place.advance();
    }
  }
}

// ---- a product ----

// Let the loaders of all blocks of the cluster fill a stage again.
DEVICE void release_stage(u32 empty) {
#if CLUSTER == 2
  __syncwarp();
  if (lane_id() < 2)
    asm volatile(
        "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; mbarrier.arrive.shared::cluster.b64 _, [there]; }"
        ::"r"(empty), "r"(lane_id())
        : "memory");
#else
  release(empty);
#endif
}

DEVICE void multiply(const Weights& all, Shared at, int w, int first, int step) {
  const int lane = lane_id(), warp = threadIdx.x / 32 % 4;
  Place<STAGES> place;
  Place<1> written;
  float d[COLUMNS / 2];
  for (int number = first; number < all.tiles; number += step) {
    int before = -1;  // the stage whose products may still run
    for (int token = 0; token < all.tokens; token += TOKENS) {
      barrier_wait(at.full(place.stage), place.phase);
      const u64 left = describe(at.left(place.stage) + w * BOX_BYTES), right = describe(at.right(place.stage), BOX_BYTES);
      mma_fence();
#pragma unroll
      for (int i = 0; i < TOKENS / 16; i++) mma<1, 1>(d, left + i * 128, right + i * 128, token > 0 || i > 0);
      mma_commit();
      mma_wait<1>();
      if (before >= 0) release_stage(at.empty(before));
      before = place.stage;
      place.advance();
    }
    mma_wait<0>();
    hold(d);
    release_stage(at.empty(before));
    barrier_wait(at.updated(w), written.phase ^ 1);
#pragma unroll
    for (int i = 0; i < COLUMNS / 16; i++) {
      const float* sum = d + 8 * i;
      const u32 to = at.gradient(w) + i / 4 * GRADIENT_BLOCK_BYTES + swizzled(warp * 16 + lane % 16, i % 4 * 2 + lane / 16);
      store_matrix(to, pack(sum[0], sum[1]), pack(sum[2], sum[3]), pack(sum[4], sum[5]), pack(sum[6], sum[7]));
    }
    release(at.summed(w));
    written.advance();
  }
}

// ---- the update ----

struct Settings {
  float lr, rate1, rate2, eps, decay;  // rate: 1 - beta
};

struct Step {
  Settings s;
  float kept, size, inverse2;  // what decay leaves of a weight; lr / (1 - beta1^t); 1 / (1 - beta2^t)
  u32 salt;
};

DEVICE float square_root(float x) {
  float y;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEVICE float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

DEVICE u32 random_bits(u32 i, u32 salt) {  // as in kernels/adamw.py
  u32 x = i * 0x9E3779B1u + salt;
  x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
  x = (x ^ (x >> 13)) * 0xC2B2AE35u;
  return x ^ (x >> 16);
}

#if BF16_STATE
typedef uint2 Moments;  // four
DEVICE float moment(const Moments& x, int i) {
  const u32 pair = i / 2 ? x.y : x.x;
  return __uint_as_float(i % 2 ? pair & 0xffff0000u : pair << 16);
}
#else
typedef float4 Moments;
DEVICE float moment(const Moments& x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }
#endif

// Return element i of four in bfloat16, as float32.
DEVICE float element(uint2 four, int i) {
  const u32 pair = i / 2 ? four.y : four.x;
  return __uint_as_float(i % 2 ? pair & 0xffff0000u : pair << 16);
}
DEVICE int remainder(uint2 four, int i) {
  const int pair = i / 2 ? four.y : four.x;
  return i % 2 ? pair >> 16 : static_cast<short>(pair);
}
DEVICE uint2 halves(const u32 (&x)[4]) {
  return {__byte_perm(x[0], x[1], 0x5410), __byte_perm(x[2], x[3], 0x5410)};
}

// Four adjacent elements of a weight, as they lie in memory.
struct Four {
  uint2 upper, lower;
  Moments first, second;

  // Update with the gradients g, in bfloat16; i: the number of the first element.
  DEVICE void update(uint2 g, const Step& step, u32 i) {
    u32 m_bits[4], v_bits[4], high[4], low[4];
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const float gradient = element(g, e);
      float w = __uint_as_float(__float_as_uint(element(upper, e)) + remainder(lower, e));
      float m = moment(first, e), v = moment(second, e);
      m += step.s.rate1 * (gradient - m);
      v += step.s.rate2 * (gradient * gradient - v);
      w *= step.kept;
      w -= step.size * m * reciprocal(square_root(v * step.inverse2) + step.s.eps);
      m_bits[e] = __float_as_uint(m), v_bits[e] = __float_as_uint(v);
#if BF16_STATE
      const u32 noise = random_bits(i + e, step.salt);
      m_bits[e] = (m_bits[e] + (noise & 0xffff)) >> 16, v_bits[e] = (v_bits[e] + (noise >> 16)) >> 16;
#endif
      low[e] = __float_as_uint(w);
      high[e] = (low[e] + 0x8000) >> 16;  // the lower half of w is its difference from these, as int16
    }
    upper = halves(high), lower = halves(low);
#if BF16_STATE
    first = halves(m_bits), second = halves(v_bits);
#else
    first = {__uint_as_float(m_bits[0]), __uint_as_float(m_bits[1]), __uint_as_float(m_bits[2]), __uint_as_float(m_bits[3])};
    second = {__uint_as_float(v_bits[0]), __uint_as_float(v_bits[1]), __uint_as_float(v_bits[2]), __uint_as_float(v_bits[3])};
#endif
  }
};

DEVICE uint2 load_uint2(u32 at) {
  uint2 x;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(at));
  return x;
}

DEVICE float4 load_float4(u32 at) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(at));
  return x;
}
DEVICE void load_moments(Moments& to, u32 at) {
#if BF16_STATE
  to = load_uint2(at);
#else
  to = load_float4(at);
#endif
}

// The rows that one warp updates, in order: of each tile every UPDATERS-th. It points to the lane's elements.
struct Walk {
  int number, row, first_row;
  uint2 *upper, *lower;
  Moments *first, *second;
  u32 i, salt;        // number of the lane's first element of the row
  int rows, columns;  // of the weight, from the tile's first row and first column on
  int stride;         // from a row to the next one of this warp, in fours
  int slot;           // place of the row in shared memory
  u32 phase;

  DEVICE void begin(const Weights& all, u32 rank, u32 salt_of_step) {
    row = first_row;
    if (number >= all.tiles) return;
    const Tile tile = located(number, all, rank);
    const Weight& w = all.weight[tile.weight];
    rows = w.rows - tile.row, columns = w.columns - tile.column, stride = UPDATERS * w.columns / 4;
    i = static_cast<u32>(tile.row + row) * w.columns + tile.column + 4 * lane_id();
    salt = (salt_of_step + tile.weight) * 0x27D4EB2Fu;
    const long long four = i / 4;
    upper = reinterpret_cast<uint2*>(w.upper) + four, lower = reinterpret_cast<uint2*>(w.lower) + four;
    first = static_cast<Moments*>(w.first) + four, second = static_cast<Moments*>(w.second) + four;
  }
  DEVICE void advance(const Weights& all, int step, u32 rank, u32 salt_of_step) {
    slot += 1;
    if (slot == AHEAD) slot = 0, phase ^= 1;
    row += UPDATERS, i += 4 * stride;
    upper += stride, lower += stride, first += stride, second += stride;
    if (row < ROWS) return;
    number += step;
    begin(all, rank, salt_of_step);
  }
};

// Let the copy engine load a row; called by one lane.
DEVICE void load_row(const Walk& at, u32 to, u32 full) {
  if (at.row >= at.rows) return barrier_arrive(full);
  const int columns = least(at.columns, COLUMNS);
  barrier_expect(full, columns * ROW_BYTES / COLUMNS);
  bulk_load(to, at.upper, columns * 2, full);
  bulk_load(to + COLUMNS * 2, at.lower, columns * 2, full);
  bulk_load(to + COLUMNS * 4, at.first, columns * MOMENT_BYTES, full);
  bulk_load(to + COLUMNS * (4 + MOMENT_BYTES), at.second, columns * MOMENT_BYTES, full);
}

// Update a row whose elements lie at `from`, with the gradients of the warpgroup that multiplied it.
DEVICE void update_row(const Walk& at, u32 from, u32 full, u32 gradient, Step& step) {
  barrier_wait(full, at.phase);
  if (at.row >= at.rows) return;
  const u32 lane = lane_id();
  // The lane's columns 128 p + 4 lane lie in half a chunk of 8.
  const u32 there = gradient + lane / 16 * GRADIENT_BLOCK_BYTES + swizzled(at.row % PRODUCT_ROWS, lane / 2 % 8) + lane % 2 * 8;
  step.salt = at.salt;
  Four part[PARTS];
  uint2 g[PARTS];
#pragma unroll
  for (int p = 0; p < PARTS; p++) {
    const u32 four = 32 * p + lane;
    g[p] = load_uint2(there + 2 * p * GRADIENT_BLOCK_BYTES);
    part[p].upper = load_uint2(from + 8 * four), part[p].lower = load_uint2(from + COLUMNS * 2 + 8 * four);
    load_moments(part[p].first, from + COLUMNS * 4 + 4 * MOMENT_BYTES * four);
    load_moments(part[p].second, from + COLUMNS * (4 + MOMENT_BYTES) + 4 * MOMENT_BYTES * four);
  }
#pragma unroll
  for (int p = 0; p < PARTS; p++) part[p].update(g[p], step, at.i + 128 * p);
#pragma unroll
  for (int p = 0; p < PARTS; p++) {
    if (128 * p + 4 * lane >= at.columns) continue;
    __stcs(at.upper + 32 * p, part[p].upper), __stcs(at.lower + 32 * p, part[p].lower);
    __stcs(at.first + 32 * p, part[p].first), __stcs(at.second + 32 * p, part[p].second);
  }
}

DEVICE void update(const Weights& all, Shared at, int warp, const Settings& s, const double* progress, int first, int step,
                   u32 rank) {
  Step now{s, 1 - s.lr * s.decay, s.lr / static_cast<float>(progress[1]), 1 / static_cast<float>(progress[2])};
  const u32 salt = static_cast<u32>(progress[0]) * 0x85EBCA77u;
  Place<1> read;
  Walk here{first, warp, warp};
  here.slot = 0, here.phase = 0;
  here.begin(all, rank, salt);
  Walk ahead = here;
  for (int i = 0; i < AHEAD && ahead.number < all.tiles; i++, ahead.advance(all, step, rank, salt))
    if (lane_id() == 0) load_row(ahead, at.row(warp, ahead.slot), at.row_full(warp, ahead.slot));
  while (here.number < all.tiles) {
    const int w = here.row / PRODUCT_ROWS;
    if (here.row % PRODUCT_ROWS < UPDATERS) barrier_wait(at.summed(w), read.phase);
    update_row(here, at.row(warp, here.slot), at.row_full(warp, here.slot), at.gradient(w), now);
    if (here.row % PRODUCT_ROWS + UPDATERS >= PRODUCT_ROWS) release(at.updated(w));
    if (here.row + UPDATERS >= ROWS) read.advance();
    __syncwarp();  // the row has been read by all lanes
    if (ahead.number < all.tiles) {
      if (lane_id() == 0) load_row(ahead, at.row(warp, ahead.slot), at.row_full(warp, ahead.slot));
      ahead.advance(all, step, rank, salt);
    }
    here.advance(all, step, rank, salt);
  }
}

DEVICE void cluster_sync() {
#if CLUSTER == 2
  asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}

constexpr int THREADS = (1 + PRODUCTS) * WARPGROUP;

extern "C" __global__ void __launch_bounds__(THREADS, 1)
#if CLUSTER == 2
    __cluster_dims__(2, 1, 1)
#endif
    update_weights(const __grid_constant__ Weights all, const Settings* settings, const double* progress) {
  extern __shared__ __align__(1024) char raw[];
  const Shared at{shared_address(raw)};
  const int warpgroup = uniform(threadIdx.x / WARPGROUP);
  const u32 rank = CLUSTER == 2 ? cluster_rank() : 0;
  const int first = blockIdx.x / CLUSTER, step = gridDim.x / CLUSTER;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(at.full(i), 1);
      barrier_init(at.empty(i), CLUSTER == 2 ? 2 * PRODUCTS * 4 : PRODUCTS * 4 * WARP_ARRIVALS);
    }
    for (int w = 0; w < PRODUCTS; w++)
      barrier_init(at.summed(w), 4 * WARP_ARRIVALS), barrier_init(at.updated(w), UPDATERS * WARP_ARRIVALS);
    for (int warp = 0; warp < UPDATERS; warp++)
      for (int slot = 0; slot < AHEAD; slot++) barrier_init(at.row_full(warp, slot), 1);
    barrier_init_done();
  }
  cluster_sync();
  const int warp = uniform(threadIdx.x / 32);
  if (warpgroup > 0) {
    multiply(all, at, warpgroup - 1, first, step);
  } else if (warp < UPDATERS) {
    if (first < all.tiles) update(all, at, warp, *settings, progress, first, step, rank);
  } else if (lane_id() == 0) {
    produce(all, at, first, step, rank);
  }
  __syncwarp();
  cluster_sync();  // a block may not end while the other still loads into it
}
