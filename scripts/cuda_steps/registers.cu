// + registers: 16 × 16 threads compute a tile of ROWS × KEYS scores, each thread a patch of ROW_PATCH × KEY_PATCH.
//
// A value that is read once from shared memory serves a whole row or column of the patch: ROW_PATCH + KEY_PATCH reads
// for ROW_PATCH × KEY_PATCH products, instead of two reads per product. The output stays in registers, ROW_PATCH × D /
// 16 per thread. A row belongs to 16 neighbouring lanes, which find its maximum by exchanging registers; its weights go
// through shared memory once, because the second product reads them along the keys.
//
// D: head size, a multiple of 16. Launch: n / ROWS blocks × batch, 16 × 16 threads, 4 (ROWS (D + 1) + KEYS (D + 1) +
// KEYS D + ROWS (KEYS + 1)) bytes of shared memory.

#define ROWS (16 * ROW_PATCH)
#define KEYS (16 * KEY_PATCH)
#define STRIDE (D + 1)

extern __shared__ float memory[];

__device__ float over_16_lanes(float mine, bool maximum) {
    for (int other = 8; other > 0; other /= 2) {
        const float theirs = __shfl_xor_sync(0xffffffff, mine, other);
        mine = maximum ? fmaxf(mine, theirs) : mine + theirs;
    }
    return mine;
}

extern "C" __global__ void attend(const float *q, const float *k, const float *v, float *o, int n) {
    float *q_tile = memory, *k_tile = q_tile + ROWS * STRIDE;
    float *v_tile = k_tile + KEYS * STRIDE, *weights = v_tile + KEYS * D;
    const int lane = threadIdx.x, group = threadIdx.y, t = group * 16 + lane;
    const long first = (long)blockIdx.y * n, block = first + blockIdx.x * ROWS;
    const float scale = rsqrtf((float)D), minus_infinity = __int_as_float(0xff800000);
    float maximum[ROW_PATCH], sum[ROW_PATCH], output[ROW_PATCH][D / 16];
    for (int r = 0; r < ROW_PATCH; r++) {
        maximum[r] = minus_infinity, sum[r] = 0.0f;
        for (int x = 0; x < D / 16; x++) output[r][x] = 0.0f;
    }
    for (int i = t; i < ROWS * D; i += 256) q_tile[i / D * STRIDE + i % D] = q[block * D + i];
    for (int tile = 0; tile < n; tile += KEYS) {
        __syncthreads();
        for (int i = t; i < KEYS * D; i += 256) {
            k_tile[i / D * STRIDE + i % D] = k[(first + tile) * D + i];
            v_tile[i] = v[(first + tile) * D + i];
        }
        __syncthreads();
        float score[ROW_PATCH][KEY_PATCH] = {};
#pragma unroll 1
        for (int x = 0; x < D; x++)
            for (int r = 0; r < ROW_PATCH; r++)
                for (int c = 0; c < KEY_PATCH; c++)
                    score[r][c] += q_tile[(group * ROW_PATCH + r) * STRIDE + x] * k_tile[(lane + 16 * c) * STRIDE + x];
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
#pragma unroll 1
        for (int key = 0; key < KEYS; key++)
            for (int r = 0; r < ROW_PATCH; r++)
                for (int x = 0; x < D / 16; x++)
                    output[r][x] +=
                        weights[(group * ROW_PATCH + r) * (KEYS + 1) + key] * v_tile[key * D + lane + 16 * x];
    }
    for (int r = 0; r < ROW_PATCH; r++)
        for (int x = 0; x < D / 16; x++)
            o[(block + group * ROW_PATCH + r) * D + lane + 16 * x] = output[r][x] / sum[r];
}
