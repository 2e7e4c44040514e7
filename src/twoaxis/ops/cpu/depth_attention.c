/* Attention of one query over keys and values along depth. N rows, S sources, H heads of K numbers, G heads of keys and values:
   H / G query heads in a row share one. Scores are [S N H], log totals [N H]. */
#include "rows.h"

void depth_attention(
    const float *q, rows_in keys, rows_in values, float *mixed, float *scores, float *log_totals, whole S, whole N, whole H,
    whole G, whole K, int threads) {
    const float scale = 1 / sqrtf(K);
#pragma omp parallel for num_threads(threads) if (S * N * H * K > SMALL)
    for (whole n = 0; n < N; n++)
        for (whole h = 0; h < H; h++) {
            const whole row = n * H + h, at = (n * G + h / (H / G)) * K;
            float weights[MOST], top = -INFINITY, total = 0;
            dots(weights, q + row * K, keys, S, at, K);
            for (whole s = 0; s < S; s++) top = fmaxf(top, weights[s] * scale);
            for (whole s = 0; s < S; s++) {
                scores[s * N * H + row] = weights[s] * scale;
                weights[s] = expf(weights[s] * scale - top);
                total += weights[s];
            }
            log_totals[row] = top + logf(total);
            for (whole s = 0; s < S; s++) weights[s] /= total;
            ways_of_sum(1, 0, &mixed, row * K, weights, 1, values, S, at, 0, K);
        }
}

/* to = weight * x, or added to what other query heads left there. */
INLINE void put(float *restrict to, float weight, const float *restrict x, int first, int nontemporal, whole n) {
    if (!first) {
        add(to, weight, x, n);
        return;
    }
    whole c = 0;
    for (; c + LANES <= n; c += LANES) store_lanes(to + c, weight * load(x + c), nontemporal);
    for (; c < n; c++) to[c] = weight * x[c];
}

/* Gradients of all arguments, of the mixture and of the log totals, whose gradient may be NULL. */
void depth_attention_backward(
    const float *grad, const float *by_total, const float *q, rows_in keys, rows_in values, const float *scores,
    const float *log_totals, float *grad_q, rows_out grad_keys, rows_out grad_values, whole S, whole N, whole H, whole G, whole K,
    int threads) {
    const float scale = 1 / sqrtf(K);
    /* What several query heads add to is read again. */
    const int alone = G == H && stores_nontemporal(grad_keys, S, N * G * K, K);
    const int nontemporal = alone && stores_nontemporal(grad_values, S, N * G * K, K);
#pragma omp parallel num_threads(threads) if (S * N * H * K > SMALL)
    {
#pragma omp for
        for (whole n = 0; n < N; n++)
            for (whole h = 0; h < H; h++) {
                const whole row = n * H + h, at = (n * G + h / (H / G)) * K;
                const int first = h % (H / G) == 0;
                const float *g = grad + row * K;
                float weights[MOST], by_weight[MOST], total = 0, mean = 0;
                dots(by_weight, g, values, S, at, K);
                for (whole s = 0; s < S; s++) {
                    /* The total is 1 but for the rounding of its logarithm. */
                    weights[s] = expf(scores[s * N * H + row] - log_totals[row]);
                    total += weights[s];
                    mean += weights[s] * by_weight[s];
                }
                mean /= total;
                for (whole s = 0; s < S; s++) {
                    weights[s] /= total;
                    by_weight[s] = scale * weights[s] * (by_weight[s] - mean + (by_total ? by_total[row] : 0));
                    put(grad_keys[s] + at, by_weight[s], q + row * K, first, nontemporal, K);
                    put(grad_values[s] + at, weights[s], g, first, nontemporal, K);
                }
                ways_of_sum(1, 0, &grad_q, row * K, by_weight, 1, keys, S, at, 0, K);
            }
        if (nontemporal) end_nontemporal();
    }
}
