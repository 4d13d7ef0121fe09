// SwiGLU's product and activation: both = x wᵀ (tokens, 2 F), whose columns are gate and value in turns, and
// h = silu(gate) · value (tokens, F). x is (tokens, D), w is (2 F, D). The products leave a tile of `both`, rounded to
// bfloat16, in shared memory (product.cuh); there the copy engine stores it, and the finishing warps compute h from it.
#include "product.cuh"

typedef SharedMemory<0, 0> Shared;
static_assert(COLUMNS == 256);  // eight of a lane

struct Sizes {
  int tokens, columns;  // of both
};

// Return silu(gate) · value of a pair, gate in the lower half.
DEVICE float activate(u32 pair) {
  const float2 x = unpack(pair);
  return x.x * reciprocal(1 + exp2_fast(-1.4426950408889634f * x.x)) * x.y;
}

KERNEL gated_forward(const __grid_constant__ Products products, const __grid_constant__ TensorMap both, u16* h,
                     const __grid_constant__ Sizes sizes) {
  extern __shared__ __align__(1024) char raw[];
  const Shared at{shared_address(raw)};
  run_block(products, at, [&](int warp, int first, int step, u32 rank) {
    const int lane = lane_id();
    RingPlace<1> read;
    for (int number = first; number < products.tiles; number += step) {
      const Tile tile = located(number, products, rank);
      const int column = tile.column + 8 * lane;
      for (int w = 0; w < PRODUCTS; w++) {
        const int row = tile.row + w * PRODUCT_ROWS;
        barrier_wait(at.summed(w), read.phase);
        if (warp == 0 && lane == 0) {
          for (int i = 0; i < COLUMNS / 64; i++)
            tma_store(both, at.half(w) + i * HALF_BLOCK_BYTES, tile.column + i * 64, row, 0, 0);
          bulk_commit();
        }
#pragma unroll 2
        for (int r = warp; r < PRODUCT_ROWS; r += FINISHERS) {
          const uint4 x = load_uint4(at.half(w) + lane / 8 * HALF_BLOCK_BYTES + swizzled(r, lane % 8));
          const uint2 y = {pack(activate(x.x), activate(x.y)), pack(activate(x.z), activate(x.w))};
          const long long place = static_cast<long long>(row + r) * (sizes.columns / 2) + column / 2;
          if (row + r < sizes.tokens && column < sizes.columns) *reinterpret_cast<uint2*>(h + place) = y;
        }
        if (warp == 0 && lane == 0) bulk_wait_read<0>();
        release(at.finished(w));
      }
      read.advance();
    }
    if (warp == 0 && lane == 0) bulk_wait<0>();
  });
}
