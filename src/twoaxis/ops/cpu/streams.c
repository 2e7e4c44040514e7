/* Weighted sums of sources, of an update too, and the delta write. Letters as in rows.h; S sources, K results, C channels.

Weights are [S K], or with `each` one per row, [S K N]; those of the update are [K], or [K N]. */
#include "rows.h"

/* The weights of row n, [count K]: those of the sources, and then those of an update. */
INLINE void weights_of(
    float *row, const float *residual, int residual_each, const float *write, int write_each, whole S, whole K, whole n,
    whole N) {
    for (whole k = 0; k < S * K && residual; k++) row[k] = residual_each ? residual[k * N + n] : residual[k];
    for (whole i = 0; i < K && write; i++) row[(residual ? S * K : 0) + i] = write_each ? write[i * N + n] : write[i];
}

/* Result i is the sum of residual[j, i] sources[j], or without residual sources[i], and of write[i] update. */
void mix_streams(
    rows_in sources, const float *update, const float *residual, int residual_each, const float *write, int write_each,
    rows_out results, whole S, whole K, whole N, whole D, int threads) {
    const float *given[MOST + 1];
    for (whole j = 0; j < S; j++) given[j] = sources[j];
    given[S] = update;
    const int nontemporal = stores_nontemporal(results, K, N * D, D);
#pragma omp parallel num_threads(threads) if (S * N * D > SMALL)
    {
#pragma omp for
        for (whole n = 0; n < N; n++) {
            float row[(MOST + 1) * MOST];
            weights_of(row, residual, residual_each, write, write_each, S, K, n, N);
            if (residual) {
                weighted_sums(results, K, row, given, S + (update != NULL), n * D, nontemporal, D);
                continue;
            }
            for (whole i = 0; i < K; i++)
                put_sum(results[i] + n * D, sources[i] + n * D, row[i], update + n * D, nontemporal, D);
        }
        if (nontemporal) end_nontemporal();
    }
}

/* Gradients of all arguments; NULL is one that nobody asks for. Scratch: the sums over the rows of each part,
   residual_parts [PARTS S K] and write_parts [PARTS K]. */
void mix_streams_backward(
    rows_in grads, rows_in sources, const float *update, const float *residual, int residual_each, const float *write,
    int write_each, rows_out results, float *grad_update, float *grad_residual, float *grad_write, float *residual_parts,
    float *write_parts, whole S, whole K, whole N, whole D, int threads) {
    const whole by_source = residual ? S : 0, count = by_source + (update != NULL);
    const float *given[MOST + 1];
    float *wanted[MOST + 1];
    for (whole j = 0; j < by_source; j++) given[j] = sources[j], wanted[j] = results[j];
    given[by_source] = update, wanted[by_source] = grad_update;
    const int nontemporal = stores_nontemporal(wanted, count, N * D, D);
#pragma omp parallel for num_threads(threads) if (S * N * D > SMALL)
    for (whole part = 0; part < PARTS; part++) {
        float row[(MOST + 1) * MOST], turned[(MOST + 1) * MOST], products[MOST];
        memset(residual_parts + part * S * K, 0, S * K * sizeof(float));
        memset(write_parts + part * K, 0, K * sizeof(float));
        for (whole n = first_row(part, N); n < first_row(part + 1, N); n++) {
            weights_of(row, residual, residual_each, write, write_each, S, K, n, N);
            for (whole j = 0; j < count; j++)
                for (whole i = 0; i < K; i++) turned[i * count + j] = row[j * K + i];
            weighted_sums(wanted, count, turned, grads, K, n * D, nontemporal, D);
            for (whole j = 0; j < count; j++) {
                const int of_update = j == by_source, each = of_update ? write_each : residual_each;
                float *to = of_update ? grad_write : grad_residual;
                float *sums = of_update ? write_parts + part * K : residual_parts + (part * S + j) * K;
                if (to == NULL) continue;
                dots(products, given[j] + n * D, grads, K, n * D, D);
                for (whole i = 0; i < K; i++)
                    if (each)
                        to[(of_update ? i : j * K + i) * N + n] = products[i];
                    else
                        sums[i] += products[i];
            }
        }
        if (nontemporal) end_nontemporal();
    }
    if (grad_residual && !residual_each) add_parts(grad_residual, residual_parts, S * K);
    if (grad_write && !write_each) add_parts(grad_write, write_parts, K);
}

/* x' = x + beta r (target - r u.x) u with r = 1 / sqrt(u.u + eps^2); targets are [C N]. */
void delta_write(
    rows_in channels, rows_out results, const float *direction, const float *targets, const float *beta, float eps, int erases,
    whole C, whole N, whole D, int threads) {
    const int nontemporal = stores_nontemporal(results, C, N * D, D);
#pragma omp parallel num_threads(threads) if (C * N * D > SMALL)
    {
#pragma omp for
        for (whole n = 0; n < N; n++) {
            const float *u = direction + n * D;
            const float factor = 1 / sqrtf(dot(u, u, D) + eps * eps);
            for (whole c = 0; c < C; c++) {
                const float *x = channels[c] + n * D;
                const float error = targets[c * N + n] - (erases ? factor * dot(x, u, D) : 0), step = beta[n] * factor * error;
                put_sum(results[c] + n * D, x, step, u, nontemporal, D);
            }
        }
        if (nontemporal) end_nontemporal();
    }
}

void delta_write_backward(
    rows_in grads, rows_in channels, rows_out results, const float *direction, const float *targets, const float *beta,
    float *grad_direction, float *grad_targets, float *grad_beta, float eps, int erases, whole C, whole N, whole D, int threads) {
    const int nontemporal = stores_nontemporal(results, C, N * D, D);
#pragma omp parallel num_threads(threads) if (C * N * D > SMALL)
    {
#pragma omp for
        for (whole n = 0; n < N; n++) {
            const float *restrict u = direction + n * D;
            float *restrict by_u = grad_direction + n * D;
            const float factor = 1 / sqrtf(dot(u, u, D) + eps * eps);
            float by_beta = 0, by_factor = 0;
            memset(by_u, 0, D * sizeof(float));
            for (whole c = 0; c < C; c++) {
                const float *restrict x = channels[c] + n * D, *restrict g = grads[c] + n * D;
                const float component = erases ? factor * dot(x, u, D) : 0, error = targets[c * N + n] - component;
                const float by_step = dot(g, u, D), by_target = by_step * beta[n] * factor;
                const float moved = beta[n] * factor * error, along = erases ? by_target * factor : 0;
                grad_targets[c * N + n] = by_target;
                by_beta += by_step * factor * error;
                by_factor += by_step * (error - component);
                for (whole k = 0; k < D; k++) by_u[k] += moved * g[k] - along * x[k];
                put_sum(results[c] + n * D, g, -along, u, nontemporal, D);
            }
            add(by_u, -by_factor * beta[n] * factor * factor * factor, u, D);
            grad_beta[n] = by_beta;
        }
        if (nontemporal) end_nontemporal();
    }
}
