// + tensor cores: both products by mma.sync on fp16 tiles, accumulated in fp32; the softmax between them stays in fp32.
//
// Each of four warps computes 16 rows. Its lanes hold a 16 × 8 tile of the product in the instruction's layout: lane l
// has the columns 2 (l % 4) and 2 (l % 4) + 1 of the rows l / 4 and l / 4 + 8 (PTX ISA, "Matrix Fragments for
// mma.m16n8k16"), so four neighbouring lanes share a row. Two such tiles of weights, rounded to fp16, are already the
// first factor of the second product, so they never leave the registers. With a padding of eight fp16, ldmatrix reads
// its eight rows without conflicts.
//
// The inputs are fp16 here, the output is fp32. D: head size, a multiple of 16. KEYS: keys of a tile, a multiple of 16.
// Launch: n / 64 blocks × batch, 128 threads, 2 (64 + 4 KEYS) (D + 8) bytes of shared memory.

#define ROWS 64
#define STRIDE (D + 8)

using half = unsigned short;  // 16 bits, which only the tensor cores compute with

extern __shared__ __align__(16) half memory[];

// Copy 16 bytes from global to shared memory without registers; `arrived` waits for all copies of this thread.
__device__ void copy_16(void *to, const void *from) {
    const unsigned address = (unsigned)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
}
__device__ void arrived() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ void copy(half *tile, const half *from, int rows) {
    for (int i = threadIdx.x; i < rows * D / 8; i += 128) {
        const int row = i / (D / 8), x = 8 * (i % (D / 8));
        copy_16(tile + row * STRIDE + x, from + row * D + x);
    }
}

// Load four 8 × 8 tiles; lane l passes the address of a row of tile l / 8 and receives two elements of each tile.
template <bool transposed> __device__ void load(unsigned (&to)[4], const half *row) {
    const unsigned address = (unsigned)__cvta_generic_to_shared(row);
    if (transposed)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(address) : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(address) : "memory");
}

// Compute c (16 × 8) += a (16 × 16) b (16 × 8).
__device__ void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ unsigned pack(float low, float high) {
    unsigned both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

__device__ float over_4_lanes(float mine, bool maximum) {
    for (int other = 2; other > 0; other /= 2) {
        const float theirs = __shfl_xor_sync(0xffffffff, mine, other);
        mine = maximum ? fmaxf(mine, theirs) : mine + theirs;
    }
    return mine;
}

extern "C" __global__ void attend(const half *q, const half *k, const half *v, float *o, int n) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, tiles = n / KEYS;
    half *q_tile = memory, *buffers = q_tile + ROWS * STRIDE;
    const long first = (long)blockIdx.y * n, block = first + blockIdx.x * ROWS;
    const float scale = rsqrtf((float)D), minus_infinity = __int_as_float(0xff800000);
    copy(q_tile, q + block * D, ROWS);
    copy(buffers, k + first * D, KEYS);
    copy(buffers + KEYS * STRIDE, v + first * D, KEYS);
    float maximum[2] = {minus_infinity, minus_infinity}, sum[2] = {}, output[D / 8][4] = {};
    unsigned query[D / 16][4];
    for (int tile = 0; tile < tiles; tile++) {
        const half *keys = buffers + 2 * (tile % 2) * KEYS * STRIDE, *values = keys + KEYS * STRIDE;
        arrived();
        __syncthreads();  // this tile has arrived, and all threads have read the previous one
        if (tile + 1 < tiles) {
            half *next = buffers + 2 * ((tile + 1) % 2) * KEYS * STRIDE;
            copy(next, k + (first + (tile + 1) * KEYS) * D, KEYS);
            copy(next + KEYS * STRIDE, v + (first + (tile + 1) * KEYS) * D, KEYS);
        }
        if (tile == 0)
#pragma unroll
            for (int x = 0; x < D / 16; x++)
                load<false>(query[x], q_tile + (warp * 16 + lane % 16) * STRIDE + x * 16 + lane / 16 * 8);
        float score[KEYS / 8][4] = {};
#pragma unroll
        for (int x = 0; x < D / 16; x++)
#pragma unroll
            for (int key = 0; key < KEYS / 16; key++) {
                unsigned b[4];
                load<false>(b, keys + (key * 16 + lane / 16 * 8 + lane % 8) * STRIDE + x * 16 + lane / 8 % 2 * 8);
                multiply(score[2 * key], query[x], b[0], b[1]);
                multiply(score[2 * key + 1], query[x], b[2], b[3]);
            }
#pragma unroll
        for (int r = 0; r < 2; r++) {  // rows lane / 4 and lane / 4 + 8
            float higher = maximum[r], added = 0.0f;
#pragma unroll
            for (int c = 0; c < KEYS / 8; c++)
                higher = fmaxf(higher, scale * fmaxf(score[c][2 * r], score[c][2 * r + 1]));
            higher = over_4_lanes(higher, true);
#pragma unroll
            for (int c = 0; c < KEYS / 8; c++)
#pragma unroll
                for (int i = 2 * r; i < 2 * r + 2; i++) {
                    score[c][i] = __expf(score[c][i] * scale - higher);
                    added += score[c][i];
                }
            const float shrink = __expf(maximum[r] - higher);
            sum[r] = sum[r] * shrink + over_4_lanes(added, false);
            maximum[r] = higher;
#pragma unroll
            for (int x = 0; x < D / 8; x++) output[x][2 * r] *= shrink, output[x][2 * r + 1] *= shrink;
        }
#pragma unroll
        for (int key = 0; key < KEYS / 16; key++) {
            const unsigned weight[4] = {pack(score[2 * key][0], score[2 * key][1]),
                                        pack(score[2 * key][2], score[2 * key][3]),
                                        pack(score[2 * key + 1][0], score[2 * key + 1][1]),
                                        pack(score[2 * key + 1][2], score[2 * key + 1][3])};
#pragma unroll
            for (int x = 0; x < D / 16; x++) {
                unsigned b[4];
                load<true>(b, values + (key * 16 + lane % 16) * STRIDE + x * 16 + lane / 16 * 8);
                multiply(output[2 * x], weight, b[0], b[1]);
                multiply(output[2 * x + 1], weight, b[2], b[3]);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
        for (int x = 0; x < D / 8; x++)
#pragma unroll
            for (int i = 0; i < 2; i++)
                o[(block + warp * 16 + lane / 4 + 8 * r) * D + x * 8 + lane % 4 * 2 + i] = output[x][2 * r + i] / sum[r];
}
