// + coalescing: neighbouring threads copy neighbouring floats between global and shared memory, of any row.
//
// A warp's 32 reads are 128 contiguous bytes, one transaction. Without coalescing they are in 32 rows: 32 transactions.
//
// D: head size. ROWS: rows of a block, one per thread. KEYS: keys of a tile. Launch: n / ROWS blocks × batch, ROWS
// threads, 4 (2 ROWS STRIDE + 2 KEYS D) bytes of shared memory.

#define STRIDE (D + 1)

extern __shared__ float memory[];

extern "C" __global__ void attend(const float *q, const float *k, const float *v, float *o, int n) {
    float *q_tile = memory, *o_tile = q_tile + ROWS * STRIDE;
    float *k_tile = o_tile + ROWS * STRIDE, *v_tile = k_tile + KEYS * D;
    const int t = threadIdx.x;
    const long first = (long)blockIdx.y * n, block = first + blockIdx.x * ROWS;
    const float scale = rsqrtf((float)D), minus_infinity = __int_as_float(0xff800000);
    float maximum = minus_infinity, sum = 0.0f;
    for (int i = t; i < ROWS * D; i += ROWS) q_tile[i / D * STRIDE + i % D] = q[block * D + i];
    for (int x = 0; x < D; x++) o_tile[t * STRIDE + x] = 0.0f;
    for (int tile = 0; tile < n; tile += KEYS) {
        __syncthreads();
        for (int i = t; i < KEYS * D; i += ROWS) {
            k_tile[i] = k[(first + tile) * D + i];
            v_tile[i] = v[(first + tile) * D + i];
        }
        __syncthreads();
        for (int key = 0; key < KEYS; key++) {
            float score = 0.0f;
#pragma unroll 1
            for (int x = 0; x < D; x++) score += q_tile[t * STRIDE + x] * k_tile[key * D + x];
            score *= scale;
            const float higher = fmaxf(maximum, score);
            const float shrink = __expf(maximum - higher), weight = __expf(score - higher);
            sum = sum * shrink + weight;
            maximum = higher;
#pragma unroll 1
            for (int x = 0; x < D; x++)
                o_tile[t * STRIDE + x] = o_tile[t * STRIDE + x] * shrink + weight * v_tile[key * D + x];
        }
    }
    for (int x = 0; x < D; x++) o_tile[t * STRIDE + x] /= sum;
    __syncthreads();
    for (int i = t; i < ROWS * D; i += ROWS) o[block * D + i] = o_tile[i / D * STRIDE + i % D];
}
