// FlashAttention forward for Hopper: o = softmax(scale q kᵀ) v and its log-sum-exp. Method: Shah et al. 2024,
// FlashAttention-3: TMA, wgmma, specialised warps; the softmax of one warpgroup overlaps the products of the others.
//
// A block computes tiles of CONSUMERS · 64 queries. Warpgroup 0 releases its registers, and one lane of it loads q, k
// and v into shared memory by TMA. Each other warpgroup owns 64 queries and walks the keys, KEYS at a time,
// from the last visible tile to the first, so that tiles with a mask come first and the main loop needs none:
//
//     s(j-1) = q k(j-1)ᵀ     issued, asynchronous
//     o     += p(j) v(j)     issued, asynchronous; p stays in registers, as the left operand
//     wait for s(j-1); p(j-1) = exp2(scale s(j-1) - m), while o is still being computed
//     wait for o; rescale it if m changed; pack p(j-1)
//
// Registers per thread: o WIDTH/2, s KEYS/2, p KEYS/4, which is 128 of 160 at D = 64 with 192 queries and 128 keys. Shared
// memory: q and o CONSUMERS · 64 · D · 2 bytes each, a stage of k or v KEYS · D · 2. O_IN_Q: o takes the place of q, so
// that larger stages fit; the next queries are loaded once o has been stored.
//
// m is the maximum over the first tile and the tiles with a mask. The other tiles skip the maximum, because any m near
// it gives the same result. If a sum of weights leaves the safe range, or no key was visible before, the warp
// recomputes its scores of the tile by itself and includes their maximum in m.
//
// PING_PONG: the warpgroups issue their products in turns, over the tiles that all of them have.
#include "forward_tiles.cuh"
#include "hopper.cuh"

constexpr bool MASK_FIRST = CAUSAL || TAIL;
// Limit for a thread's sum of weights in a row of a tile, with an older m.
constexpr float LARGEST_SUM = FP16 ? 0x1p15f : 0x1p40f;
constexpr u32 ALL = 0xffffffffu;
#define INFINITY __int_as_float(0x7f800000)

// ---- a consumer ----

// Add the product of one warp, 16 x 8 over 16 of k, as wgmma adds it to d[0] ... d[3].
DEVICE void mma_warp(float* d, const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." ELEMENT "." ELEMENT
               ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

struct Consumer {
  const Sizes& sizes;
  Shared at;
  int w;            // number of this consumer
  u64 q_described;
  RingPlace<K_STAGES> k_place;
  RingPlace<V_STAGES> v_place;
  int limit[2];     // first hidden key of this thread's two rows, minus the thread's first column
  float o[WIDTH / 2], s[KEYS / 2], m[2], l[2];  // l is the sum over this thread's columns only
  u32 p[KEYS / 4], q[Q_IN_REGISTERS ? WIDTH / 4 : 4];

  DEVICE Consumer(const Sizes& sizes, Shared at, int w) : sizes(sizes), at(at), w(w), q_described(describe(at.q(w))) {}

  DEVICE void issue_scores() {
    const u64 k = describe(at.k(k_place.stage));
#pragma unroll
    for (int i = 0; i < WIDTH / 16; i++) {
      const u64 k_step = k + i / 4 * (KEYS * 128 >> 4) + i % 4 * 2;
#if Q_IN_REGISTERS
      mma<0>(s, q, 4 * i, k_step, i > 0);
#else
      mma<0, 0>(s, q_described + i / 4 * (ROWS * 128 >> 4) + i % 4 * 2, k_step, i > 0);
#endif
    }
    mma_commit();
  }

  DEVICE void issue_output() {
    const u64 v = describe(at.v(v_place.stage), KEYS * 128);
#pragma unroll
    for (int i = 0; i < KEYS / 16; i++) mma<1>(o, p, 4 * i, v + i * (16 * 128 >> 4), 1);
    mma_commit();
  }

  DEVICE void mask(int first_key) {
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++)
      if (i / 4 * 8 + i % 2 >= limit[i / 2 % 2] - first_key) s[i] = -INFINITY;
  }

  // Compute the weights of the scores with the maximum m, and their sum, for this thread's columns of row `h`.
  DEVICE float weigh(int h, float maximum) {
    float sum[2] = {0, 0};
#pragma unroll
    for (int i = 2 * h; i < KEYS / 2; i += 4)
#pragma unroll
      for (int x = 0; x < 2; x++) {
        s[i + x] = exp2_fast(fmaf(s[i + x], sizes.scale_log2, -maximum));
        sum[x] += s[i + x];
      }
    return sum[0] + sum[1];
  }

  DEVICE float tile_maximum(int h) {
    float x[2] = {s[2 * h], s[2 * h + 1]};
#pragma unroll
    for (int i = 2 * h + 4; i < KEYS / 2; i += 4) {
      x[0] = fmaxf(x[0], s[i]);
      x[1] = fmaxf(x[1], s[i + 1]);
    }
    float y = fmaxf(x[0], x[1]);
    y = fmaxf(y, __shfl_xor_sync(ALL, y, 1));
    return fmaxf(y, __shfl_xor_sync(ALL, y, 2)) * sizes.scale_log2;
  }

  // Turn scores into weights with a maximum that includes theirs; the earlier o and l are scaled by `kept`.
  template <bool HIDDEN>  // true if a row may have no visible key so far
  DEVICE void softmax(float (&kept)[2]) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float found = fmaxf(m[h], tile_maximum(h)), finite = HIDDEN && found == -INFINITY ? 0 : found;
      kept[h] = exp2_fast(m[h] - finite);
      m[h] = found;
      l[h] = l[h] * kept[h] + weigh(h, finite);
    }
  }

  // Load columns 16 i to 16 i + 15 of this warp's queries as a left operand.
  DEVICE void load_queries(u32* to, int i) {
    const u32 lane = lane_id(), warp = threadIdx.x / 32 % 4;
    const u32 from = at.q(w) + i / 4 * (ROWS * 128) + swizzled(16 * warp + lane % 16, i % 4 * 2 + lane / 16);
    load_matrix(from, to[0], to[1], to[2], to[3]);
  }

  // Recompute s by this warp alone.
  DEVICE void scores_again() {
    const u32 lane = lane_id();
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++) s[i] = 0;
#pragma unroll(Q_IN_REGISTERS ? (WIDTH + 31) / 32 : 1)
    for (int c = 0; c < (WIDTH + 31) / 32; c++) {  // each turn covers 32 columns, two steps of 16
      u32 a[2][4], b[4];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        if (Q_IN_REGISTERS)
          for (int r = 0; r < 4; r++) a[i][r] = 2 * c + i < WIDTH / 16 ? q[8 * c + 4 * i + r] : 0;
        else
          load_queries(a[i], 2 * c + i);
      }
      const u32 k = at.k(k_place.stage) + c / 2 * (KEYS * 128) + swizzled(lane % 8, c % 2 * 4 + lane / 8);
#pragma unroll
      for (int j = 0; j < KEYS / 8; j++) {
        load_matrix(k + j * 1024, b[0], b[1], b[2], b[3]);
        mma_warp(s + 4 * j, a[0], b[0], b[1]);
        mma_warp(s + 4 * j, a[1], b[2], b[3]);
        if (j % 4 == 3) stay();  // without it, ptxas loads all of k at once and spills registers of the common path
      }
    }
  }

  DEVICE void rescale(const float (&kept)[2]) {
#pragma unroll
    for (int i = 0; i < WIDTH / 2; i++) o[i] *= kept[i / 2 % 2];
  }

  DEVICE void pack_weights() {
#pragma unroll
    for (int i = 0; i < KEYS / 4; i++) p[i] = pack(s[2 * i], s[2 * i + 1]);
  }

  // Compute the first tile's weights.
  DEVICE void begin(int first_key) {
    if (Q_IN_REGISTERS) {
#pragma unroll
      for (int i = 0; i < WIDTH / 16; i++) load_queries(q + 4 * i, i);
      release(at.q_empty(w));
    }
    barrier_wait(at.k_full(k_place.stage), k_place.phase);
    mma_fence();
    issue_scores();
    mma_wait<0>();
    hold(s);
    release(at.k_empty(k_place.stage));
    k_place.advance();
    m[0] = m[1] = -INFINITY;
    l[0] = l[1] = 0;
    if (MASK_FIRST) mask(first_key);
    float kept[2];
    softmax<MASK_FIRST>(kept);
    pack_weights();
#pragma unroll
    for (int i = 0; i < WIDTH / 2; i++) o[i] = 0;
  }

  // Compute the scores of the tile that begins at `first_key` and, at the same time, the output of the previous tile.
  template <bool MASKED>
  DEVICE void go_on(int first_key, bool turns) {
    barrier_wait(at.k_full(k_place.stage), k_place.phase);
    if (turns) wait_for_turn();
    mma_fence();
    issue_scores();
    barrier_wait(at.v_full(v_place.stage), v_place.phase);
    mma_fence();
    issue_output();
    if (turns) give_turn();
    mma_wait<1>();
    hold(s);
    float kept[2];
    bool changed = MASKED;
    if (MASKED) {
      mask(first_key);
      softmax<true>(kept);
      hold(s);
      wait_for_output<0>();
    } else {
      const float sum[2] = {weigh(0, m[0]), weigh(1, m[1])};
      changed = __any_sync(ALL, !(sum[0] <= LARGEST_SUM && sum[1] <= LARGEST_SUM));
      if (changed) {
        wait_for_output<1>();
        scores_again();
        softmax<true>(kept);
      } else {
        l[0] += sum[0], l[1] += sum[1];
        wait_for_output<2>();
      }
    }
    release(at.k_empty(k_place.stage));
    release(at.v_empty(v_place.stage));
    k_place.advance();
    v_place.advance();
    if (changed) rescale(kept);
    pack_weights();
  }

  // Wait for a barrier that is already complete: ptxas moves no instruction past this branch.
  DEVICE void stay() { barrier_wait(at.k_full(k_place.stage), k_place.phase); }
  DEVICE void wait_for_turn() { named_sync(1 + w, 2 * WARPGROUP); }
  DEVICE void give_turn() { named_arrive(1 + (w + 1) % CONSUMERS, 2 * WARPGROUP); }

  DEVICE void end() {
    barrier_wait(at.v_full(v_place.stage), v_place.phase);
    mma_fence();
    issue_output();
    mma_wait<0>();
    hold(o);
    release(at.v_empty(v_place.stage));
    v_place.advance();
  }

  // PLACE makes the waits of two branches differ. The compiler would otherwise merge equal waits into one before the
  // branches, and move it before the exponentials.
  template <int PLACE>
  DEVICE void wait_for_output() {
    asm volatile("wgmma.wait_group.sync.aligned 0;  // %0" ::"n"(PLACE) : "memory");
    hold(o);
    hold(p);
  }

  // Release tiles whose keys are visible to other warpgroups, but not to this one.
  DEVICE void skip(int tiles) {
    for (; tiles > 0; tiles--) {
      barrier_wait(at.k_full(k_place.stage), k_place.phase);
      release(at.k_empty(k_place.stage));
      barrier_wait(at.v_full(v_place.stage), v_place.phase);
      release(at.v_empty(v_place.stage));
      k_place.advance();
      v_place.advance();
    }
  }

  // Write o / l through shared memory, 16 rows per warp, and the log-sum-exp.
  DEVICE void write(const TensorMap& map, float* lse, const Tile& tile) {
    const int lane = lane_id(), warp = threadIdx.x / 32 % 4, row = tile.row + w * ROWS + warp * 16;
    float inverse[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      l[h] += __shfl_xor_sync(ALL, l[h], 1);
      l[h] += __shfl_xor_sync(ALL, l[h], 2);
      const bool none = m[h] == -INFINITY;
      inverse[h] = none ? 0 : 1 / l[h];
      const int here = row + lane / 4 + 8 * h;
      if (lane % 4 == 0 && here >= 0 && here < sizes.seq_q)
        lse[(long long)(tile.batch * sizes.heads + tile.head) * sizes.seq_q + here] =
            none ? -INFINITY : (m[h] + log2f(l[h])) * 0.6931471805599453f;
    }
    rescale(inverse);
    if (lane == 0) bulk_wait_read<0>();  // the copy of the previous tile has left the buffer
    __syncwarp();
#pragma unroll
    for (int i = 0; i < WIDTH / 16; i++) {
      const float* x = o + 8 * i;
      const u32 to = at.o(w) + i / 4 * (ROWS * 128) + swizzled(warp * 16 + lane % 16, i % 4 * 2 + lane / 16);
      store_matrix(to, pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7]));
    }
    fence_shared_async();
    __syncwarp();
    if (lane == 0 && row >= 0) {  // a store, unlike a load, may not begin before the first row
#pragma unroll
      for (int i = 0; i < BLOCKS; i++)
        tma_store(map, at.o(w) + i * (ROWS * 128) + warp * (16 * 128), i * 64, row, tile.head, tile.batch);
      bulk_commit();
    }
  }

  DEVICE void attend(const TensorMap& map, float* lse, const Tile& tile, int round) {
    const int row = tile.row + w * ROWS, loaded = seen_tiles(tile.row + CONSUMERS * ROWS - 1, sizes);
    if (row + ROWS <= 0 || row >= sizes.seq_q) {  // this warp has no query
      release(at.q_empty(w));
      return skip(loaded);
    }
    const int seen = CAUSAL ? seen_tiles(row + ROWS - 1, sizes) : loaded;
    if (CAUSAL) skip(loaded - seen);
    const int lane = lane_id();
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int here = row + threadIdx.x / 32 % 4 * 16 + lane / 4 + 8 * h;
      limit[h] = (CAUSAL ? least(sizes.seq_k, here + sizes.offset + 1) : sizes.seq_k) - lane % 4 * 2;
    }
    int j = seen - 1;
    begin(j-- * KEYS);
    if (CAUSAL)
      for (const int open = open_tiles(row, sizes); j >= open; j--) go_on<true>(j * KEYS, false);
    int in_turn = 0;
    if (PING_PONG) {  // only over the tiles that every warpgroup has
      const bool all = tile.row + ROWS > 0 && tile.row + (CONSUMERS - 1) * ROWS < sizes.seq_q;
      const int first = seen_tiles(tile.row + ROWS - 1, sizes) - 1;
      in_turn = !all ? 0 : CAUSAL ? least(open_tiles(tile.row, sizes), first) : j + 1;
    }
    for (; j >= 0; j--) go_on<false>(j * KEYS, PING_PONG && j < in_turn);
    if (!Q_IN_REGISTERS && !O_IN_Q) release(at.q_empty(w));
    end();
    if (O_IN_Q) named_sync(1 + CONSUMERS + w, WARPGROUP);  // all warps have read q
    write(map, lse, tile);
    if (O_IN_Q) {
      if (lane == 0) bulk_wait_read<0>();
      release(at.q_empty(w));
    }
  }
};

extern "C" __global__ void __launch_bounds__((CONSUMERS + 1) * WARPGROUP, 1)
    attend_forward(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
                   const __grid_constant__ TensorMap v, const __grid_constant__ TensorMap o, float* lse, int* counter,
                   const __grid_constant__ Sizes sizes) {
  extern __shared__ char raw[];
  const Shared at{(shared_address(raw) + 1023) & ~1023u};
  const int warpgroup = uniform(threadIdx.x / WARPGROUP);
  if (threadIdx.x == 0) {
    tma_prefetch_map(q), tma_prefetch_map(k), tma_prefetch_map(v), tma_prefetch_map(o);
    const u32 warpgroup = 4 * WARP_ARRIVALS, all = CONSUMERS * warpgroup;
    for (int w = 0; w < CONSUMERS; w++) barrier_init(at.q_full(w), 1), barrier_init(at.q_empty(w), warpgroup);
    for (int i = 0; i < K_STAGES; i++) barrier_init(at.k_full(i), 1), barrier_init(at.k_empty(i), all);
    for (int i = 0; i < V_STAGES; i++) barrier_init(at.v_full(i), 1), barrier_init(at.v_empty(i), all);
    barrier_init_done();
  }
  __syncthreads();
  if (warpgroup == 0) {
    registers_less<CONSUMERS == 3 ? 32 : 24>();
    if (threadIdx.x == 0) produce(q, k, v, counter, sizes, at);
  } else {
    registers_more<CONSUMERS == 3 ? 160 : 240>();
    Consumer consumer(sizes, at, warpgroup - 1);
    if (PING_PONG && warpgroup == CONSUMERS) named_arrive(1, 2 * WARPGROUP);  // the first consumer begins
    for (int round = 0;; round++) {
      barrier_wait(at.q_full(consumer.w), round & 1);
      const int number = uniform(load_int(at.slot(consumer.w)));
      if (number < 0) break;
      consumer.attend(o, lse, located(number, sizes), round);
    }
    if (lane_id() == 0) bulk_wait<0>();
  }
}
