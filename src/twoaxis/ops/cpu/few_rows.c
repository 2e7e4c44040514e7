/* Products of a few rows with a weight matrix that is read once, which BLAS reads at a fraction of the speed of memory.
   Letters: N rows, O outputs, K inputs. */
#include "rows.h"

#define TOGETHER 4

/* The sum of each of four vectors, whose lanes are added in the same order whichever of them are asked for. */
INLINE void sums_of(float *to, const lanes *x) {
#ifdef __AVX__
    const __m256 first = _mm256_hadd_ps((__m256)x[0], (__m256)x[1]), second = _mm256_hadd_ps((__m256)x[2], (__m256)x[3]);
    const __m256 quarters = _mm256_hadd_ps(first, second);
    _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(quarters), _mm256_extractf128_ps(quarters, 1)));
#else
    for (int i = 0; i < TOGETHER; i++) to[i] = sum_of(x[i]);
#endif
}

/* y[i * O] = w . x[i] for ROWS rows; two sums of each row go on in turn, since an addition takes several cycles. */
INLINE void products(const int ROWS, float *y, whole O, const float *w, const float *x, whole K) {
    lanes first[TOGETHER] = {{0}}, second[TOGETHER] = {{0}};
    float totals[TOGETHER];
    whole k = 0;
    for (; k + 2 * LANES <= K; k += 2 * LANES) {
        const lanes one = load(w + k), other = load(w + k + LANES);
        for (int i = 0; i < ROWS; i++) {
            first[i] += one * load(x + i * K + k);
            second[i] += other * load(x + i * K + k + LANES);
        }
    }
    for (int i = 0; i < ROWS; i++) first[i] += second[i];
    sums_of(totals, first);
    for (int i = 0; i < ROWS; i++) {
        for (whole rest = k; rest < K; rest++) totals[i] += w[rest] * x[i * K + rest];
        y[i * O] = totals[i];
    }
}

/* y [N, O] = x [N, K] times the transpose of w [O, K]; a row comes out the same whatever the other rows are. */
void few_rows(const float *x, const float *w, float *y, whole N, whole K, whole O, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (O * K >= SMALL)
    for (whole o = 0; o < O; o++) {
        whole n = 0;
        for (; n + 4 <= N; n += 4) products(4, y + n * O + o, O, w + o * K, x + n * K, K);
        for (; n + 2 <= N; n += 2) products(2, y + n * O + o, O, w + o * K, x + n * K, K);
        for (; n < N; n++) products(1, y + n * O + o, O, w + o * K, x + n * K, K);
    }
}
