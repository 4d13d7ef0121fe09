// Backward of SwiGLU inside the product that makes its gradient: dh = dy w2, with dy (tokens, D) and w2 (D, F), and from it
// d_both (tokens, 2 F), whose columns are the gradients of gate and value in turns, as the columns of both. dh is left,
// rounded to bfloat16, in shared memory (product.cuh), and never written to memory.
//
// Each finishing warp has every FINISHERS-th row of a tile; the copy engine loads its next AHEAD rows of both.
#include "product.cuh"

constexpr u32 ROW_BYTES = 2 * COLUMNS * 2;
constexpr int PARTS = COLUMNS / 128;  // of a row: a lane has four columns of dh of every 128

struct Shared : SharedMemory<FINISHERS * AHEAD * ROW_BYTES, FINISHERS * AHEAD> {
  DEVICE u32 row(int warp, int slot) const { return extra() + (warp * AHEAD + slot) * ROW_BYTES; }
  DEVICE u32 row_full(int warp, int slot) const { return extra_barrier(warp * AHEAD + slot); }
};

struct Sizes {
  int tokens, columns;  // of dh
};

// Return the gradients of gate and value, from the pair of both and the gradient of silu(gate) · value.
DEVICE u32 gradients(u32 pair, float dh) {
  const float2 x = unpack(pair);
  const float sigmoid = reciprocal(1 + exp2_fast(-1.4426950408889634f * x.x)), silu = x.x * sigmoid;
  return pack(dh * x.y * (sigmoid + silu * (1 - sigmoid)), dh * silu);
}

KERNEL gated_backward(const __grid_constant__ Products products, const u16* both, u16* d_both,
                      const __grid_constant__ Sizes sizes) {
  extern __shared__ __align__(1024) char raw[];
  const Shared at{shared_address(raw)};
  typedef Walk<AHEAD> Rows;
  run_block(products, at, [&](int warp, int first, int step, u32 rank) {
    const int lane = lane_id();
    const auto place = [&](const Rows& row) {
      return 2 * (static_cast<long long>(row.tile.row + row.row) * sizes.columns + row.tile.column);
    };
    finish_rows<AHEAD>(
        products, at, Rows(products, warp, first, rank), step, rank,
        [&](const Rows& row) {
          const u32 full = at.row_full(warp, row.slot);
          if (row.tile.row + row.row >= sizes.tokens) return barrier_arrive(full);
          const u32 bytes = least(sizes.columns - row.tile.column, COLUMNS) * 4;
          barrier_expect(full, bytes);
          bulk_load(at.row(warp, row.slot), both + place(row), bytes, full);
        },
        [&](const Rows& row, u32 half) {
          barrier_wait(at.row_full(warp, row.slot), row.phase);
          if (row.tile.row + row.row >= sizes.tokens) return;
          const u32 from = at.row(warp, row.slot) + 16 * lane, there = four_of_row(half, row.row % PRODUCT_ROWS);
          uint4 x[PARTS];
          uint2 g[PARTS];
#pragma unroll
          for (int p = 0; p < PARTS; p++)
            x[p] = load_uint4(from + 512 * p), g[p] = load_uint2(there + 2 * p * HALF_BLOCK_BYTES);
          uint4* to = reinterpret_cast<uint4*>(d_both + place(row)) + lane;
#pragma unroll
          for (int p = 0; p < PARTS; p++) {
            const float2 low = unpack(g[p].x), high = unpack(g[p].y);
            const uint4 y = {gradients(x[p].x, low.x), gradients(x[p].y, low.y), gradients(x[p].z, high.x),
                             gradients(x[p].w, high.y)};
            if (row.tile.column + 128 * p + 4 * lane < sizes.columns) to[32 * p] = y;
          }
        });
  });
}
