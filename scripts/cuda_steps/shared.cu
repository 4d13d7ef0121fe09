// + shared memory: a block reads a tile of keys and values once for all its rows; queries and output stay there too.
//
// Keys and values are read n / ROWS times instead of n times. But thread t works on row t of the query tile, D floats
// from its neighbour's, so all 32 lanes of a warp access the same bank.
//
// D: head size. ROWS: rows of a block, one per thread. KEYS: keys of a tile. Launch: n / ROWS blocks × batch, ROWS
// threads, 4 (2 ROWS STRIDE + 2 KEYS D) bytes of shared memory.

#define STRIDE D

extern __shared__ float memory[];

extern "C" __global__ void attend(const float *q, const float *k, const float *v, float *o, int n) {
    float *q_tile = memory, *o_tile = q_tile + ROWS * STRIDE;
    float *k_tile = o_tile + ROWS * STRIDE, *v_tile = k_tile + KEYS * D;
    const int t = threadIdx.x;
    const long first = (long)blockIdx.y * n, row = first + blockIdx.x * ROWS + t;
    const float scale = rsqrtf((float)D), minus_infinity = __int_as_float(0xff800000);
    float maximum = minus_infinity, sum = 0.0f;
    for (int x = 0; x < D; x++) q_tile[t * STRIDE + x] = q[row * D + x], o_tile[t * STRIDE + x] = 0.0f;
    for (int tile = 0; tile < n; tile += KEYS) {
        __syncthreads();
        for (int key = t; key < KEYS; key += ROWS)
            for (int x = 0; x < D; x++) {
                k_tile[key * D + x] = k[(first + tile + key) * D + x];
                v_tile[key * D + x] = v[(first + tile + key) * D + x];
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
    for (int x = 0; x < D; x++) o[row * D + x] = o_tile[t * STRIDE + x] / sum;
}
