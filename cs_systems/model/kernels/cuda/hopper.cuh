// Thin functions over PTX for Hopper's instructions that CUDA C++ does not expose: wgmma, TMA, barriers.
//
// Compiled by NVRTC alone. FP16 = 1 makes the elements fp16, otherwise they are bf16.
//
// Tiles in shared memory are blocks of R rows x 64 elements: 128 bytes a row, the 16-byte chunk c of row r at place c ^
// (r % 8), which is the 128-byte swizzle of TMA and wgmma; each block aligned to 1024 bytes. A tile of 128 columns is
// two blocks.
//
// Layout of a 64 x N result in a warpgroup of 128 threads, d[N / 2] per thread: thread t has row
// t / 32 * 16 + t % 32 / 4 + 8 h, column 8 j + t % 4 * 2 + l in d[4 j + 2 h + l]. As left operand of a next product, 16
// columns are the four registers pack(d[8 k], d[8 k + 1]) ... pack(d[8 k + 6], d[8 k + 7]).
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

#ifndef FP16
#define FP16 0
#endif
#if FP16
#define ELEMENT "f16"
#else
#define ELEMENT "bf16"
#endif
#define DEVICE __device__ __forceinline__

struct alignas(64) TensorMap {
  u64 opaque[16];
};  // a CUtensorMap, passed as `const __grid_constant__ TensorMap`

DEVICE u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }
DEVICE u32 lane_id() { return threadIdx.x & 31; }
// Return a value that is equal in all lanes, and that the compiler can prove equal, so that branches on it are uniform.
DEVICE int uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

// ---- arithmetic ----

DEVICE int least(int a, int b) { return a < b ? a : b; }
DEVICE int most(int a, int b) { return a > b ? a : b; }
DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Pack two elements into one register, the lower column `low` in the lower half.
DEVICE u32 pack(float low, float high) {
  u32 y;
  asm("cvt.rn." ELEMENT "x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
// Return the lower and the higher of two elements.
#if FP16
DEVICE float2 unpack(u32 x) {
  float2 y;
  asm("{ .reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }" : "=f"(y.x), "=f"(y.y) : "r"(x));
  return y;
}
#else
DEVICE float2 unpack(u32 x) { return {__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000)}; }
#endif

// ---- mbarriers: `at` is a shared address of 8 bytes; a new barrier counts as completed with parity 1 ----

DEVICE void barrier_init(u32 at, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(arrivals));
}
// Make the inits visible to the copy engine; call it before __syncthreads.
DEVICE void barrier_init_done() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// Arrive once, and add the bytes that TMA will transfer to what the phase waits for.
DEVICE void barrier_expect(u32 at, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}
// Arrive once.
DEVICE void barrier_arrive(u32 at) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory"); }
// Arrive once for a warp: one lane does it when all have come. compute-sanitizer's racecheck does not track that order
// between lanes; with EVERY_LANE = 1 each lane arrives, for its sake.
#ifndef EVERY_LANE
#define EVERY_LANE 0
#endif
constexpr u32 WARP_ARRIVALS = EVERY_LANE ? 32 : 1;
DEVICE void release(u32 empty) {
  __syncwarp();
  if (EVERY_LANE || lane_id() == 0) barrier_arrive(empty);
}
DEVICE bool barrier_done(u32 at, u32 parity) {
  u32 done;
  asm volatile(
      "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
      : "=r"(done)
      : "r"(at), "r"(parity)
      : "memory");
  return done;
}
DEVICE void barrier_wait(u32 at, u32 parity) {
  while (!barrier_done(at, parity)) {
  }
}

// Position in a ring of buffers, and the parity of its barriers' phase.
template <int SIZE>
struct RingPlace {
  int stage = 0;
  u32 phase = 0;
  DEVICE void advance() {
    stage += 1;
    if (stage == SIZE) stage = 0, phase ^= 1;
  }
};

// ---- named barriers (0 is __syncthreads): both sides use the same id and number of threads ----

DEVICE void named_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
DEVICE void named_arrive(int id, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// ---- registers, fences, dependent launches ----

template <int REGISTERS>
DEVICE void registers_more() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
DEVICE void registers_less() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
// Make this thread's writes to shared memory visible to TMA and wgmma (after a barrier between the threads).
DEVICE void fence_shared_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Wait until the previous kernel has ended and its writes are visible; let the next kernel start its launch.
DEVICE void grid_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE void grid_launch_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// ---- TMA: one lane calls these. Coordinates of (column, row, head, batch), the innermost first ----

DEVICE void tma_prefetch_map(const TensorMap& map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }
DEVICE void tma_load(u32 to, const TensorMap& map, u32 barrier, int column, int row, int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];"
      ::"r"(to), "l"(&map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
}
DEVICE void tma_store(const TensorMap& map, u32 from, int column, int row, int head, int batch) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];"
               ::"l"(&map), "r"(from), "r"(column), "r"(row), "r"(head), "r"(batch)
               : "memory");
}
// Copies of bytes in memory order; addresses and sizes are multiples of 16.
DEVICE void bulk_load(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(to), "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}
DEVICE void bulk_add_f32(float* to, u32 from, u32 bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
               ::"l"(to), "r"(from), "r"(bytes) : "memory");
}
// Copies of 16 bytes by each lane itself, which do not wait behind those of the copy engine. Copies since the last commit
// form one group; `copy_wait` waits until all but the last GROUPS groups are there, for the lane that copied.
DEVICE void copy_async(u32 to, const void* from, u64 policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "l"(policy) : "memory");
}
DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int GROUPS>
DEVICE void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory");
}
// Return the policy of the L2 cache for what is read once: it makes room first.
DEVICE u64 read_once() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Stores and additions of this thread since the last commit form one group. `bulk_wait_read` waits until all but the
// last GROUPS groups have left shared memory; `bulk_wait` waits until they are complete.
DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int GROUPS>
DEVICE void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(GROUPS) : "memory");
}
template <int GROUPS>
DEVICE void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(GROUPS) : "memory");
}

// ---- results to shared memory ----

// Store 16 rows x 16 columns of a warp from the registers of a left operand. Lane l passes the address of row l % 16:
// that of its left 8 columns if l < 16, of its right 8 otherwise.
DEVICE void store_matrix(u32 at, u32 a0, u32 a1, u32 a2, u32 a3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(at), "r"(a0), "r"(a1), "r"(a2), "r"(a3) : "memory");
}
// Store the same transposed: 16 rows of shared memory hold the 16 columns. Lane l passes the address of row
// l / 16 * 8 + l % 8: that of its left 8 columns if l / 8 is even, of its right 8 otherwise.
DEVICE void store_matrix_transposed(u32 at, u32 a0, u32 a1, u32 a2, u32 a3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(at), "r"(a0), "r"(a1), "r"(a2), "r"(a3) : "memory");
}
// Load the registers of a left operand from shared memory, the reverse of the first.
DEVICE void load_matrix(u32 at, u32& a0, u32& a1, u32& a2, u32& a3) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a0), "=r"(a1), "=r"(a2), "=r"(a3) : "r"(at) : "memory");
}
// Return the place of chunk `chunk` (8 columns) of row `row` in a block, in bytes.
DEVICE u32 swizzled(u32 row, u32 chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }
DEVICE void store_float4(u32 at, float a, float b, float c, float d) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
DEVICE void store_uint4(u32 at, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
DEVICE uint4 load_uint4(u32 at) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(at));
  return x;
}

// ---- wgmma ----

// Return the descriptor of an operand that begins at a block's row (a multiple of 8). Additions to a descriptor are in
// units of 16 bytes. A step of 16 along the summed dimension k adds 2 if the block's rows are m or n (k is contiguous,
// trans 0), and reaches the next block after four steps; it adds 128 if the rows are k (m or n is contiguous, trans 1).
// block_bytes: distance from 64 columns to the next 64, needed with trans 1 if n is larger.
DEVICE u64 describe(u32 address, u32 block_bytes = 16) {
  constexpr u64 eight_rows = 1024 >> 4, swizzle_128 = 1;
  return (u64)((address & 0x3ffff) >> 4) | (u64)(block_bytes >> 4) << 16 | eight_rows << 32 | swizzle_128 << 62;
}

// Required before the first product, and after writes to registers of an operand or of the sum.
DEVICE void mma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void mma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Wait until all but the last GROUPS committed groups are complete.
template <int GROUPS>
DEVICE void mma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(GROUPS) : "memory");
}
// Forbid the compiler to move reads or writes of these registers across this place: put it after the wait for their
// product, and after writes before it.
template <int N>
DEVICE void hold(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}
template <int N>
DEVICE void hold(u32 (&a)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+r"(a[i])::"memory");
}
// Declare the contents of d dead, so that ptxas takes a product that does not add to it for a new value. Put it before
// such products if other instructions wrote d; otherwise ptxas serializes the products (C7515).
template <int N>
DEVICE void forget(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "=f"(d[i]));
}

#define WGMMA_8(i)                                                                                            \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define WGMMA_SUM_32 WGMMA_8(0), WGMMA_8(8), WGMMA_8(16), WGMMA_8(24)
#define WGMMA_SUM_40 WGMMA_SUM_32, WGMMA_8(32)
#define WGMMA_SUM_48 WGMMA_SUM_32, WGMMA_8(32), WGMMA_8(40)
#define WGMMA_SUM_64 WGMMA_SUM_32, WGMMA_8(32), WGMMA_8(40), WGMMA_8(48), WGMMA_8(56)
#define WGMMA_SUM_128                                                                                        \
  WGMMA_SUM_64, WGMMA_8(64), WGMMA_8(72), WGMMA_8(80), WGMMA_8(88), WGMMA_8(96), WGMMA_8(104), WGMMA_8(112), \
      WGMMA_8(120)
#define WGMMA_LIST_32                                                                              \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25," \
  "%26,%27,%28,%29,%30,%31"
#define WGMMA_LIST_40 WGMMA_LIST_32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define WGMMA_LIST_48 WGMMA_LIST_40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define WGMMA_LIST_64                                                                            \
  WGMMA_LIST_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,"  \
  "%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define WGMMA_LIST_128                                                              \
  WGMMA_LIST_64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79," \
  "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,"                \
  "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,"    \
  "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define WGMMA(N, ADD) \
  "{ .reg .pred p; setp.ne.b32 p, %" ADD ", 0; wgmma.mma_async.sync.aligned.m64n" N "k16.f32." ELEMENT "." ELEMENT " {"

// Compute d (64 x N, in N / 2 registers) = a b, or d += a b if `add`, over 16 of k: a and b by descriptor, trans as in
// `describe`. It is asynchronous: nothing may touch d before a wait for its group. The macro's numbers are those of the
// operands: d's COUNT, then a, b, add, and both trans.
#define MMA(N, COUNT, B, ADD, TRANS_OF_A, TRANS_OF_B)                                                 \
  template <int TRANS_A, int TRANS_B>                                                                 \
  DEVICE void mma(float (&d)[COUNT], u64 a, u64 b, int add) {                                         \
    asm volatile(WGMMA(#N, #ADD) WGMMA_LIST_##COUNT "}, %" #COUNT ", %" #B ", p, 1, 1, %" #TRANS_OF_A \
                 ", %" #TRANS_OF_B "; }"                                                              \
                 : WGMMA_SUM_##COUNT                                                                  \
                 : "l"(a), "l"(b), "r"(add), "n"(TRANS_A), "n"(TRANS_B));                             \
  }
MMA(64, 32, 33, 34, 35, 36)
MMA(80, 40, 41, 42, 43, 44)
MMA(128, 64, 65, 66, 67, 68)
MMA(256, 128, 129, 130, 131, 132)
// Compute the same with a in four registers, `a` from `first` on, which may not be written before the wait either.
#define MMA_FROM_REGISTERS(N, COUNT, A1, A2, A3, B, ADD, TRANS)                                              \
  template <int TRANS_B, int SIZE>                                                                           \
  DEVICE void mma(float (&d)[COUNT], const u32 (&a)[SIZE], int first, u64 b, int add) {                      \
    asm volatile(WGMMA(#N, #ADD) WGMMA_LIST_##COUNT "}, {%" #COUNT ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B   \
                 ", p, 1, 1, %" #TRANS "; }"                                                                 \
                 : WGMMA_SUM_##COUNT                                                                         \
                 : "r"(a[first]), "r"(a[first + 1]), "r"(a[first + 2]), "r"(a[first + 3]), "l"(b), "r"(add), \
                   "n"(TRANS_B));                                                                            \
  }
MMA_FROM_REGISTERS(64, 32, 33, 34, 35, 36, 37, 38)
MMA_FROM_REGISTERS(80, 40, 41, 42, 43, 44, 45, 46)
MMA_FROM_REGISTERS(96, 48, 49, 50, 51, 52, 53, 54)
MMA_FROM_REGISTERS(128, 64, 65, 66, 67, 68, 69, 70)
MMA_FROM_REGISTERS(256, 128, 129, 130, 131, 132, 133, 134)

// ---- sums in global memory, and their order ----
// Order the copy engine's and the threads' accesses to global memory.
DEVICE void fence_async() { asm volatile("fence.proxy.async;" ::: "memory"); }
// Add four numbers to global memory, each by itself, at a multiple of 16 bytes.
DEVICE void add_float4(float* to, float a, float b, float c, float d) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
DEVICE u32 load_acquire(const u32* at) {
  u32 x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
  return x;
}
DEVICE void add_release(u32* to, u32 x) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}
