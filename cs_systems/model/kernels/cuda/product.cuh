// Skeleton of kernels that multiply matrices tile by tile, and leave the finished tiles to warps of their own. Method: the
// persistent, warp-specialised product of CUTLASS for Hopper (TMA, wgmma).
//
// A block computes tiles of ROWS x COLUMNS, 128 or 256 columns, of left rightᵀ, or of leftᵀ right where the operands
// lie that way, of PROBLEMS products one after the other. One lane of warpgroup 0 loads both operands, DEPTH of the
// summed dimension at a time, into a ring of STAGES buffers. Warpgroups 1 and 2 own 64 rows each and sum; then they
// write their half of the tile, rounded to bfloat16, to shared memory, and begin the next tile. The first FINISHERS
// warps of warpgroup 0 work on the tile from there, while the tensor cores compute.
//
// LEFT_TRANS, RIGHT_TRANS: 0 where the summed dimension is contiguous in memory, 1 where the other one is. DEPTH is 64
// unless both are 1. CLUSTER = 2: two blocks of one cluster compute tiles one below the other, which need the same part of
// the right operand: each loads half of it for both.
//
// Registers per thread of a product: COLUMNS / 2 for its sum. Shared memory: a stage (ROWS + COLUMNS) · DEPTH · 2 bytes, the
// tile ROWS · COLUMNS · 2, and what the kernel adds behind it.
#pragma once

#include "hopper.cuh"

constexpr int ROWS = 128, WARPGROUP = 128, PRODUCTS = 2, FINISHERS = 3, THREADS = (1 + PRODUCTS) * WARPGROUP;
constexpr int PRODUCT_ROWS = ROWS / PRODUCTS;  // the m of wgmma
constexpr u32 BOX_BYTES = DEPTH * 128;         // 64 rows or columns, DEPTH of the sum
constexpr u32 LEFT_BYTES = ROWS / 64 * BOX_BYTES, STAGE_BYTES = LEFT_BYTES + COLUMNS / 64 * BOX_BYTES;
constexpr u32 HALF_BLOCK_BYTES = PRODUCT_ROWS * 128, HALF_BYTES = COLUMNS / 64 * HALF_BLOCK_BYTES;

// Order of the tiles of one product; those of a cluster count as one.
struct Extent {
  int first_tile;  // number of its first tile
  int down;        // tiles below each other
  int across;      // beside each other
  int together;    // of those beside each other, computed together, for the sake of the L2 cache
};

struct Products {
  TensorMap left[PROBLEMS], right[PROBLEMS];
  Extent extent[PROBLEMS];
  int depth, tiles;  // of the sum; of all products
};

struct Tile {
  int problem, row, column;
};

// Addresses in shared memory: the stages, the halves of the tile, EXTRA_BYTES and EXTRA_BARRIERS of the kernel's own.
template <u32 EXTRA_BYTES, int EXTRA_BARRIERS>
struct SharedMemory {
  u32 base;
  DEVICE u32 left(int stage) const { return base + stage * STAGE_BYTES; }
  DEVICE u32 right(int stage) const { return left(stage) + LEFT_BYTES; }
  DEVICE u32 half(int w) const { return left(STAGES) + w * HALF_BYTES; }
  DEVICE u32 extra() const { return half(PRODUCTS); }
  DEVICE u32 full(int stage) const { return extra() + EXTRA_BYTES + 8 * stage; }
  DEVICE u32 empty(int stage) const { return full(STAGES + stage); }
  DEVICE u32 summed(int w) const { return full(2 * STAGES + w); }       // half w is there
  DEVICE u32 finished(int w) const { return summed(PRODUCTS + w); }     // and has been read
  DEVICE u32 extra_barrier(int i) const { return finished(PRODUCTS + i); }

  DEVICE void init_barriers() const {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(full(i), 1);
      barrier_init(empty(i), CLUSTER == 2 ? 2 * PRODUCTS * 4 : PRODUCTS * 4 * WARP_ARRIVALS);
    }
    for (int w = 0; w < PRODUCTS; w++)
      barrier_init(summed(w), 4 * WARP_ARRIVALS), barrier_init(finished(w), FINISHERS * WARP_ARRIVALS);
    for (int i = 0; i < EXTRA_BARRIERS; i++) barrier_init(extra_barrier(i), 1);
    barrier_init_done();
  }
};

DEVICE u32 cluster_rank() {
  u32 x;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(x));
  return x;
}

DEVICE Tile located(int number, const Products& all, u32 rank) {
  int i = 0;
  while (i + 1 < PROBLEMS && number >= all.extent[i + 1].first_tile) i++;
  const Extent& e = all.extent[i];
  const int rest = number - e.first_tile, per_section = e.together * e.down, section = rest / per_section;
  const int within = rest - section * per_section, here = least(e.together, e.across - section * e.together);
  const int down = within / here, across = section * e.together + within - down * here;
  return {i, (down * CLUSTER + static_cast<int>(rank)) * ROWS, across * COLUMNS};
}

// ---- loading ----

// Load rows of an operand from `row` on, a multiple of 64, for the sum from `k` on.
template <int TRANS>
DEVICE void load_operand(u32 to, const TensorMap& map, u32 barrier, int row, int k) {
  if (TRANS)
    tma_load(to, map, barrier, 0, k, row / 64, 0);
  else
    tma_load(to, map, barrier, k, row, 0, 0);
}

// Load rows of the right operand into this block and, with CLUSTER = 2, into the same place of both blocks.
DEVICE void load_for_cluster(u32 to, const TensorMap& map, u32 barrier, int row, int k) {
#if CLUSTER == 2
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;"
      ::"r"(to), "l"(&map), "r"(barrier), "r"(RIGHT_TRANS ? 0 : k), "r"(RIGHT_TRANS ? k : row),
      "r"(RIGHT_TRANS ? row / 64 : 0), "r"(0), "h"((u16)3)
      : "memory");
#else
  load_operand<RIGHT_TRANS>(to, map, barrier, row, k);
#endif
}

template <typename Shared>
DEVICE void produce(const Products& all, Shared at, int first, int step, u32 rank) {
  RingPlace<STAGES> place;
  for (int number = first; number < all.tiles; number += step) {
    const Tile tile = located(number, all, rank);
    const TensorMap &left = all.left[tile.problem], &right = all.right[tile.problem];
    for (int k = 0; k < all.depth; k += DEPTH) {
      barrier_wait(at.empty(place.stage), place.phase ^ 1);
      const u32 full = at.full(place.stage);
      barrier_expect(full, STAGE_BYTES);
      load_operand<LEFT_TRANS>(at.left(place.stage), left, full, tile.row, k);
      const int part = rank * (COLUMNS / CLUSTER);
      load_for_cluster(at.right(place.stage) + part / 64 * BOX_BYTES, right, full, tile.column + part, k);
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

template <typename Shared>
DEVICE void multiply(const Products& all, Shared at, int w, int first, int step) {
  const int lane = lane_id(), warp = threadIdx.x / 32 % 4;
  constexpr u32 LEFT_STEP = LEFT_TRANS ? 128 : 2, RIGHT_STEP = RIGHT_TRANS ? 128 : 2;  // of 16 of the sum, as in `describe`
  RingPlace<STAGES> place;
  RingPlace<1> written;
  float d[COLUMNS / 2];
  for (int number = first; number < all.tiles; number += step) {
    int before = -1;  // the stage whose products may still run
    for (int k = 0; k < all.depth; k += DEPTH) {
      barrier_wait(at.full(place.stage), place.phase);
      const u64 left = describe(at.left(place.stage) + w * BOX_BYTES), right = describe(at.right(place.stage), BOX_BYTES);
      mma_fence();
#pragma unroll
      for (int i = 0; i < DEPTH / 16; i++)
        mma<LEFT_TRANS, RIGHT_TRANS>(d, left + i * LEFT_STEP, right + i * RIGHT_STEP, k > 0 || i > 0);
      mma_commit();
      mma_wait<1>();
      if (before >= 0) release_stage(at.empty(before));
      before = place.stage;
      place.advance();
    }
    mma_wait<0>();
    hold(d);
    release_stage(at.empty(before));
    barrier_wait(at.finished(w), written.phase ^ 1);
#pragma unroll
    for (int i = 0; i < COLUMNS / 16; i++) {
      const float* sum = d + 8 * i;
      const u32 to = at.half(w) + i / 4 * HALF_BLOCK_BYTES + swizzled(warp * 16 + lane % 16, i % 4 * 2 + lane / 16);
      store_matrix(to, pack(sum[0], sum[1]), pack(sum[2], sum[3]), pack(sum[4], sum[5]), pack(sum[6], sum[7]));
    }
    fence_shared_async();
    release(at.summed(w));
    written.advance();
  }
}

// Return the address of the lane's four columns 4 lane ... 4 lane + 3 of a row of a half; those 128 further are
// 2 HALF_BLOCK_BYTES behind.
DEVICE u32 four_of_row(u32 half, int row) {
  const u32 lane = lane_id();
  return half + lane / 16 * HALF_BLOCK_BYTES + swizzled(row, lane / 2 % 8) + lane % 2 * 8;
}
DEVICE uint2 load_uint2(u32 at) {
  uint2 x;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(at));
  return x;
}
DEVICE float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// ---- work on the rows of the tiles ----

// The rows of one finishing warp, in order, RUN at a time: every FINISHERS-th run of each tile.
template <int RING, int RUN>
struct Walk {
  static constexpr int STEP = RUN * FINISHERS;
  int number, row, first_row;
  Tile tile;
  int slot;  // place of the run in a ring of RING, and the parity of its barrier's phase
  u32 phase;

  DEVICE Walk(const Products& all, int warp, int first, u32 rank)
      : number(first), row(RUN * warp), first_row(RUN * warp), tile(located(first, all, rank)), slot(0), phase(0) {}
  // Go on to the next run; return true if it is in another tile.
  DEVICE bool advance(const Products& all, int step, u32 rank) {
    slot += 1;
    if (slot == RING) slot = 0, phase ^= 1;
    row += STEP;
    if (row < ROWS) return false;
    row = first_row, number += step;
    if (number < all.tiles) tile = located(number, all, rank);
    return true;
  }
};

// Call `load(walk)` RING runs ahead, also behind the last tile, and `use(walk, half)` once the rows of the tile are there.
template <int RING, typename Shared, typename Rows, typename Load, typename Use>
DEVICE void finish_rows(const Products& all, Shared at, Rows here, int step, u32 rank, Load load, Use use) {
  RingPlace<1> read;
  Rows ahead = here;
  for (int i = 0; i < RING; i++, ahead.advance(all, step, rank)) load(ahead);
  while (here.number < all.tiles) {
    const int w = here.row / PRODUCT_ROWS;
    if (here.row % PRODUCT_ROWS < Rows::STEP) barrier_wait(at.summed(w), read.phase);
    use(here, at.half(w));
    if (here.row % PRODUCT_ROWS + Rows::STEP >= PRODUCT_ROWS) release(at.finished(w));
    if (here.row + Rows::STEP >= ROWS) read.advance();
    __syncwarp();  // all lanes have read what was loaded ahead
    load(ahead);
    ahead.advance(all, step, rank);
    here.advance(all, step, rank);
  }
}

DEVICE void cluster_sync() {
#if CLUSTER == 2
  asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}

// Run a block: `finish(warp, first, step, rank)` is the work of each finishing warp on the tiles first, first + step, ...
template <typename Shared, typename Finish>
DEVICE void run_block(const Products& all, Shared at, Finish finish) {
  const u32 rank = CLUSTER == 2 ? cluster_rank() : 0;
  const int warp = uniform(threadIdx.x / 32), warpgroup = warp / 4, first = blockIdx.x / CLUSTER, step = gridDim.x / CLUSTER;
  if (threadIdx.x == 0) at.init_barriers();
  cluster_sync();
  if (warpgroup > 0) {
    multiply(all, at, warpgroup - 1, first, step);
  } else if (warp < FINISHERS) {
    if (first < all.tiles) finish(warp, first, step, rank);
  } else if (lane_id() == 0) {
    produce(all, at, first, step, rank);
  }
  __syncwarp();
  cluster_sync();  // a block may not end while the other still loads into it
}

#if CLUSTER == 2
#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS, 1) __cluster_dims__(2, 1, 1)
#else
#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS, 1)
#endif
