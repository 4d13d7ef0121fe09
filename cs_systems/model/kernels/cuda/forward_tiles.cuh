// Definitions that forward.cu's warps share: sizes, places in shared memory, the tiles of a block; and the warp that
// loads the tiles.
#pragma once

#include "hopper.cuh"

constexpr int ROWS = 64;  // rows of a warpgroup: the m of wgmma
constexpr int WARPGROUP = 128;
constexpr int BLOCKS = D / 64;  // blocks of 64 columns; the products take WIDTH of their D columns
constexpr u32 Q_BYTES = ROWS * D * 2, KV_BYTES = KEYS * D * 2;

struct Sizes {
  int seq_q, seq_k, heads, group, batch_heads;
  int offset;       // key j is visible to query i if not CAUSAL or j <= i + offset
  int first_row;    // first row of the first tile: a multiple of 16, negative if the tiles end with the queries
  int row_tiles;
  int heads_in_l2;  // heads whose keys and values fit the L2 cache together
  float scale_log2;
};

struct Tile {
  int batch, head, row;
};

// Addresses of the tiles and of the barriers in shared memory, from `base`, which is 1024-byte aligned.
struct Shared {
  u32 base;
  DEVICE u32 q(int w) const { return base + w * Q_BYTES; }
  DEVICE u32 o(int w) const { return O_IN_Q ? q(w) : q(CONSUMERS + w); }
  DEVICE u32 k(int stage) const { return q((O_IN_Q ? 1 : 2) * CONSUMERS) + stage * KV_BYTES; }
  DEVICE u32 v(int stage) const { return k(K_STAGES + stage); }
  DEVICE u32 q_full(int w) const { return v(V_STAGES) + 8 * w; }
  DEVICE u32 q_empty(int w) const { return q_full(CONSUMERS + w); }
  DEVICE u32 k_full(int stage) const { return q_full(2 * CONSUMERS + stage); }
  DEVICE u32 k_empty(int stage) const { return k_full(K_STAGES + stage); }
  DEVICE u32 v_full(int stage) const { return k_full(2 * K_STAGES + stage); }
  DEVICE u32 v_empty(int stage) const { return v_full(V_STAGES + stage); }
  DEVICE u32 slot(int w) const { return v_full(2 * V_STAGES + w); }  // place of the tile's number
};

// ---- order of the tiles ----

// The longest causal tiles come first, within the heads whose keys and values fit the L2 cache together.
DEVICE Tile located(int number, const Sizes& sizes) {
  const int per_section = sizes.heads_in_l2 * sizes.row_tiles;
  const int section = number / per_section, rest = number - section * per_section;
  const int first = section * sizes.heads_in_l2, here = least(sizes.heads_in_l2, sizes.batch_heads - first);
  const int row_tile = rest / here, batch_head = first + rest - row_tile * here;
  const int batch = batch_head / sizes.heads;
  const int row = (sizes.row_tiles - 1 - row_tile) * (CONSUMERS * ROWS) + sizes.first_row;
  return {batch, batch_head - batch * sizes.heads, row};
}

// Return the number of tiles of keys that are visible up to query `last_row`: at least one, whose mask may hide all of
// it.
DEVICE int seen_tiles(int last_row, const Sizes& sizes) {
  const int keys = CAUSAL ? least(sizes.seq_k, last_row + sizes.offset + 1) : sizes.seq_k;
  return most((keys + KEYS - 1) / KEYS, 1);
}

// Return the number of these tiles that need no mask from query `row` on.
DEVICE int open_tiles(int row, const Sizes& sizes) {
  const int keys = CAUSAL ? least(sizes.seq_k, row + sizes.offset + 1) : sizes.seq_k;
  return most(keys, 0) / KEYS;
}

// ---- the producer ----

DEVICE void load(const TensorMap& map, u32 to, u32 full, int rows, int row, int head, int batch) {
#pragma unroll
  for (int i = 0; i < BLOCKS; i++) tma_load(to + i * rows * 128, map, full, i * 64, row, head, batch);
}

DEVICE void store_int(u32 at, int x) { asm volatile("st.shared.s32 [%0], %1;" ::"r"(at), "r"(x) : "memory"); }
DEVICE int load_int(u32 at) {
  int x;
  asm volatile("ld.shared.s32 %0, [%1];" : "=r"(x) : "r"(at) : "memory");
  return x;
}

DEVICE void load_q(const TensorMap& map, Shared at, int w, int round, int number, const Tile& tile) {
  barrier_wait(at.q_empty(w), (round & 1) ^ 1);
  store_int(at.slot(w), number);
  barrier_expect(at.q_full(w), Q_BYTES);
  load(map, at.q(w), at.q_full(w), ROWS, tile.row + w * ROWS, tile.head, tile.batch);
}

DEVICE void produce(const TensorMap& q, const TensorMap& k, const TensorMap& v, int* counter, const Sizes& sizes,
                    Shared at) {
  RingPlace<K_STAGES> k_place;
  RingPlace<V_STAGES> v_place;
  for (int round = 0;; round++) {
    const int number = round == 0 ? blockIdx.x : gridDim.x + atomicAdd(counter, 1);
    if (number >= sizes.row_tiles * sizes.batch_heads) {
      for (int w = 0; w < CONSUMERS; w++) {
        barrier_wait(at.q_empty(w), (round & 1) ^ 1);
        store_int(at.slot(w), -1);
        barrier_arrive(at.q_full(w));
      }
      __threadfence();
      if (atomicAdd(counter + 1, 1) == gridDim.x - 1) counter[0] = counter[1] = 0;  // the next launch begins with zeros
      return;
    }
    const Tile tile = located(number, sizes);
    const int kv_head = tile.head / sizes.group;
    const int tiles = seen_tiles(tile.row + CONSUMERS * ROWS - 1, sizes);
    // The first warpgroup can begin once its queries and the keys have arrived; what is free first is loaded first.
    if (!O_IN_Q) load_q(q, at, 0, round, number, tile);
    for (int j = tiles - 1; j >= 0; j--) {
      barrier_wait(at.k_empty(k_place.stage), k_place.phase ^ 1);
      barrier_expect(at.k_full(k_place.stage), KV_BYTES);
      load(k, at.k(k_place.stage), at.k_full(k_place.stage), KEYS, j * KEYS, kv_head, tile.batch);
      k_place.advance();
      if (j == tiles - 1)
        for (int w = O_IN_Q ? 0 : 1; w < CONSUMERS; w++) load_q(q, at, w, round, number, tile);
      barrier_wait(at.v_empty(v_place.stage), v_place.phase ^ 1);
      barrier_expect(at.v_full(v_place.stage), KV_BYTES);
      load(v, at.v(v_place.stage), at.v_full(v_place.stage), KEYS, j * KEYS, kv_head, tile.batch);
      v_place.advance();
    }
  }
}
