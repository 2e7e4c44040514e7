/* The depth read and the inverse rms of a source. Letters as in rows.h; S sources, H heads of K = D / H numbers.

The sources of one token stay in the first cache while it is computed, so that each is read from memory once. */
#include "rows.h"

void inverse_rms(const float *x, float eps, float *factors, whole N, whole D, int threads) {
#pragma omp parallel for num_threads(threads) if (N * D > SMALL)
    for (whole n = 0; n < N; n++) factors[n] = 1 / sqrtf(dot(x + n * D, x + n * D, D) / D + eps);
}

/* `passed` is the gradient of later readers, or NULL. */
void inverse_rms_backward(
    const float *x, const float *factors, const float *by_factor, const float *passed, float *result, whole N, whole D,
    int threads) {
#pragma omp parallel for num_threads(threads) if (N * D > SMALL)
    for (whole n = 0; n < N; n++) {
        const float *restrict v = x + n * D;
        float *restrict to = result + n * D;
        float along = -by_factor[n] * factors[n] * factors[n] * factors[n] / D;
        if (passed)
            for (whole c = 0; c < D; c++) to[c] = along * v[c] + passed[n * D + c];
        else
            for (whole c = 0; c < D; c++) to[c] = along * v[c];
    }
}

/* Numbers per source, row and head are [S N H], factors [S N], log totals [N H]; the query is [D], or [N D] with query_each. */
void depth_read(
    rows_in sources, const float *factors, const float *query, const float *stream, const float *scale, float *mixed,
    float *scores, float *log_totals, whole S, whole N, whole D, whole H, int query_each, int normalised, int threads) {
    const whole K = D / H;
#pragma omp parallel for num_threads(threads) if (S * N * D > SMALL)
    for (whole n = 0; n < N; n++) {
        float *to = mixed + n * D;
        for (whole h = 0; h < H; h++) {
            const whole at = n * D + h * K;
            float products[MOST], weights[MOST], top = -INFINITY, total = 0;
            dots(products, query + (query_each ? at : h * K), sources, S, at, K);
            for (whole s = 0; s < S; s++) top = fmaxf(top, products[s] * factors[s * N + n]);
            for (whole s = 0; s < S; s++) {
                scores[(s * N + n) * H + h] = products[s];
                weights[s] = expf(products[s] * factors[s * N + n] - top);
                total += weights[s];
            }
            log_totals[n * H + h] = top + logf(total);
            for (whole s = 0; s < S; s++) weights[s] *= (normalised ? factors[s * N + n] : 1) / total;
            ways_of_sum(1, 0, &mixed, at, weights, 1, sources, S, at, 0, K);
        }
        if (scale)
            for (whole c = 0; c < D; c++) to[c] *= scale[0];
        if (stream) add(to, 1, stream + n * D, D);
    }
}

/* to = g weight + q by_score + v along, and what later readers pass, or NULL. */
INLINE void source_gradient(
    float *restrict to, const float *restrict g, const float *restrict q, const float *restrict v, const float *restrict passed,
    float weight, float by_score, float along, int nontemporal, whole n) {
    whole c = 0;
    for (; c + LANES <= n; c += LANES) {
        lanes found = weight * load(g + c) + by_score * load(q + c) + along * load(v + c);
        if (passed) found += load(passed + c);
        store_lanes(to + c, found, nontemporal);
    }
    for (; c < n; c++) to[c] = weight * g[c] + by_score * q[c] + along * v[c] + (passed ? passed[c] : 0);
}

/* Gradients of all arguments. NULL in `results` is a gradient that nobody asks for, in `passed` one that did not arrive; without
   grad_factors, a source receives what flows through its factor. Scratch: numbers [PARTS (2S+1) H], and the sums over the rows of
   each part, query_parts [PARTS D] and scale_parts [PARTS]. */
void depth_read_backward(
    const float *grad, const float *query, rows_in sources, const float *factors, const float *scale, const float *scores,
    const float *log_totals, rows_in passed, rows_out results, float *grad_query, float *grad_factors, float *grad_scale,
    float *scratch, float *query_parts, float *scale_parts, whole S, whole N, whole D, whole H, int query_each, int normalised,
    int threads) {
    const whole K = D / H;
    const float scaled = scale ? scale[0] : 1;
    const int nontemporal = stores_nontemporal(results, S, N * D, K);
#pragma omp parallel for num_threads(threads) if (S * N * D > SMALL)
    for (whole part = 0; part < PARTS; part++) {
        float *weights = scratch + part * (2 * S + 1) * H, *by_weight = weights + S * H, *means = by_weight + S * H;
        float by_scale = 0;
        if (!query_each) memset(query_parts + part * D, 0, D * sizeof(float));
        for (whole n = first_row(part, N); n < first_row(part + 1, N); n++) {
            const float *g = grad + n * D, *q = query + (query_each ? n * D : 0);
            float *by_query = query_each ? grad_query + n * D : query_parts + part * D;
            if (query_each) memset(by_query, 0, D * sizeof(float));
            for (whole h = 0; h < H; h++) {
                /* The total is 1 but for the rounding of its logarithm. */
                float products[MOST], total = 0, mean = 0;
                dots(products, g + h * K, sources, S, n * D + h * K, K);
                for (whole s = 0; s < S; s++) {
                    const float r = factors[s * N + n];
                    weights[s * H + h] = expf(scores[(s * N + n) * H + h] * r - log_totals[n * H + h]);
                    by_weight[s * H + h] = products[s] * (normalised ? r : 1);
                    total += weights[s * H + h];
                    mean += weights[s * H + h] * by_weight[s * H + h];
                }
                means[h] = mean / total;
                by_scale += means[h];
                for (whole s = 0; s < S; s++) weights[s * H + h] *= scaled / total;
            }
            for (whole s = 0; s < S; s++) {
                const float *v = sources[s] + n * D, *later = passed[s] ? passed[s] + n * D : NULL;
                const float r = factors[s * N + n];
                float by_factor = 0;
                for (whole h = 0; h < H; h++) {
                    const float weight = weights[s * H + h], by_logit = weight * (by_weight[s * H + h] - means[h]);
                    by_factor += by_logit * scores[(s * N + n) * H + h];
                    if (normalised) by_factor += weight * by_weight[s * H + h] / r;
                    by_weight[s * H + h] = by_logit * r;
                    add(by_query + h * K, by_logit * r, v + h * K, K);
                }
                if (grad_factors) grad_factors[s * N + n] = by_factor;
                const float along = grad_factors ? 0 : -by_factor * r * r * r / D;
                for (whole h = 0; h < H && results[s]; h++)
                    source_gradient(
                        results[s] + n * D + h * K, g + h * K, q + h * K, v + h * K, later ? later + h * K : NULL,
                        weights[s * H + h] * (normalised ? r : 1), by_weight[s * H + h], along, nontemporal, K);
            }
        }
        scale_parts[part] = by_scale;
        if (nontemporal) end_nontemporal();
    }
    if (!query_each) add_parts(grad_query, query_parts, D);
    add_parts(grad_scale, scale_parts, 1);
}
