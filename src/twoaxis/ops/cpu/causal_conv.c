/* Causal depthwise convolution. B sequences of T new tokens, R = P + T tokens with history, C channels, S sources, k taps of which
   the last one is for the current token, d tokens apart. Taps are [S k C]. A tap that lies before the first token or in another
   document is left out; documents are [B R], or NULL. */
#include "rows.h"

/* Channels of which all rows of a part are taken before the next ones, so that the sums of their taps stay in the nearest cache. */
#define CHANNELS 256

/* to[c] = start[c] + the sum over j of taps[j][c] * x[j][c]; start may be NULL. */
INLINE void tap_sum(
    float *restrict to, const float *start, rows_in taps, rows_in x, const whole COUNT, int nontemporal, whole C) {
    whole c = 0;
    for (; c + LANES <= C; c += LANES) {
        lanes total = {0};
        if (start) total = load(start + c);
        for (whole j = 0; j < COUNT; j++) total += load(taps[j] + c) * load(x[j] + c);
        store_lanes(to + c, total, nontemporal);
    }
    for (; c < C; c++) {
        float total = start ? start[c] : 0;
        for (whole j = 0; j < COUNT; j++) total += taps[j][c] * x[j][c];
        to[c] = total;
    }
}

/* to[c] = the sum over j of taps[j][c] * y[j][c], unless `to` is NULL, and sums[j][c] += x[c] * y[j][c]. */
INLINE void tap_sum_and_products(
    float *restrict to, rows_in taps, rows_out sums, const float *x, rows_in y, const whole COUNT, int nontemporal, whole C) {
    whole c = 0;
    for (; c + LANES <= C; c += LANES) {
        lanes total = {0}, here = load(x + c);
        for (whole j = 0; j < COUNT; j++) {
            const lanes one = load(y[j] + c);
            total += load(taps[j] + c) * one;
            store(sums[j] + c, load(sums[j] + c) + here * one);
        }
        if (to) store_lanes(to + c, total, nontemporal);
    }
    for (; c < C; c++) {
        float total = 0;
        for (whole j = 0; j < COUNT; j++) {
            total += taps[j][c] * y[j][c];
            sums[j][c] += x[c] * y[j][c];
        }
        if (to) to[c] = total;
    }
}

INLINE int seen(const int64_t *documents, whole row, whole first, whole other, whole R) {
    return other >= 0 && other < R && (documents == NULL || documents[row * R + other] == documents[row * R + first]);
}

void causal_conv(
    rows_in sources, const float *taps, const float *bias, const int64_t *documents, float *result, whole S, whole B, whole T,
    whole R, whole C, whole k, whole d, int threads) {
    const int nontemporal = stores_nontemporal(&result, 1, B * T * C, C);
#pragma omp parallel num_threads(threads) if (B * T * C > SMALL)
    {
#pragma omp for
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
            if (count == 4)
                tap_sum(result + n * C, bias, weights, given, 4, nontemporal, C);
            else
                tap_sum(result + n * C, bias, weights, given, count, nontemporal, C);
        }
        if (nontemporal) end_nontemporal();
    }
}

/* Scratch: the sums over the rows of each part, tap_parts [PARTS S k C] and bias_parts [PARTS C]. */
void causal_conv_backward(
    const float *grad, rows_in sources, const float *taps, const int64_t *documents, rows_out results, float *grad_taps,
    float *grad_bias, float *tap_parts, float *bias_parts, whole S, whole B, whole T, whole R, whole C, whole k, whole d,
    int threads) {
    const int nontemporal = stores_nontemporal(results, S, B * R * C, C);
#pragma omp parallel num_threads(threads) if (B * T * C > SMALL)
    {
#pragma omp for
        for (whole part = 0; part < PARTS; part++) {
            memset(tap_parts + part * S * k * C, 0, S * k * C * sizeof(float));
            if (grad_bias) memset(bias_parts + part * C, 0, C * sizeof(float));
            for (whole c = 0; c < C; c += CHANNELS) {
                const whole width = C - c < CHANNELS ? C - c : CHANNELS;
                for (whole n = first_row(part, B * R); n < first_row(part + 1, B * R); n++) {
                    const whole row = n / R, at = n % R, past = R - T;
                    if (grad_bias && at >= past) add(bias_parts + part * C + c, 1, grad + (row * T + at - past) * C + c, width);
                    for (whole s = 0; s < S; s++) {
                        const float *given[MOST], *weights[MOST];
                        float *sums[MOST], *to = results[s] ? results[s] + n * C + c : NULL;
                        whole count = 0;
                        for (whole j = 0; j < k; j++) {
                            const whole other = at + d * (k - 1 - j);
                            if (other < past || !seen(documents, row, at, other, R)) continue;
                            given[count] = grad + (row * T + other - past) * C + c;
                            sums[count] = tap_parts + ((part * S + s) * k + j) * C + c;
                            weights[count++] = taps + (s * k + j) * C + c;
                        }
                        if (count == 4)
                            tap_sum_and_products(to, weights, sums, sources[s] + n * C + c, given, 4, nontemporal, width);
                        else
                            tap_sum_and_products(to, weights, sums, sources[s] + n * C + c, given, count, nontemporal, width);
                    }
                }
            }
        }
        if (nontemporal) end_nontemporal();
    }
    add_parts(grad_taps, tap_parts, S * k * C);
    if (grad_bias) add_parts(grad_bias, bias_parts, C);
}
