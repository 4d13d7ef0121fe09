// The backward's work at d_head 64: tiles of 128 queries, computed in halves (a and b) of 64 queries x 64 keys per
// warpgroup, with 32 registers per thread. Work of the tensor cores and of a warp at the same time, products in the
// order of their issue:
//
//   tensor cores  | dp a, s b   | dv a | dk a, dq of the tile before, dp b | dv b      | dk b | s a of the next tile
//   this warp     | exp2 of s a | ds a | exp2 of s b                       | ds b, out | dq out
//
// Products are therefore always queued while a warp computes, and a warpgroup needs the other's ds only half a tile
// later.
//
// Registers: dk and dv 32 each, s 2 x 32, dp 32, p and then ds 16, v 16, statistics 16; dq reuses those of s a. That
// leaves enough to load all statistics ahead of their use.
// Shared memory in KiB: k, v 16 each, a stage of q, do 16 each, ds two tiles of 32, dq 32; in total 192.
#pragma once

struct Work {
  float dk[32], dv[32], dp[32];
  u32 operand[16];  // p, then ds
  u32 values[16];
};

// Compute one tile up to the issue of its last product. In flight at the beginning: dk b of the previous tile, s a; at the
// end: dk b. dq of the previous tile is then in sa.
DEVICE void work(Consumer& c, Work& r, float (&sa)[32], float (&sb)[32]) {
  const u64 keys = describe(c.shared + K_AT + c.w * 64 * 128), all_keys = describe(c.shared + K_AT);
  const u64 q_a = describe(c.q(c.i)), do_a = describe(c.dout(c.i)), q_b = q_a + (8192 >> 4), do_b = do_a + (8192 >> 4);
  Statistics statistics;
  c.wait(DO_FULL, c.i);
  issue_scores(r.dp, r.values, do_a);
  issue_scores(sb, keys, q_b);
  statistics.load(c.lse(0));
  mma_wait<2>();
  hold(sa);
  if (c.i > 0) c.give_back(c.i - 1);
  c.hide_part(sa, 0);
  weigh(sa, statistics, c.z.scale_log2);
  to_operand(r.operand, sa);
  statistics.load(c.delta(0));
  issue_sum(r.dv, r.operand, do_a);
  mma_wait<2>();
  hold(r.dp);
  differentiate(sa, r.dp, statistics);
  mma_wait<0>();
  hold(r.operand);
  to_operand(r.operand, r.dp);
  statistics.load(c.lse(1));
  if (c.i > 0) c.wait_for_ds(c.i - 1);
  store_operand(c.ds(c.i, 0) + c.row_chunk, r.operand);
  issue_sum(r.dk, r.operand, q_a);
  issue_dq(sa, describe(c.ds(c.i - 1, c.w)), all_keys);
  issue_scores(r.dp, r.values, do_b);
  hold(sb);
  c.hide_part(sb, 1);
  weigh(sb, statistics, c.z.scale_log2);
  mma_wait<2>();
  hold(r.operand);
  to_operand(r.operand, sb);
  statistics.load(c.delta(1));
  issue_sum(r.dv, r.operand, do_b);
  mma_wait<1>();
  hold(r.dp);
  differentiate(sb, r.dp, statistics);
  mma_wait<0>();
  hold(r.operand);
  to_operand(r.operand, r.dp);
  store_operand(c.ds(c.i, 1) + c.row_chunk, r.operand);
  issue_sum(r.dk, r.operand, q_b);
}
DEVICE void consume(Consumer& c, const TensorMap& dk, const TensorMap& dv) {
  const u64 keys = describe(c.shared + K_AT + c.w * 64 * 128);
  Work r;
  float sa[32], sb[32];
#pragma unroll
  for (int i = 0; i < 32; i++) r.dk[i] = r.dv[i] = 0;
  hold(r.dk);  // the zeros must be written before any product begins
  hold(r.dv);
  barrier_wait(c.shared + K_FULL, 0);
  c.wait(Q_FULL, 0);
  issue_scores(sa, keys, describe(c.q(0)));
  barrier_wait(c.shared + V_FULL, 0);
  load_operand(r.values, c.shared + V_AT + c.row_chunk);
  c.start_apart();
  while (true) {
    work(c, r, sa, sb);
    mma_wait<2>();
    hold(sa);
    c.ds_written(c.i);
    c.end_tile(sa);
    if (c.i == c.steps) break;
    c.wait(Q_FULL, c.i);
    issue_scores(sa, keys, describe(c.q(c.i)));
  }
  c.wait_for_ds(c.i - 1);
  issue_dq(sa, describe(c.ds(c.i - 1, c.w)), describe(c.shared + K_AT));
  mma_wait<0>();
  hold(sa);
  c.add_dq(sa);
  hold(r.dk);
  hold(r.dv);
  write_keys(c, dk, dv, r.dk, r.dv);
}
