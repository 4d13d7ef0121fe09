// Backward of SwiGLU inside the product that makes its gradient: dh = dy w2, with dy (tokens, D) and w2 (D, F), and from it
// d_both (tokens, 2 F), whose columns are the gradients of gate and value in turns, as the columns of both. dh is left,
// rounded to bfloat16, in shared memory (product.cuh), and never written to memory.
//
// Each finishing warp has every FINISHERS-th pair of rows of a tile, and loads its next AHEAD pairs of both. Each lane copies
// what it reads: rows that the copy engine loads wait behind the operands of the product. Both and d_both pass through the
// L2 cache as what is used once, so that the operands stay there.
#include "product.cuh"

constexpr int RUN = 2;  // rows together: the latencies of one hide behind the other
constexpr u32 ROW_BYTES = 2 * COLUMNS * 2;
constexpr int PARTS = COLUMNS / 128;  // of a row: a lane has four columns of dh of every 128

struct Shared : SharedMemory<FINISHERS * AHEAD * RUN * ROW_BYTES, 0> {
  DEVICE u32 row(int warp, int slot) const { return extra() + (warp * AHEAD + slot) * RUN * ROW_BYTES; }
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
  typedef Walk<AHEAD, RUN> Rows;
  run_block(products, at, [&](int warp, int first, int step, u32 rank) {
    const int lane = lane_id();
    const u64 once = read_once();
    const auto place = [&](const Rows& run) {
      return 2 * (static_cast<long long>(run.tile.row + run.row) * sizes.columns + run.tile.column);
    };
    const auto rows_of = [&](const Rows& run) { return least(sizes.tokens - run.tile.row - run.row, RUN); };
    finish_rows<AHEAD>(
        products, at, Rows(products, warp, first, rank), step, rank,
        [&](const Rows& run) {
          if (run.number < products.tiles) {
            const int rows = rows_of(run), columns = sizes.columns - run.tile.column - 4 * lane;
            const u32 to = at.row(warp, run.slot) + 16 * lane;
            const uint4* from = reinterpret_cast<const uint4*>(both + place(run)) + lane;
#pragma unroll
            for (int r = 0; r < RUN; r++)
#pragma unroll
              for (int p = 0; p < PARTS; p++)
                if (r < rows && 128 * p < columns)
                  copy_async(to + r * ROW_BYTES + 512 * p, from + (r * sizes.columns >> 2) + 32 * p, once);
          }
          copy_commit();
        },
        [&](const Rows& run, u32 half) {
          const u32 from = at.row(warp, run.slot) + 16 * lane, there = four_of_row(half, run.row % PRODUCT_ROWS);
          uint4* to = reinterpret_cast<uint4*>(d_both + place(run)) + lane;
          const int rows = rows_of(run), columns = sizes.columns - run.tile.column - 4 * lane;
          uint4 x[RUN][PARTS];
          uint2 g[RUN][PARTS];
          copy_wait<AHEAD - 1>();
#pragma unroll
          for (int r = 0; r < RUN; r++)
#pragma unroll
            for (int p = 0; p < PARTS; p++) {
              x[r][p] = load_uint4(from + r * ROW_BYTES + 512 * p);
              // The swizzle of a row differs from that of the row before, which is even, in the lowest bit.
              g[r][p] = load_uint2((there ^ r << 4) + r * 128 + 2 * p * HALF_BLOCK_BYTES);
            }
#pragma unroll
          for (int r = 0; r < RUN; r++)
#pragma unroll
            for (int p = 0; p < PARTS; p++) {
              const float2 low = unpack(g[r][p].x), high = unpack(g[r][p].y);
              const uint4 y = {gradients(x[r][p].x, low.x), gradients(x[r][p].y, low.y), gradients(x[r][p].z, high.x),
                               gradients(x[r][p].w, high.y)};
              if (r < rows && 128 * p < columns) __stcs(to + (r * sizes.columns >> 2) + 32 * p, y);
            }
        });
  });
}
