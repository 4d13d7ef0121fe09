// AdamW of several weights, inside the products that make their gradients: w (rows, columns) is updated with d_outᵀ x,
// where d_out is (tokens, rows) and x is (tokens, columns). No gradient of a weight is written to memory: the products
// leave it, rounded to bfloat16, in shared memory (product.cuh), and the finishing warps update the weight from there, so
// that the bytes of the update move while the tensor cores compute.
//
// Each of these warps has every FINISHERS-th row of a tile. The copy engine loads weight, remainder and moments of its next
// AHEAD rows into shared memory, ahead of their gradients: loads into registers would share one scoreboard, so that a wait
// for the oldest would be one for all. A row is COLUMNS · 12 bytes, 8 with moments in bfloat16.
#include "product.cuh"

constexpr u32 MOMENT_BYTES = BF16_STATE ? 2 : 4, ROW_BYTES = COLUMNS * (2 + 2 + 2 * MOMENT_BYTES);
constexpr int PARTS = COLUMNS / 128;  // of a row: a lane updates four columns of every 128

struct Weight {
  u16* upper;            // the weight, rounded to bfloat16
  short* lower;          // what its bits in float32 lack
  void *first, *second;  // moments
  int rows, columns;
};

struct Weights {
  Weight weight[PROBLEMS];
};

struct Shared : SharedMemory<FINISHERS * AHEAD * ROW_BYTES, FINISHERS * AHEAD> {
  DEVICE u32 row(int warp, int slot) const { return extra() + (warp * AHEAD + slot) * ROW_BYTES; }
  DEVICE u32 row_full(int warp, int slot) const { return extra_barrier(warp * AHEAD + slot); }
};

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
DEVICE u32 random_bits(u32 i, u32 salt) {  // as in kernels/triton/adamw.py
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

// The rows that one warp updates. It points to the lane's elements of the row.
struct Rows : Walk<AHEAD, 1> {
  const Weights& weights;
  uint2 *upper, *lower;
  Moments *first, *second;
  u32 i, salt, salt_of_step;  // i: number of the lane's first element
  int rows, columns;          // of the weight, from the tile's first row and first column on
  int stride;                 // from a row to the next one of this warp, in fours

  DEVICE Rows(const Products& all, const Weights& weights, int warp, int first, u32 rank, u32 salt_of_step)
      : Walk(all, warp, first, rank), weights(weights), salt_of_step(salt_of_step) {
    point();
  }
  DEVICE void point() {
    const Weight& w = weights.weight[tile.problem];
    rows = w.rows - tile.row, columns = w.columns - tile.column, stride = FINISHERS * w.columns / 4;
    i = static_cast<u32>(tile.row + row) * w.columns + tile.column + 4 * lane_id();
    salt = (salt_of_step + tile.problem) * 0x27D4EB2Fu;
    const long long four = i / 4;
    upper = reinterpret_cast<uint2*>(w.upper) + four, lower = reinterpret_cast<uint2*>(w.lower) + four;
    first = static_cast<Moments*>(w.first) + four, second = static_cast<Moments*>(w.second) + four;
  }
  DEVICE void advance(const Products& all, int step, u32 rank) {
    i += 4 * stride, upper += stride, lower += stride, first += stride, second += stride;
    if (Walk::advance(all, step, rank)) point();
  }
};

// Let the copy engine load a row; called by one lane.
DEVICE void load_row(const Rows& at, u32 to, u32 full) {
  if (at.row >= at.rows) return barrier_arrive(full);
  const int columns = least(at.columns, COLUMNS);
  barrier_expect(full, columns * ROW_BYTES / COLUMNS);
  bulk_load(to, at.upper, columns * 2, full);
  bulk_load(to + COLUMNS * 2, at.lower, columns * 2, full);
  bulk_load(to + COLUMNS * 4, at.first, columns * MOMENT_BYTES, full);
  bulk_load(to + COLUMNS * (4 + MOMENT_BYTES), at.second, columns * MOMENT_BYTES, full);
}

// Update a row whose elements lie at `from`, with the gradients of the warpgroup that multiplied it.
DEVICE void update_row(const Rows& at, u32 from, u32 full, u32 gradient, Step& step) {
  barrier_wait(full, at.phase);
  if (at.row >= at.rows) return;
  const u32 lane = lane_id(), there = four_of_row(gradient, at.row % PRODUCT_ROWS);
  step.salt = at.salt;
  Four part[PARTS];
  uint2 g[PARTS];
#pragma unroll
  for (int p = 0; p < PARTS; p++) {
    const u32 four = 32 * p + lane;
    g[p] = load_uint2(there + 2 * p * HALF_BLOCK_BYTES);
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

KERNEL update_weights(const __grid_constant__ Products products, const __grid_constant__ Weights weights,
                      const Settings* settings, const double* progress) {
  extern __shared__ __align__(1024) char raw[];
  const Shared at{shared_address(raw)};
  run_block(products, at, [&](int warp, int first, int step, u32 rank) {
    const Settings& s = *settings;
    Step now{s, 1 - s.lr * s.decay, s.lr / static_cast<float>(progress[1]), 1 / static_cast<float>(progress[2])};
    const Rows begin(products, weights, warp, first, rank, static_cast<u32>(progress[0]) * 0x85EBCA77u);
    finish_rows<AHEAD>(
        products, at, begin, step, rank,
        [&](const Rows& row) {
          if (lane_id() == 0 && row.number < products.tiles)
            load_row(row, at.row(warp, row.slot), at.row_full(warp, row.slot));
        },
        [&](const Rows& row, u32 half) {
          update_row(row, at.row(warp, row.slot), at.row_full(warp, row.slot), half, now);
        });
  });
}
