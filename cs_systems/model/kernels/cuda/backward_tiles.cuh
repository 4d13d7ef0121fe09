// Tiles of the backward: their places in memory, the products of a warpgroup, and the work of threads between the
// products. See backward.cu.
#pragma once
#include "hopper.cuh"

constexpr int BLOCK_M = QUERIES;  // queries of a tile
constexpr int PARTS = BLOCK_M / PART;  // a product takes PART queries
constexpr int STAGES = 2;
constexpr int COLUMN_BLOCKS = D / 64;  // of 64 columns; the products, but for dq, take WIDTH of their D columns
constexpr u32 KEY_BLOCK = KEYS * 128, QUERY_BLOCK = BLOCK_M * 128;  // bytes of 64 columns
constexpr u32 KEY_TILE = COLUMN_BLOCKS * KEY_BLOCK, QUERY_TILE = COLUMN_BLOCKS * QUERY_BLOCK;
constexpr u32 DS_TILE = BLOCK_M * KEYS * 2;
constexpr int WARP_DQ = BLOCK_M * D / 8;  // elements of a tile's dq that a warp adds
constexpr int THREAD_DQ = WARP_DQ / 32;

// The second warpgroup starts this much later, about a quarter of a tile, so that both do not compute, and then wait for
// the tensor cores, at the same time. On one H100 a backward took up to 5% less with it at d_head 80, 1% at 64 without a
// mask, the same at 128.
constexpr int DELAY_NS = D == 64 && CAUSAL ? 0 : 600;

// Places in shared memory, in bytes from its beginning. Each stage has a full barrier. D = 256 has no room for dq: its
// warps add dq from registers. Instead its warpgroups exchange two tiles of p, as large as ds.
constexpr u32 K_AT = 0, V_AT = K_AT + KEY_TILE, Q_AT = V_AT + KEY_TILE, DO_AT = Q_AT + STAGES * QUERY_TILE,
              DS_AT = DO_AT + STAGES * QUERY_TILE, DQ_AT = DS_AT + 2 * DS_TILE, P_AT = DQ_AT,
              LSE_AT = DQ_AT + (D == 256 ? 2 * DS_TILE : 8 * WARP_DQ * 4),
              DELTA_AT = LSE_AT + STAGES * BLOCK_M * 4, BARRIERS_AT = DELTA_AT + STAGES * BLOCK_M * 4;
constexpr u32 K_FULL = BARRIERS_AT, V_FULL = K_FULL + 8, Q_FULL = V_FULL + 8, DO_FULL = Q_FULL + 8 * STAGES,
              EMPTY = DO_FULL + 8 * STAGES;
static_assert(EMPTY + 8 * STAGES <= SHARED_BYTES, "what the launch asks for");

// ---- products of a warpgroup, each one group of wgmma; the code that needs the result waits for it ----

// Compute s = a bᵀ of 64 keys and PART queries, both by descriptor.
DEVICE void issue_scores(float (&s)[PART / 2], u64 keys, u64 queries) {
  forget(s);
  mma_fence();
#pragma unroll
  for (int k = 0; k < WIDTH / 16; k++)
    mma<0, 0>(s, keys + k / 4 * (KEY_BLOCK >> 4) + k % 4 * 2, queries + k / 4 * (QUERY_BLOCK >> 4) + k % 4 * 2, k > 0);
  mma_commit();
}
#if D == 64
// Compute the same with the keys in registers.
DEVICE void issue_scores(float (&s)[32], const u32 (&keys)[16], u64 queries) {
  forget(s);
  mma_fence();
#pragma unroll
  for (int k = 0; k < 4; k++) mma<0>(s, keys, 4 * k, queries + k * 2, k > 0);
  mma_commit();
}
#endif
// Compute sum += aᵀ b over PART queries: a in registers, b by descriptor.
DEVICE void issue_sum(float (&sum)[WIDTH / 2], const u32 (&a)[PART / 4], u64 b) {
  mma_fence();
#pragma unroll
  for (int k = 0; k < PART / 16; k++) mma<1>(sum, a, 4 * k, b + k * 128, 1);
  mma_commit();
}
// Compute a warpgroup's share of dq, over all keys. d_head 64: ds k of 64 queries, with the keys as rows of ds. 128:
// (ds k)ᵀ of 64 columns of k, with the queries as rows of ds. 256: ds k of 128 columns of k, with the keys as rows of
// ds.
DEVICE void issue_dq(float (&dq)[THREAD_DQ], u64 ds, u64 keys) {
  forget(dq);
  mma_fence();
#pragma unroll
  for (int k = 0; k < KEYS / 16; k++) {
    if (D != 128)
      mma<1, 1>(dq, ds + k * 128, keys + k * 128, k > 0);
    else
      mma<1, 0>(dq, keys + k * 128, ds + k / 4 * (QUERY_BLOCK >> 4) + k % 4 * 2, k > 0);
  }
  mma_commit();
}

// ---- work of threads between the products ----

// Set the scores of hidden keys to −inf. `key`, `query`: those of this thread's first score, with the offset.
DEVICE void hide(float (&s)[PART / 2], int key, int query, int seq_k) {
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int row = key + 8 * h;
    const int hidden = row >= seq_k ? PART : CAUSAL ? row - query : 0;  // columns before this one are hidden
#pragma unroll
    for (int j = 0; j < PART / 8; j++)
#pragma unroll
      for (int l = 0; l < 2; l++)
        if (8 * j + l < hidden) s[4 * j + 2 * h + l] = __int_as_float(0xff800000);
  }
}
// Statistics of this thread's PART / 4 queries, columns 8 j + t % 4 * 2 + l at [2 j + l], in the order of
// `attend_prepare`. A load takes four; AHEAD loads are in flight before the first result is needed. `from`: shared address
// of the first query's statistics, plus 16 bytes for each t % 4.
struct Statistics {
  static constexpr int AHEAD = D == 64 || CAUSAL ? 4 : 3;  // the fastest values on one H200
  u32 at;
  uint4 x[AHEAD];

  DEVICE void load(u32 from) {
    at = from;
#pragma unroll
    for (int i = 0; i < AHEAD; i++) x[i] = load_uint4(at + 64 * i);
  }
  DEVICE void take(float (&four)[4], int i) {
    const uint4 y = x[i % AHEAD];
    four[0] = __uint_as_float(y.x), four[1] = __uint_as_float(y.y);
    four[2] = __uint_as_float(y.z), four[3] = __uint_as_float(y.w);
    if (i + AHEAD < PART / 16) x[i % AHEAD] = load_uint4(at + 64 * (i + AHEAD));
  }
};
// Turn s into p.
DEVICE void weigh(float (&s)[PART / 2], Statistics& lse, float scale_log2) {
#pragma unroll
  for (int i = 0; i < PART / 16; i++) {
    float x[4];
    lse.take(x, i);
#pragma unroll
    for (int j = 8 * i; j < 8 * i + 8; j++) s[j] = exp2_fast(__fmaf_rn(s[j], scale_log2, -x[j / 4 % 2 * 2 + j % 2]));
  }
}
// Turn dp into ds = p (dp − delta).
DEVICE void differentiate(const float (&p)[PART / 2], float (&dp)[PART / 2], Statistics& delta) {
#pragma unroll
  for (int i = 0; i < PART / 16; i++) {
    float x[4];
    delta.take(x, i);
#pragma unroll
    for (int j = 8 * i; j < 8 * i + 8; j++) dp[j] = p[j] * (dp[j] - x[j / 4 % 2 * 2 + j % 2]);
  }
}
DEVICE void to_operand(u32 (&a)[PART / 4], const float (&x)[PART / 2]) {
#pragma unroll
  for (int i = 0; i < PART / 4; i++) a[i] = pack(x[2 * i], x[2 * i + 1]);
}
// Store 16 rows x 64 columns of this warp in a block. `at`: address of this lane's row and chunk.
DEVICE void store_operand(u32 at, const u32 (&a)[16]) {
#pragma unroll
  for (int k = 0; k < 4; k++) store_matrix(at ^ (k << 5), a[4 * k], a[4 * k + 1], a[4 * k + 2], a[4 * k + 3]);
}
// Store PART queries x 16 keys of this warp in a block with the queries as rows. `at`: address of this lane's query and
// chunk.
DEVICE void store_transposed(u32 at, const u32 (&a)[PART / 4]) {
#pragma unroll
  for (int k = 0; k < PART / 16; k++)
    store_matrix_transposed(at + k * 2048, a[4 * k], a[4 * k + 1], a[4 * k + 2], a[4 * k + 3]);
}
// Load what the first of them stores.
DEVICE void load_operand(u32 (&a)[16], u32 at) {
#pragma unroll
  for (int k = 0; k < 4; k++) load_matrix(at ^ (k << 5), a[4 * k], a[4 * k + 1], a[4 * k + 2], a[4 * k + 3]);
}
