// Kernels before and after the backward: row sums and statistics; conversion of dq from fp32. Both are memory-bound.
#include "hopper.cuh"

constexpr int LANES = D / 8;  // lanes per row, with 16 bytes each
constexpr int WARP_DQ = QUERIES * D / 8;  // elements of dq that a warp of the backward adds at once

// Strides of a (batch, heads, rows, d_head) tensor in elements; the last is 1, the others keep rows 16-byte aligned.
struct Strides {
  long long batch, head, row;
};
struct Rows {
  int heads, seq_q, padded_q, d_head;
  float scale;
};

DEVICE float dot(uint4 a, uint4 b) {
  const u32 x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float2 p = unpack(x[i]), q = unpack(y[i]);
    sum += p.x * q.x + p.y * q.y;
  }
  return sum;
}

// Return the place of the statistics of row `at`: within 16 rows, a thread of the backward loads those of rows 2 t,
// 2 t + 1, 2 t + 8 and 2 t + 9 at once.
DEVICE int statistics_place(int at) { return (at & ~15) | (at & 6) << 1 | (at & 8) >> 2 | (at & 1); }

// Compute delta = Σ o · do and lse_log2 = lse / ln 2 (+∞ where no key is visible, so that its weights are 0), both in
// the row order above, and set dq and turns to 0. A block of 256 threads takes PART rows. Sizes per head: lse seq_q;
// lse_log2 and delta padded_q; dq padded_q · D; turns one for each WARP_DQ of dq, or null.
extern "C" __global__ void __launch_bounds__(256)
    attend_prepare(const u16* o, const u16* dout, const float* lse, float* lse_log2, float* delta, float* dq, u32* turns,
            Strides of_o, Strides of_do, Rows z) {
  grid_launch_next();
  const int blocks = z.padded_q / PART, block = blockIdx.x % blocks, batch_head = blockIdx.x / blocks;
  const int batch = batch_head / z.heads, head = batch_head % z.heads;
  const int lane = threadIdx.x % LANES, column = lane * 8;
  o += batch * of_o.batch + head * of_o.head + column;
  dout += batch * of_do.batch + head * of_do.head + column;
  constexpr int TURNS = PART * LANES / 256;
  const float infinity = __int_as_float(0x7f800000);
  uint4 out[TURNS], gradient[TURNS];
  float natural[TURNS];  // of lane 0
#pragma unroll
  for (int turn = 0; turn < TURNS; turn++) {
    const int row = block * PART + (turn * 256 + threadIdx.x) / LANES;
    out[turn] = gradient[turn] = uint4{0, 0, 0, 0};
    natural[turn] = lane == 0 && row < z.seq_q ? lse[(long long)batch_head * z.seq_q + row] : -infinity;
    if (row < z.seq_q && column < z.d_head) {
      out[turn] = *reinterpret_cast<const uint4*>(o + row * of_o.row);
      gradient[turn] = *reinterpret_cast<const uint4*>(dout + row * of_do.row);
    }
  }
  const long long padded = (long long)batch_head * z.padded_q + block * PART;
  float4* zeros = reinterpret_cast<float4*>(dq + padded * D);
#pragma unroll
  for (int i = threadIdx.x; i < PART * WIDTH / 4; i += 256) zeros[i] = float4{0, 0, 0, 0};
  if (turns && threadIdx.x < PART * D / WARP_DQ) turns[padded * D / WARP_DQ + threadIdx.x] = 0;
#pragma unroll
  for (int turn = 0; turn < TURNS; turn++) {
    const int at = (turn * 256 + threadIdx.x) / LANES;
    float sum = dot(out[turn], gradient[turn]);
#pragma unroll
    for (int other = LANES / 2; other > 0; other /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, other);
    if (lane == 0) {
      delta[padded + statistics_place(at)] = sum;
      lse_log2[padded + statistics_place(at)] = natural[turn] == -infinity ? infinity : natural[turn] * 1.4426950408889634f;
    }
  }
}

// Compute dq = scale · summed; a block of 128 threads takes PART rows x 64 columns. `summed` has the order in which the
// backward's warps add: 16 rows each for d_head 64; for 128, transposed, 16 columns each; for 256, 16 rows x 128
// columns.
extern "C" __global__ void __launch_bounds__(128) attend_finish(const float* summed, u16* dq, Strides of_dq, Rows z) {
  __shared__ __align__(1024) unsigned char memory[PART * 128];
  constexpr int COLUMNS = D / 64;
  const int blocks = z.padded_q / PART, index = blockIdx.x / COLUMNS, block = index % blocks;
  const int batch_head = index / blocks, batch = batch_head / z.heads, head = batch_head % z.heads;
  const int first_column = blockIdx.x % COLUMNS * 64;
  const int warp = threadIdx.x / 32, lane = lane_id();
  constexpr int SHARED_COLUMNS = D == 256 ? 2 : 1;  // blocks of 64 columns that a warp of the backward adds at once
  const long long of_warp = (long long)(blockIdx.x / SHARED_COLUMNS) * 4 + warp;
  const float4* from = reinterpret_cast<const float4*>(
      summed + of_warp * WARP_DQ + blockIdx.x % SHARED_COLUMNS * (WARP_DQ / SHARED_COLUMNS));
  float4 x[PART / 8];
  grid_wait();
#pragma unroll
  for (int j = 0; j < PART / 8; j++) {
    const bool padding = WIDTH < D && first_column + warp * 16 >= WIDTH;
    x[j] = padding ? float4{0, 0, 0, 0} : from[j * 32 + lane];
  }
  const u32 shared = shared_address(memory);
#pragma unroll
  for (int k = 0; k < PART / 16; k++) {
    u32 a[4];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float4 y = x[2 * k + i];
      a[2 * i] = pack(y.x * z.scale, y.y * z.scale);
      a[2 * i + 1] = pack(y.z * z.scale, y.w * z.scale);
    }
    if (D != 128)
      store_matrix(shared + warp * 2048 + swizzled(lane % 16, 2 * k + lane / 16), a[0], a[1], a[2], a[3]);
    else
      store_matrix_transposed(shared + swizzled(16 * k + lane / 16 * 8 + lane % 8, 2 * warp + lane / 8 % 2),
                              a[0], a[1], a[2], a[3]);
  }
  __syncthreads();
  const int chunk = threadIdx.x % 8, column = first_column + chunk * 8;
  dq += batch * of_dq.batch + head * of_dq.head + column;
#pragma unroll
  for (int i = 0; i < PART / 16; i++) {
    const int at = i * 16 + threadIdx.x / 8, row = block * PART + at;
    if (row < z.seq_q && column < z.d_head)
      *reinterpret_cast<uint4*>(dq + row * of_dq.row) = load_uint4(shared + swizzled(at, chunk));
  }
}
