// FlashAttention forward for Hopper: o = softmax(scale q kᵀ) v and its log-sum-exp. Method: Shah et al. 2024,
// FlashAttention-3: TMA, wgmma, specialised warps; the softmax of a warpgroup beside the products of all.
//
// A block of threads computes tiles of CONSUMERS · 64 queries. Warpgroup 0 gives its registers away, and one lane of it
// brings q, k and v into shared memory by TMA. Each other warpgroup owns 64 queries and walks the keys, KEYS at a time,
// from the last tile it sees to the first, so that the tiles with a mask come first and the loop over the others has none:
//
//     s(j-1) = q k(j-1)ᵀ     issued, asynchronous
//     o     += p(j) v(j)     issued, asynchronous; p stays in registers, as left operand
//     wait for s(j-1); p(j-1) = exp2(scale s(j-1) - m), while o is still summed up
//     wait for o; rescale it if m changed; pack p(j-1)
//
// Registers of a thread: o D/2, s KEYS/2, p KEYS/4: 128 of 160 at D = 64 and 192 queries of 128 keys. Shared memory: q and
// o CONSUMERS · 64 · D · 2 bytes each, a stage of k or v KEYS · D · 2.
//
// SOFTMAX says what m is: any number near the maximum of the scores seen gives the same result.
// 0: that maximum, o is rescaled in each tile (FlashAttention-2).
// 1: that maximum as long as it grows by less than 2^8; o is rescaled when it grows by more.
// 2: the maximum of the first tile: no maximum is taken of the others. Where a sum of weights leaves the range in which
//    this is safe (or nothing was seen before), the warp computes its scores of the tile again, by itself, and goes on
//    as in 0.
#include "hopper.cuh"
#include "wide.cuh"

constexpr int ROWS = 64;  // of a warpgroup: the m of wgmma
constexpr int WARPGROUP = 128;
constexpr int BLOCKS = D / 64;  // of 64 columns
constexpr u32 Q_BYTES = ROWS * D * 2, KV_BYTES = KEYS * D * 2;
constexpr int SLACK = 1, STALE = 2;  // SOFTMAX
constexpr int GRID = 0, PERSISTENT = 1, DYNAMIC = 2;  // SCHEDULE
constexpr bool MASK_FIRST = CAUSAL || TAIL;
constexpr float GROWTH_LOG2 = 8;                       // SLACK
constexpr float LARGEST_SUM = FP16 ? 0x1p15f : 0x1p40f;  // STALE: of a thread's weights of a row and tile
constexpr u32 ALL = 0xffffffffu;
#define INFINITY __int_as_float(0x7f800000)

struct Sizes {
  int seq_q, seq_k, heads, group, batch_heads;
  int offset;       // query i sees key j if not CAUSAL or j <= i + offset
  int first_row;    // of the first row tile: negative where the tiles end with the queries, at most 0
  int row_tiles;
  int heads_in_l2;  // whose keys and values fit it together
  float scale_log2;
};

struct Tile {
  int batch, head, row;
};

// Shared memory, from 1024-byte aligned `base`: addresses of the tiles and of the barriers.
struct Shared {
  u32 base;
  DEVICE u32 q(int w) const { return base + w * Q_BYTES; }
  DEVICE u32 o(int w) const { return base + (CONSUMERS + w) * Q_BYTES; }
  DEVICE u32 k(int stage) const { return base + 2 * CONSUMERS * Q_BYTES + stage * KV_BYTES; }
  DEVICE u32 v(int stage) const { return k(K_STAGES + stage); }
  DEVICE u32 q_full(int w) const { return v(V_STAGES) + 8 * w; }
  DEVICE u32 q_empty(int w) const { return q_full(CONSUMERS + w); }
  DEVICE u32 k_full(int stage) const { return q_full(2 * CONSUMERS + stage); }
  DEVICE u32 k_empty(int stage) const { return k_full(K_STAGES + stage); }
  DEVICE u32 v_full(int stage) const { return k_full(2 * K_STAGES + stage); }
  DEVICE u32 v_empty(int stage) const { return v_full(V_STAGES + stage); }
  DEVICE u32 slot(int w) const { return v_full(2 * V_STAGES + w); }  // DYNAMIC: the number of the tile
};

// A place in a ring of buffers, and the parity of its barriers' phase.
template <int STAGES>
struct Place {
  int stage = 0;
  u32 phase = 0;
  DEVICE void advance() {
    stage += 1;
    if (stage == STAGES) stage = 0, phase ^= 1;
  }
};

DEVICE int least(int a, int b) { return a < b ? a : b; }
DEVICE int most(int a, int b) { return a > b ? a : b; }

// ---- which tiles ----

// The number of this block's tile in that round, or −1. PERSISTENT: every other round in reverse, to even out lengths.
DEVICE int numbered(int round, const Sizes& sizes) {
  const int position = SCHEDULE == PERSISTENT && (round & 1) ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const int number = round * gridDim.x + position;
  return number < sizes.row_tiles * sizes.batch_heads ? number : -1;
}

// The longest causal ones first, within the heads whose keys and values fit the L2 cache together.
DEVICE Tile located(int number, const Sizes& sizes) {
  const int per_section = sizes.heads_in_l2 * sizes.row_tiles;
  const int section = number / per_section, rest = number - section * per_section;
  const int first = section * sizes.heads_in_l2, here = least(sizes.heads_in_l2, sizes.batch_heads - first);
  const int row_tile = rest / here, batch_head = first + rest - row_tile * here;
  const int batch = batch_head / sizes.heads;
  const int row = (sizes.row_tiles - 1 - row_tile) * (CONSUMERS * ROWS) + sizes.first_row;
  return {batch, batch_head - batch * sizes.heads, row};
}

// Tiles of keys that queries up to `last_row` see: at least one, whose mask may hide all of it.
DEVICE int seen_tiles(int last_row, const Sizes& sizes) {
  const int keys = CAUSAL ? least(sizes.seq_k, last_row + sizes.offset + 1) : sizes.seq_k;
  return most((keys + KEYS - 1) / KEYS, 1);
}

// Of them, those that need no mask from query `row` on.
DEVICE int open_tiles(int row, const Sizes& sizes) {
  const int keys = CAUSAL ? least(sizes.seq_k, row + sizes.offset + 1) : sizes.seq_k;
  return most(keys, 0) / KEYS;
}

// ---- the producer ----

DEVICE void load(const TensorMap& map, u32 to, u32 full, int rows, int row, int head, int batch) {
#pragma unroll
  for (int i = 0; i < BLOCKS; i++) tma_load(to + i * rows * 128, map, full, i * 64, row, head, batch);
}

DEVICE void load_q(const TensorMap& map, Shared at, int w, int round, int number, const Tile& tile) {
  barrier_wait(at.q_empty(w), (round & 1) ^ 1);
  if (SCHEDULE == DYNAMIC) asm volatile("st.shared.s32 [%0], %1;" ::"r"(at.slot(w)), "r"(number) : "memory");
  barrier_expect(at.q_full(w), Q_BYTES);
  load(map, at.q(w), at.q_full(w), ROWS, tile.row + w * ROWS, tile.head, tile.batch);
}

DEVICE void produce(const TensorMap& q, const TensorMap& k, const TensorMap& v, int* counter, const Sizes& sizes,
                    Shared at) {
  Place<K_STAGES> k_place;
  Place<V_STAGES> v_place;
  for (int round = 0;; round++) {
    int number = numbered(round, sizes);
    if (SCHEDULE == DYNAMIC && round > 0) {
      number = gridDim.x + atomicAdd(counter, 1);
      if (number >= sizes.row_tiles * sizes.batch_heads) number = -1;
    }
    if (number < 0 || (SCHEDULE == GRID && round > 0)) {
      if (SCHEDULE == DYNAMIC) {
        for (int w = 0; w < CONSUMERS; w++) {
          barrier_wait(at.q_empty(w), (round & 1) ^ 1);
          asm volatile("st.shared.s32 [%0], %1;" ::"r"(at.slot(w)), "r"(-1) : "memory");
          barrier_arrive(at.q_full(w));
        }
        __threadfence();
        if (atomicAdd(counter + 1, 1) == gridDim.x - 1) counter[0] = counter[1] = 0;  // for the next launch
      }
      return;
    }
    const Tile tile = located(number, sizes);
    const int kv_head = tile.head / sizes.group;
    const int tiles = seen_tiles(tile.row + CONSUMERS * ROWS - 1, sizes);
    load_q(q, at, 0, round, number, tile);  // the first warpgroup can begin as soon as its queries and the keys are there
    for (int j = tiles - 1; j >= 0; j--) {
      barrier_wait(at.k_empty(k_place.stage), k_place.phase ^ 1);
      barrier_expect(at.k_full(k_place.stage), KV_BYTES);
      load(k, at.k(k_place.stage), at.k_full(k_place.stage), KEYS, j * KEYS, kv_head, tile.batch);
      k_place.advance();
      if (j == tiles - 1)
        for (int w = 1; w < CONSUMERS; w++) load_q(q, at, w, round, number, tile);
      barrier_wait(at.v_empty(v_place.stage), v_place.phase ^ 1);
      barrier_expect(at.v_full(v_place.stage), KV_BYTES);
      load(v, at.v(v_place.stage), at.v_full(v_place.stage), KEYS, j * KEYS, kv_head, tile.batch);
      v_place.advance();
    }
  }
}

// ---- a consumer ----

// One lane of each warp arrives, when all of the warp are here.
DEVICE void release(u32 empty) {
  __syncwarp();
  if (lane_id() == 0) barrier_arrive(empty);
}

struct Consumer {
  const Sizes& sizes;
  Shared at;
  int w;            // which of the consumers
  u64 q_described;
  Place<K_STAGES> k_place;
  Place<V_STAGES> v_place;
  int limit[2];     // of this thread's two rows, the first key not seen, less this thread's first column
  float o[D / 2], s[KEYS / 2], m[2], l[2];  // l: of this thread's columns
  u32 p[KEYS / 4], q[Q_IN_REGISTERS ? D / 4 : 4];

  DEVICE Consumer(const Sizes& sizes, Shared at, int w) : sizes(sizes), at(at), w(w), q_described(describe(at.q(w))) {}

  DEVICE void issue_scores() {
    const u64 k = describe(at.k(k_place.stage));
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
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

  // The weights of scores s under the maximum m, and their sum, of this thread's columns of row `h`.
  DEVICE float weigh(int h, float maximum) {
    float sum[2] = {0, 0};
#pragma unroll
    for (int i = 2 * h; i < KEYS / 2; i += 4) {
      s[i] = exp2_fast(fmaf(s[i], sizes.scale_log2, -maximum));
      s[i + 1] = exp2_fast(fmaf(s[i + 1], sizes.scale_log2, -maximum));
      sum[0] += s[i];
      sum[1] += s[i + 1];
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

  // Scores become weights. kept: what o and l were worth before is to be multiplied with. Returns whether o must be.
  // HIDDEN: a row may have seen no key yet.
  template <bool HIDDEN>
  DEVICE bool softmax(float (&kept)[2]) {
    float found[2];
#pragma unroll
    for (int h = 0; h < 2; h++) found[h] = fmaxf(m[h], tile_maximum(h));
    if (SOFTMAX == SLACK && !HIDDEN &&
        !__any_sync(ALL, found[0] > m[0] + GROWTH_LOG2 || found[1] > m[1] + GROWTH_LOG2)) {
#pragma unroll
      for (int h = 0; h < 2; h++) l[h] += weigh(h, m[h]);
      return false;
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float finite = HIDDEN && found[h] == -INFINITY ? 0 : found[h];
      kept[h] = exp2_fast(m[h] - finite);
      m[h] = found[h];
      l[h] = l[h] * kept[h] + weigh(h, finite);
    }
    return true;
  }

  // Columns 16 i to 16 i + 15 of this warp's queries, as left operand.
  DEVICE void load_queries(u32* to, int i) {
    const u32 lane = lane_id(), warp = threadIdx.x / 32 % 4;
    const u32 from = at.q(w) + i / 4 * (ROWS * 128) + swizzled(16 * warp + lane % 16, i % 4 * 2 + lane / 16);
    load_matrix(from, to[0], to[1], to[2], to[3]);
  }

  // s once more, by this warp alone.
  DEVICE void scores_again() {
    const u32 lane = lane_id();
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++) s[i] = 0;
#pragma unroll(Q_IN_REGISTERS ? D / 32 : 1)
    for (int c = 0; c < D / 32; c++) {  // 32 columns: two steps of 16
      u32 a[2][4], b[4];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        if (Q_IN_REGISTERS)
          for (int r = 0; r < 4; r++) a[i][r] = q[8 * c + 4 * i + r];
        else
          load_queries(a[i], 2 * c + i);
      }
      const u32 k = at.k(k_place.stage) + c / 2 * (KEYS * 128) + swizzled(lane % 8, c % 2 * 4 + lane / 8);
#pragma unroll
      for (int j = 0; j < KEYS / 8; j++) {
        load_matrix(k + j * 1024, b[0], b[1], b[2], b[3]);
        mma_warp(s + 4 * j, a[0], b[0], b[1]);
        mma_warp(s + 4 * j, a[1], b[2], b[3]);
        // Long done: a branch. Otherwise ptxas loads all of k at once, and spills what the common path needs.
        if (j % 4 == 3) barrier_wait(at.k_full(k_place.stage), k_place.phase);
      }
    }
  }

  DEVICE void rescale(const float (&kept)[2]) {
#pragma unroll
    for (int i = 0; i < D / 2; i++) o[i] *= kept[i / 2 % 2];
  }

  DEVICE void pack_weights() {
#pragma unroll
    for (int i = 0; i < KEYS / 4; i++) p[i] = pack(s[2 * i], s[2 * i + 1]);
  }

  // The first tile's weights.
  DEVICE void begin(int first_key) {
    if (Q_IN_REGISTERS) {
#pragma unroll
      for (int i = 0; i < D / 16; i++) load_queries(q + 4 * i, i);
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
    for (int i = 0; i < D / 2; i++) o[i] = 0;
  }

  // The scores of the tile that begins at `first_key`, and beside them the output of the one before.
  template <bool HIDDEN>
  DEVICE void go_on(int first_key, bool turns) {
    constexpr bool stale = SOFTMAX == STALE && !HIDDEN;
    barrier_wait(at.k_full(k_place.stage), k_place.phase);
    if (PING_PONG && turns) named_sync(1 + w, 2 * WARPGROUP);
    mma_fence();
    issue_scores();
    barrier_wait(at.v_full(v_place.stage), v_place.phase);
    mma_fence();
    issue_output();
    if (PING_PONG && turns) named_arrive(1 + (w + 1) % CONSUMERS, 2 * WARPGROUP);
    mma_wait<1>();
    hold(s);
    float kept[2];
    bool changed;
    if (stale) {
      const float sum[2] = {weigh(0, m[0]), weigh(1, m[1])};
      changed = __any_sync(ALL, !(sum[0] <= LARGEST_SUM && sum[1] <= LARGEST_SUM));
      if (changed) {
        wait_for_output<0>();
        scores_again();
        softmax<true>(kept);
      } else {
        l[0] += sum[0], l[1] += sum[1];
        wait_for_output<1>();
      }
    } else {
      release(at.k_empty(k_place.stage));
      if (HIDDEN) mask(first_key);
      changed = softmax<HIDDEN>(kept);
      hold(s);
      wait_for_output<2>();
    }
    if (stale) release(at.k_empty(k_place.stage));
    release(at.v_empty(v_place.stage));
    k_place.advance();
    v_place.advance();
    if (changed) rescale(kept);
    pack_weights();
  }

  DEVICE void end() {
    barrier_wait(at.v_full(v_place.stage), v_place.phase);
    mma_fence();
    issue_output();
    mma_wait<0>();
    hold(o);
    release(at.v_empty(v_place.stage));
    v_place.advance();
  }

  // PLACE: the same wait in two branches would be made one before them, and that one moved before the exponentials.
  template <int PLACE>
  DEVICE void wait_for_output() {
    asm volatile("wgmma.wait_group.sync.aligned 0;  // %0" ::"n"(PLACE) : "memory");
    hold(o);
    hold(p);
  }

  // Tiles that other warpgroups see some key of, and this one none.
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

  // o / l through shared memory, 16 rows a warp, and the log-sum-exp.
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
    if (lane == 0) bulk_wait_read<0>();  // the tile before has left
    __syncwarp();
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
      const float* x = o + 8 * i;
      const u32 to = at.o(w) + i / 4 * (ROWS * 128) + swizzled(warp * 16 + lane % 16, i % 4 * 2 + lane / 16);
      store_matrix(to, pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7]));
    }
    fence_shared_async();
    __syncwarp();
    if (lane == 0) {
#pragma unroll
      for (int i = 0; i < BLOCKS; i++)
        tma_store(map, at.o(w) + i * (ROWS * 128) + warp * (16 * 128), i * 64, row, tile.head, tile.batch);
      bulk_commit();
    }
  }

  DEVICE void attend(const TensorMap& map, float* lse, const Tile& tile, int round) {
    const int row = tile.row + w * ROWS, loaded = seen_tiles(tile.row + CONSUMERS * ROWS - 1, sizes);
    if (row + ROWS <= 0 || row >= sizes.seq_q) {  // no query is here
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
    int in_turn = j + 1;
    if (PING_PONG) {  // as many as every warpgroup has
      const bool all = tile.row + ROWS > 0 && tile.row + (CONSUMERS - 1) * ROWS < sizes.seq_q;
      const int first = seen_tiles(tile.row + ROWS - 1, sizes) - 1;
      in_turn = !all ? 0 : CAUSAL ? least(open_tiles(tile.row, sizes), first) : in_turn;
    }
    for (; j >= 0; j--) go_on<false>(j * KEYS, j < in_turn);
    if (!Q_IN_REGISTERS) release(at.q_empty(w));
    end();
    write(map, lse, tile);
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
    for (int w = 0; w < CONSUMERS; w++) barrier_init(at.q_full(w), 1), barrier_init(at.q_empty(w), 4);
    for (int i = 0; i < K_STAGES; i++) barrier_init(at.k_full(i), 1), barrier_init(at.k_empty(i), 4 * CONSUMERS);
    for (int i = 0; i < V_STAGES; i++) barrier_init(at.v_full(i), 1), barrier_init(at.v_empty(i), 4 * CONSUMERS);
    barrier_init_done();
  }
  __syncthreads();
  if (warpgroup == 0) {
    registers_less<CONSUMERS == 3 ? 32 : 24>();
    if (threadIdx.x == 0) produce(q, k, v, counter, sizes, at);
  } else {
    registers_more<CONSUMERS == 3 ? 160 : 240>();
    Consumer consumer(sizes, at, warpgroup - 1);
    if (PING_PONG && warpgroup == CONSUMERS) named_arrive(1, 2 * WARPGROUP);  // the first one's turn
    for (int round = 0;; round++) {
      int number = SCHEDULE == GRID && round > 0 ? -1 : numbered(round, sizes);
      if (SCHEDULE != DYNAMIC && number < 0) break;
      barrier_wait(at.q_full(consumer.w), round & 1);
      if (SCHEDULE == DYNAMIC) {
        asm volatile("ld.shared.s32 %0, [%1];" : "=r"(number) : "r"(at.slot(consumer.w)) : "memory");
        number = uniform(number);
      }
      if (number < 0) break;
      consumer.attend(o, lse, located(number, sizes), round);
    }
    if (lane_id() == 0) bulk_wait<0>();
  }
}
