// The backward's work at d_head 128: tiles of 80 queries, 40 registers per thread. Products of 64 queries with both
// operands in shared memory read it during all of their time, products of 80 queries during nine tenths. 80 rows of dq
// are not a multiple of 64, so dq is computed transposed, and ds has the queries as rows. Few queries take tiles of 64
// all the same, where those of 80 would hold more that is hidden (launch.py). No registers are left for products during
// ds:
//
//   tensor cores  | s   | dp          |          | dv, dq of the tile before | dk     | s of the next tile
//   this warp     |     | exp2 of s   | ds, p    | ds out                    | dq out |
//
// While one warpgroup waits, the other computes.
//
// Registers: dk and dv 64 each, s 40, dp 40, statistics 12; p, ds and dq reuse those of s and dp. Shared memory in KiB:
// k, v 32 each, a stage of q, do 20 each, ds two tiles of 20, dq 40; in total 224.
#pragma once

DEVICE void consume(Consumer& c, const TensorMap& dk_map, const TensorMap& dv_map) {
  const u64 keys = describe(c.shared + K_AT + c.w * 64 * 128), values = keys + (KEY_TILE >> 4);
  const u64 columns = describe(c.shared + K_AT + c.w * KEY_BLOCK);
  const u32 lane = lane_id();
  const u32 query_chunk = c.w * QUERY_BLOCK + swizzled(lane / 16 * 8 + lane % 8, c.warp * 2 + lane / 8 % 2);
  float dk[WIDTH / 2], dv[WIDTH / 2], s[PART / 2], dp[PART / 2];
  u32 p[PART / 4], ds[PART / 4];
  Statistics statistics;
#pragma unroll
  for (int i = 0; i < WIDTH / 2; i++) dk[i] = dv[i] = 0;
  hold(dk);  // the zeros must be written before any product begins
  hold(dv);
  barrier_wait(c.shared + K_FULL, 0);
  c.wait(Q_FULL, 0);
  issue_scores(s, keys, describe(c.q(0), QUERY_BLOCK));
  barrier_wait(c.shared + V_FULL, 0);
  c.start_apart();
  while (true) {  // s is in flight
    const u64 queries = describe(c.q(c.i), QUERY_BLOCK), gradients = describe(c.dout(c.i), QUERY_BLOCK);
    c.wait(DO_FULL, c.i);
    issue_scores(dp, values, gradients);
    statistics.load(c.lse(0));
    mma_wait<1>();
    hold(s);
    c.hide_part(s, 0);
    weigh(s, statistics, c.z.scale_log2);
    statistics.load(c.delta(0));
    mma_wait<0>();
    hold(dp);
    differentiate(s, dp, statistics);
    to_operand(p, s);
    to_operand(ds, dp);
    issue_sum(dv, p, gradients);
    if (c.i > 0) c.wait_for_ds(c.i - 1);
    issue_dq(dp, describe(c.ds(c.i - 1, 0)), columns);
    store_transposed(c.ds(c.i, 0) + query_chunk, ds);
    issue_sum(dk, ds, queries);
    mma_wait<1>();
    hold(dp);
    c.ds_written(c.i);
    if (c.i + 1 == c.steps) break;  // before the next product: ptxas must see no product with an unused result
    c.end_tile(dp);
    c.wait(Q_FULL, c.i);
    mma_wait<0>();
    c.give_back(c.i - 1);
    issue_scores(s, keys, describe(c.q(c.i), QUERY_BLOCK));
  }
  c.end_tile(dp);
  c.wait_for_ds(c.i - 1);
  issue_dq(dp, describe(c.ds(c.i - 1, 0)), columns);
  mma_wait<0>();
  hold(dp);
  hold(dk);
  hold(dv);
  c.add_dq(dp);
  write_keys(c, dk_map, dv_map, dk, dv);
}
