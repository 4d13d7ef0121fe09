// Naive: one thread computes one row, and all of its data is in global memory, the output's sums too.
//
// It uses the online softmax of FlashAttention (Milakov and Gimelshein, 2018; Dao et al., 2022): the running maximum
// and sum of a row are updated key by key, and the sums are rescaled when the maximum grows. No score is stored.
//
// D: head size. Launch: n / THREADS blocks × batch, THREADS threads; no shared memory.

extern "C" __global__ void attend(const float *q, const float *k, const float *v, float *o, int n) {
    const long row = blockIdx.x * blockDim.x + threadIdx.x, first = (long)blockIdx.y * n;
    q += (first + row) * D, o += (first + row) * D, k += first * D, v += first * D;
    const float scale = rsqrtf((float)D), minus_infinity = __int_as_float(0xff800000);
    float maximum = minus_infinity, sum = 0.0f;
    for (int x = 0; x < D; x++) o[x] = 0.0f;
    for (int key = 0; key < n; key++) {
        float score = 0.0f;
#pragma unroll 1
        for (int x = 0; x < D; x++) score += q[x] * k[key * D + x];
        score *= scale;
        const float higher = fmaxf(maximum, score);
        const float shrink = __expf(maximum - higher), weight = __expf(score - higher);
        sum = sum * shrink + weight;
        maximum = higher;
#pragma unroll 1
        for (int x = 0; x < D; x++) o[x] = o[x] * shrink + weight * v[key * D + x];
    }
    for (int x = 0; x < D; x++) o[x] /= sum;
}
