/* Attention of one query for each row over keys and values that lie where they were written. B rows, H heads, G heads of keys
   and values, which H / G query heads share, S tokens, K and V numbers of a key and of a value.
   A mask [S] is added to the scores; where it is -inf, nothing of the token is read. */
#include "elementary.h"

/* exp of numbers that are at most 0, of which those below -87 count as 0, and their sum; n is a multiple of LANES. */
INLINE float exponentials(float *x, whole n) {
    lanes total = {0};
    for (whole s = 0; s < n; s += LANES) {
        const lanes one = load(x + s);
        const ints low = one < -87;
        const lanes made = chosen(low, (lanes){0}, exponential(chosen(low, all(-87), one)));
        store(x + s, made);
        total += made;
    }
    return sum_of(total);
}

/* Adds the tokens of a block to the mixture of one query, whose largest score so far is `top`, and total weight `total`. */
INLINE void add_block(
    float *to, float *top, float *total, const float *q, rows_in keys, rows_in values, const float *added, whole count, float scale,
    whole K, whole V) {
    float weights[MOST], before = *top;
    /* Row after row, as memory is read ahead. */
    for (whole s = 0; s < count; s++) {
        weights[s] = dot(q, keys[s], K) * scale + added[s];
        *top = fmaxf(*top, weights[s]);
    }
    const float kept = expf(before - *top);
    whole padded = count;
    for (whole s = 0; s < count; s++) weights[s] -= *top;
    for (; padded % LANES; padded++) weights[padded] = -INFINITY;
    *total = *total * kept + exponentials(weights, padded);
    for (whole c = 0; c < V && kept != 1; c++) to[c] *= kept;
    for (whole s = 0; s < count; s++) add(to, weights[s], values[s], V);
}

/* A query that sees no token gets zeros. The mask of a row begins `mask_stride` numbers after that of the row before it. */
void decode_attention(
    const float *q, const float *k, const float *v, const float *mask, float *y, float scale, whole B, whole H, whole G, whole S,
    whole K, whole V, whole mask_stride, int threads) {
#pragma omp parallel for num_threads(threads) if (B * G * S * K > SMALL)
    for (whole row = 0; row < B * G; row++) {
        const float *seen = mask + row / G * mask_stride, *queries = q + row * (H / G) * K;
        float *mixed = y + row * (H / G) * V, tops[MOST], totals[MOST] = {0};
        for (whole h = 0; h < H / G; h++) tops[h] = -INFINITY;
        memset(mixed, 0, H / G * V * sizeof(float));
        for (whole start = 0; start < S; start += MOST) {
            const float *keys[MOST], *values[MOST];
            float added[MOST];
            whole count = 0;
            for (whole s = start; s < S && s < start + MOST; s++) {
                if (seen[s] == -INFINITY) continue;
                keys[count] = k + (row * S + s) * K;
                values[count] = v + (row * S + s) * V;
                added[count++] = seen[s];
            }
            for (whole h = 0; h < H / G && count; h++)
                add_block(mixed + h * V, tops + h, totals + h, queries + h * K, keys, values, added, count, scale, K, V);
        }
        for (whole h = 0; h < H / G; h++)
            for (whole c = 0; c < V && totals[h]; c++) mixed[h * V + c] /= totals[h];
    }
}
