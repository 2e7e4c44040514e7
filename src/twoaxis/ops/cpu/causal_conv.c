/* Causal depthwise convolution. B sequences of T new tokens, R = P + T tokens with history, C channels, S sources, k taps of which
   the last one is for the current token, d tokens apart. Taps are [S k C]. A tap that lies before the first token or in another
   document is left out; documents are [B R], or NULL. */
#include "rows.h"

/* to[c] = start[c] + the sum over j of taps[j][c] * x[j][c]; start may be NULL. */
INLINE void tap_sum(float *restrict to, const float *start, rows_in taps, rows_in x, whole count, whole C) {
    whole c = 0;
    for (; c + LANES <= C; c += LANES) {
        lanes total = {0};
        if (start) total = load(start + c);
        for (whole j = 0; j < count; j++) total += load(taps[j] + c) * load(x[j] + c);
        store(to + c, total);
    }
    for (; c < C; c++) {
        float total = start ? start[c] : 0;
        for (whole j = 0; j < count; j++) total += taps[j][c] * x[j][c];
        to[c] = total;
    }
}

INLINE void add_product(float *restrict to, const float *restrict a, const float *restrict b, whole n) {
    for (whole c = 0; c < n; c++) to[c] += a[c] * b[c];
}

INLINE int seen(const int64_t *documents, whole row, whole first, whole other, whole R) {
    return other >= 0 && other < R && (documents == NULL || documents[row * R + other] == documents[row * R + first]);
}

void causal_conv(
    rows_in sources, const float *taps, const float *bias, const int64_t *documents, float *result, whole S, whole B, whole T,
    whole R, whole C, whole k, whole d, int threads) {
#pragma omp parallel for num_threads(threads) if (B * T * C > SMALL)
    for (whole n = 0; n < B * T; n++) {
        const whole row = n / T, at = n % T + R - T;
        const float *given[MOST], *weights[MOST];
        whole count = 0;
        for (whole s = 0; s < S; s++)
            for (whole j = 0; j < k; j++)
                if (seen(documents, row, at, at - d * (k - 1 - j), R)) {
                    given[count] = sources[s] + (row * R + at - d * (k - 1 - j)) * C;
                    weights[count++] = taps + (s * k + j) * C;
                }
        tap_sum(result + n * C, bias, weights, given, count, C);
    }
}

/* Scratch: the sums over the rows of each part, tap_parts [PARTS S k C] and bias_parts [PARTS C]. */
void causal_conv_backward(
    const float *grad, rows_in sources, const float *taps, const int64_t *documents, rows_out results, float *grad_taps,
    float *grad_bias, float *tap_parts, float *bias_parts, whole S, whole B, whole T, whole R, whole C, whole k, whole d,
    int threads) {
#pragma omp parallel for num_threads(threads) if (B * T * C > SMALL)
    for (whole part = 0; part < PARTS; part++) {
        memset(tap_parts + part * S * k * C, 0, S * k * C * sizeof(float));
        if (grad_bias) memset(bias_parts + part * C, 0, C * sizeof(float));
        for (whole n = first_row(part, B * R); n < first_row(part + 1, B * R); n++) {
            const whole row = n / R, at = n % R, past = R - T;
            if (grad_bias && at >= past) add(bias_parts + part * C, 1, grad + (row * T + at - past) * C, C);
            for (whole s = 0; s < S; s++) {
                const float *given[MOST], *weights[MOST];
                whole count = 0;
                for (whole j = 0; j < k; j++) {
                    const whole to = at + d * (k - 1 - j);
                    if (to < past || !seen(documents, row, at, to, R)) continue;
                    given[count] = grad + (row * T + to - past) * C;
                    weights[count++] = taps + (s * k + j) * C;
                    add_product(tap_parts + ((part * S + s) * k + j) * C, sources[s] + n * C, given[count - 1], C);
                }
                if (results[s]) tap_sum(results[s] + n * C, NULL, weights, given, count, C);
            }
        }
    }
    add_parts(grad_taps, tap_parts, S * k * C);
    if (grad_bias) add_parts(grad_bias, bias_parts, C);
}
