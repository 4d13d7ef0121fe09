// The tiles of the backward: where they lie, the products of a warpgroup, and what threads do between them. See
// backward.cu.
#pragma once
#include "hopper.cuh"

constexpr int BLOCK_M = D == 64 ? 128 : 64;  // queries of a tile
constexpr int HALVES = BLOCK_M / 64;
constexpr int KEYS = 128;
constexpr int STAGES = 2;
constexpr int COLUMN_BLOCKS = D / 64;
constexpr u32 KEY_BLOCK = KEYS * 128, QUERY_BLOCK = BLOCK_M * 128;  // bytes of 64 columns
constexpr u32 KEY_TILE = COLUMN_BLOCKS * KEY_BLOCK, QUERY_TILE = COLUMN_BLOCKS * QUERY_BLOCK;

// Shared memory, in bytes from its beginning. Each full barrier: of a stage.
constexpr u32 K_AT = 0, V_AT = K_AT + KEY_TILE, Q_AT = V_AT + KEY_TILE, DO_AT = Q_AT + STAGES * QUERY_TILE,
              DS_AT = DO_AT + STAGES * QUERY_TILE, DQ_AT = DS_AT + 2 * HALVES * KEY_BLOCK, LSE_AT = DQ_AT + 8 * 4096,
              DELTA_AT = LSE_AT + STAGES * BLOCK_M * 4, BARRIERS_AT = DELTA_AT + STAGES * BLOCK_M * 4;
constexpr u32 K_FULL = BARRIERS_AT, V_FULL = K_FULL + 8, Q_FULL = V_FULL + 8, DO_FULL = Q_FULL + 8 * STAGES,
              EMPTY = DO_FULL + 8 * STAGES;
static_assert(EMPTY + 8 * STAGES <= SHARED_BYTES, "what the launch asks for");

// ---- products of a warpgroup, each one group of wgmma: issued here, waited for where the result is needed ----

// s = a bᵀ of 64 keys, described, and 64 queries.
DEVICE void issue_scores(float (&s)[32], u64 keys, u64 queries) {
  forget(s);
  mma_fence();
#pragma unroll
  for (int k = 0; k < D / 16; k++)
    mma<0, 0>(s, keys + k / 4 * (KEY_BLOCK >> 4) + k % 4 * 2, queries + k / 4 * (QUERY_BLOCK >> 4) + k % 4 * 2, k > 0);
  mma_commit();
}
// The same with the keys in registers.
DEVICE void issue_scores(float (&s)[32], const u32 (&keys)[16], u64 queries) {
  forget(s);
  mma_fence();
#pragma unroll
  for (int k = 0; k < 4; k++) mma<0>(s, keys, 4 * k, queries + k * 2, k > 0);
  mma_commit();
}
// sum += aᵀ b over 64 queries: a in registers, b described.
DEVICE void issue_sum(float (&sum)[D / 2], const u32 (&a)[16], u64 b) {
  mma_fence();
#pragma unroll
  for (int k = 0; k < 4; k++) mma<1>(sum, a, 4 * k, b + k * 128, 1);
  mma_commit();
}
// dq = ds k of 64 queries and 64 columns, over all keys.
DEVICE void issue_dq(float (&dq)[32], u64 ds, u64 keys) {
  forget(dq);
  mma_fence();
#pragma unroll
  for (int k = 0; k < KEYS / 16; k++) mma<1, 1>(dq, ds + k * 128, keys + k * 128, k > 0);
  mma_commit();
}

// ---- what threads do between the products ----

// Scores of hidden keys become −inf. `key` and `query`: of this thread's first score, the latter less the offset.
DEVICE void hide(float (&s)[32], int key, int query, int seq_k) {
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int row = key + 8 * h;
    const int hidden = row >= seq_k ? 64 : CAUSAL ? row - query : 0;  // columns left of this one are
#pragma unroll
    for (int j = 0; j < 8; j++)
#pragma unroll
      for (int l = 0; l < 2; l++)
        if (8 * j + l < hidden) s[4 * j + 2 * h + l] = __int_as_float(0xff800000);
  }
}
// Statistics of this thread's 16 of 64 queries, columns 8 j + t % 4 * 2 + l at [2 j + l]: as `prepare` ordered them.
// `at`: shared address of the 64, plus 16 bytes for each t % 4.
DEVICE void load_statistics(float (&x)[16], u32 at) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const uint4 y = load_uint4(at + 64 * i);
    x[4 * i] = __uint_as_float(y.x), x[4 * i + 1] = __uint_as_float(y.y);
    x[4 * i + 2] = __uint_as_float(y.z), x[4 * i + 3] = __uint_as_float(y.w);
  }
}
// s becomes p.
DEVICE void weigh(float (&s)[32], const float (&lse)[16], float scale_log2) {
#pragma unroll
  for (int i = 0; i < 32; i++) s[i] = exp2_fast(__fmaf_rn(s[i], scale_log2, -lse[i / 4 * 2 + i % 2]));
}
DEVICE void to_operand(u32 (&a)[16], const float (&x)[32]) {
#pragma unroll
  for (int i = 0; i < 16; i++) a[i] = pack(x[2 * i], x[2 * i + 1]);
}
// dp becomes ds = p (dp − delta).
DEVICE void differentiate(const float (&p)[32], float (&dp)[32], const float (&delta)[16]) {
#pragma unroll
  for (int i = 0; i < 32; i++) dp[i] = p[i] * (dp[i] - delta[i / 4 * 2 + i % 2]);
}
// 16 rows x 64 columns of this warp into a block. `at`: of this lane's row and chunk.
DEVICE void store_operand(u32 at, const u32 (&a)[16]) {
#pragma unroll
  for (int k = 0; k < 4; k++) store_matrix(at ^ (k << 5), a[4 * k], a[4 * k + 1], a[4 * k + 2], a[4 * k + 3]);
}
// The same the other way round.
DEVICE void load_operand(u32 (&a)[16], u32 at) {
#pragma unroll
  for (int k = 0; k < 4; k++) load_matrix(at ^ (k << 5), a[4 * k], a[4 * k + 1], a[4 * k + 2], a[4 * k + 3]);
}
