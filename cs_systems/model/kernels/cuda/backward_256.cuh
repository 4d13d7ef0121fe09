// The backward's work at d_head 256: a block owns 64 keys, because their dk and dv alone take 128 of 240 registers, and
// takes tiles of 64 queries. The first warpgroup sums dv, the second dk; each computes the half of a product that is at
// hand: s and p the first, dp and ds the second, and 128 columns of dq both. Two tiles of p in bf16 or fp16 go from the
// first to the second through shared memory, thread by thread, and ds goes from the second to both.
//
//   first:   tensor cores | s                       |                  | dv, dq of the tile before |
//            this warp    | rest of dq out          | exp2 of s, p out |                           | half of dq out
//   second:  tensor cores | dp                      |                  | dk, dq                    |
//            this warp    | rest of dq out, wait: p | ds, ds out       |                           | half of dq out
//
// While one warpgroup works, the products of the other run. Shared memory has no room for dq, so the warps add it to
// global memory from their registers.
//
// Registers: dv or dk 128, dq 64, s or dp 32; p or ds 16. Shared memory in KiB: k, v, a stage of q, do 32 each, ds and
// p two tiles of 8 each; in total 224.
#pragma once

enum Named { P_WRITTEN = 1, DS_WRITTEN = 3, DS_READ = 5, DS_COMPLETE = 7 };  // named barriers; the first three in pairs

DEVICE u32 weights_at(const Consumer& c, int i) { return c.shared + P_AT + i % 2 * DS_TILE + threadIdx.x % 128 * 16; }

DEVICE void write_sum(const TensorMap& to, u32 at, const float (&sum)[128], float scale, const Consumer& c) {
  u32 buffers[COLUMN_BLOCKS];
#pragma unroll
  for (int b = 0; b < COLUMN_BLOCKS; b++) buffers[b] = at + b * KEY_BLOCK + c.warp * 2048;
  write(to, buffers, sum, scale, c);
}

// Compute s and p, dv, and the first 128 columns of dq.
DEVICE void sum_values(Consumer& c, const TensorMap& dv_map) {
  const u64 keys = describe(c.shared + K_AT), columns = describe(c.shared + K_AT, KEY_BLOCK);
  float dv[128], s[32], dq[64];
  u32 p[16];
  Statistics lse;
#pragma unroll
  for (int i = 0; i < 128; i++) dv[i] = 0;
  hold(dv);  // the zeros must be written before any product begins
  barrier_wait(c.shared + K_FULL, 0);
  c.wait(Q_FULL, 0);
  issue_scores(s, keys, describe(c.q(0)));
  while (true) {  // s is in flight
    lse.load(c.lse(0));
    mma_wait<0>();
    hold(s);
    c.hide_part(s, 0);
    weigh(s, lse, c.z.scale_log2);
    to_operand(p, s);
#pragma unroll
    for (int j = 0; j < 4; j++)
      store_uint4(weights_at(c, c.i) + j * 2048, p[4 * j], p[4 * j + 1], p[4 * j + 2], p[4 * j + 3]);
    named_arrive(P_WRITTEN + c.i % 2, 256);
    c.wait(DO_FULL, c.i);
    issue_sum(dv, p, describe(c.dout(c.i), QUERY_BLOCK));
    if (c.i > 0) named_sync(DS_WRITTEN + (c.i - 1) % 2, 256);
    issue_dq(dq, describe(c.ds(c.i - 1, 0)), columns);
    mma_wait<1>();
    hold(p);
    c.give_back(c.i);
    if (c.i + 1 == c.steps) break;  // before the next product: ptxas must see no product with an unused result
    mma_wait<0>();
    hold(dq);
    if (c.i > 0) named_arrive(DS_READ + (c.i - 1) % 2, 256);
    if (c.i > 0) c.take_turn(), c.add_half<0>(dq);
    c.wait(Q_FULL, c.i + 1);
    issue_scores(s, keys, describe(c.q(c.i + 1)));  // there are registers for s once half of dq is out
    if (c.i > 0) c.add_half<1>(dq);
    c.advance();
  }
  mma_wait<0>();
  hold(dq);
  c.end_tile(dq);
  named_sync(DS_WRITTEN + (c.i - 1) % 2, 256);
  issue_dq(dq, describe(c.ds(c.i - 1, 0)), columns);
  mma_wait<0>();
  hold(dq);
  hold(dv);
  c.add_dq(dq);
  write_sum(dv_map, c.q(c.steps), dv, 1, c);  // both warpgroups have read the queries of the last tile but one
}

// Turn dp into ds = p (dp − delta), with p in pairs.
DEVICE void differentiate(const u32 (&p)[16], float (&dp)[32], Statistics& delta) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float x[4];
    delta.take(x, i);
#pragma unroll
    for (int j = 4 * i; j < 4 * i + 4; j++) {
      const float2 weights = unpack(p[j]);
      dp[2 * j] = weights.x * (dp[2 * j] - x[j / 2 % 2 * 2]);
      dp[2 * j + 1] = weights.y * (dp[2 * j + 1] - x[j / 2 % 2 * 2 + 1]);
    }
  }
}

// Compute dp and ds, dk, and the last 128 columns of dq.
DEVICE void sum_keys(Consumer& c, const TensorMap& dk_map) {
  const u64 values = describe(c.shared + V_AT), columns = describe(c.shared + K_AT + 2 * KEY_BLOCK, KEY_BLOCK);
  float dk[128], dp[32], dq[64];
  u32 ds[16];
  Statistics delta;
#pragma unroll
  for (int i = 0; i < 128; i++) dk[i] = 0;
  hold(dk);
  barrier_wait(c.shared + V_FULL, 0);
  c.wait(DO_FULL, 0);
  issue_scores(dp, values, describe(c.dout(0)));
  barrier_wait(c.shared + K_FULL, 0);
  while (true) {  // dp is in flight
    delta.load(c.delta(0));
    named_sync(P_WRITTEN + c.i % 2, 256);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const uint4 x = load_uint4(weights_at(c, c.i) + j * 2048);
      ds[4 * j] = x.x, ds[4 * j + 1] = x.y, ds[4 * j + 2] = x.z, ds[4 * j + 3] = x.w;
    }
    mma_wait<0>();
    hold(dp);
    differentiate(ds, dp, delta);
    to_operand(ds, dp);
    if (c.i > 1) named_sync(DS_READ + c.i % 2, 256);
    store_operand(c.ds(c.i, 0) + c.row_chunk, ds);
    fence_shared_async();
    named_arrive(DS_WRITTEN + c.i % 2, 256);
    named_sync(DS_COMPLETE, 128);
    c.wait(Q_FULL, c.i);
    issue_sum(dk, ds, describe(c.q(c.i), QUERY_BLOCK));
    issue_dq(dq, describe(c.ds(c.i, 0)), columns);
    mma_wait<1>();
    hold(ds);
    c.give_back(c.i);
    if (c.i + 1 == c.steps) break;
    mma_wait<0>();
    hold(dq);
    c.advance();
    c.take_turn();
    c.add_half<0>(dq);
    c.wait(DO_FULL, c.i);
    issue_scores(dp, values, describe(c.dout(c.i)));
    c.add_half<1>(dq);
  }
  mma_wait<0>();
  hold(dq);
  hold(dk);
  c.advance();
  c.add_dq(dq);
  write_sum(dk_map, c.shared + V_AT, dk, c.z.scale, c);
}

DEVICE void consume(Consumer& c, const TensorMap& dk, const TensorMap& dv) {
  if (c.w == 0)
    sum_values(c, dv);
  else
    sum_keys(c, dk);
}
