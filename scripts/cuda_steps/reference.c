/* Attention on one CPU core, in the order of the formula: the baseline of every step of the ladder.

   o = softmax(q kᵀ / √d) v; q, k, v, o: (batch, n, d), row-major floats. One row of scores at a time, in `scores` (n). */

#include <float.h>
#include <math.h>

void attend(const float *q, const float *k, const float *v, float *o, float *scores, long batch, long n, long d) {
    const float scale = 1.0f / sqrtf((float)d);
    for (long b = 0; b < batch; b++, q += n * d, k += n * d, v += n * d, o += n * d)
        for (long row = 0; row < n; row++) {
            float maximum = -FLT_MAX, sum = 0.0f;
            for (long key = 0; key < n; key++) {
                float score = 0.0f;
                for (long x = 0; x < d; x++) score += q[row * d + x] * k[key * d + x];
                scores[key] = score * scale;
                maximum = fmaxf(maximum, scores[key]);
            }
            for (long x = 0; x < d; x++) o[row * d + x] = 0.0f;
            for (long key = 0; key < n; key++) {
                const float weight = expf(scores[key] - maximum);
                sum += weight;
                for (long x = 0; x < d; x++) o[row * d + x] += weight * v[key * d + x];
            }
            for (long x = 0; x < d; x++) o[row * d + x] /= sum;
        }
}
