// + asynchronous copies: the next tile is copied into a second buffer during the computation on this one.
//
// cp.async (sm_80 and later) copies 16 bytes from global to shared memory without registers; a thread waits only when
// it needs the tile. Copies of 16 bytes require rows that begin at multiples of 16, so the padding is four floats, and
// reading four at a time touches each bank once.
//
// The last of the fp32 steps, with a switch for each technique, so that each can be left out alone. A patch of 1 × 1
// disables blocking in registers; without SHARED, keys and values are read from global memory.
// D: head size, a multiple of 16. Launch: n / ROWS blocks × batch, 16 × 16 threads,
// 4 (ROWS STRIDE + 2 BUFFERS KEYS STRIDE + ROWS (KEYS + 1)) bytes of shared memory.

#define ROWS (16 * ROW_PATCH)
#define KEYS (16 * KEY_PATCH)
#define STRIDE (D + PADDING)
#define BUFFERS (ASYNC ? 2 : 1)

constexpr int turns = UNROLL;  // a macro's name is not replaced within a pragma

extern __shared__ __align__(16) float memory[];

__device__ float over_16_lanes(float mine, bool maximum) {
    for (int other = 8; other > 0; other /= 2) {
        const float theirs = __shfl_xor_sync(0xffffffff, mine, other);
        mine = maximum ? fmaxf(mine, theirs) : mine + theirs;
    }
    return mine;
}

// Copy 16 bytes from global to shared memory without registers; `arrived` waits for all copies of this thread.
__device__ void copy_16(void *to, const void *from) {
    const unsigned address = (unsigned)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
}
__device__ void arrived() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Copy four floats per thread; neighbouring threads take neighbouring floats if COALESCED, else neighbouring rows.
__device__ void copy(float *tile, const float *from, int rows) {
    for (int i = threadIdx.y * 16 + threadIdx.x; i < rows * D / 4; i += 256) {
        const int row = COALESCED ? i / (D / 4) : i % rows, x = 4 * (COALESCED ? i % (D / 4) : i / rows);
        float *to = tile + row * STRIDE + x;
        if (ASYNC)
            copy_16(to, from + row * D + x);
        else
            *(float4 *)to = *(const float4 *)(from + row * D + x);
    }
}

__device__ float dot(float4 a, float4 b) { return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; }

extern "C" __global__ void attend(const float *q, const float *k, const float *v, float *o, int n) {
    const int lane = threadIdx.x, group = threadIdx.y, tiles = n / KEYS, stride = SHARED ? STRIDE : D;
    float *q_tile = memory, *buffers = q_tile + ROWS * STRIDE, *weights = buffers + 2 * BUFFERS * KEYS * STRIDE;
    const long first = (long)blockIdx.y * n, block = first + blockIdx.x * ROWS;
    const float scale = rsqrtf((float)D), minus_infinity = __int_as_float(0xff800000);
    float maximum[ROW_PATCH], sum[ROW_PATCH], output[ROW_PATCH][D / 16];
    for (int r = 0; r < ROW_PATCH; r++) {
        maximum[r] = minus_infinity, sum[r] = 0.0f;
        for (int x = 0; x < D / 16; x++) output[r][x] = 0.0f;
    }
    copy(q_tile, q + block * D, ROWS);
    for (int tile = 0; tile < tiles; tile++) {
        float *buffer = buffers + 2 * (tile % BUFFERS) * KEYS * STRIDE;
        if (SHARED && (!ASYNC || tile == 0)) {
            __syncthreads();
            copy(buffer, k + (first + tile * KEYS) * D, KEYS);
            copy(buffer + KEYS * STRIDE, v + (first + tile * KEYS) * D, KEYS);
        }
        if (ASYNC) arrived();
        __syncthreads();  // this tile has arrived, and all threads have read the previous one
        if (SHARED && ASYNC && tile + 1 < tiles) {
            float *next = buffers + 2 * ((tile + 1) % BUFFERS) * KEYS * STRIDE;
            copy(next, k + (first + (tile + 1) * KEYS) * D, KEYS);
            copy(next + KEYS * STRIDE, v + (first + (tile + 1) * KEYS) * D, KEYS);
        }
        const float *keys = SHARED ? buffer : k + (first + tile * KEYS) * D;
        const float *values = SHARED ? buffer + KEYS * STRIDE : v + (first + tile * KEYS) * D;
        float score[ROW_PATCH][KEY_PATCH] = {};
#pragma unroll turns
        for (int x = 0; x < D; x += 4)
            for (int r = 0; r < ROW_PATCH; r++)
                for (int c = 0; c < KEY_PATCH; c++)
                    score[r][c] += dot(*(float4 *)(q_tile + (group * ROW_PATCH + r) * STRIDE + x),
                                       *(const float4 *)(keys + (lane + 16 * c) * stride + x));
        for (int r = 0; r < ROW_PATCH; r++) {
            float higher = maximum[r], added = 0.0f;
            for (int c = 0; c < KEY_PATCH; c++) higher = fmaxf(higher, score[r][c] * scale);
            higher = over_16_lanes(higher, true);
            for (int c = 0; c < KEY_PATCH; c++) {
                const float weight = __expf(score[r][c] * scale - higher);
                weights[(group * ROW_PATCH + r) * (KEYS + 1) + lane + 16 * c] = weight;
                added += weight;
            }
            const float shrink = __expf(maximum[r] - higher);
            sum[r] = sum[r] * shrink + over_16_lanes(added, false);
            maximum[r] = higher;
            for (int x = 0; x < D / 16; x++) output[r][x] *= shrink;
        }
        __syncwarp();  // the 16 lanes that read a row's weights are those that wrote them
#pragma unroll turns
        for (int key = 0; key < KEYS; key++)
            for (int r = 0; r < ROW_PATCH; r++)
                for (int x = 0; x < D / 16; x++)
                    output[r][x] +=
                        weights[(group * ROW_PATCH + r) * (KEYS + 1) + key] * values[key * stride + lane + 16 * x];
        __syncwarp();
    }
    for (int r = 0; r < ROW_PATCH; r++)
        for (int x = 0; x < D / 16; x++)
            o[(block + group * ROW_PATCH + r) * D + lane + 16 * x] = output[r][x] / sum[r];
}
