/* Generalised residual. N rows of D numbers, S sources, C ways, R score weights of each way, one for all sources or S. */
#include "rows.h"

enum activation { RELU, GELU, SILU, IDENTITY };

INLINE float activated(float z, enum activation activation) {
    switch (activation) {
    case RELU: return z <= 0 ? 0 : z;
    case GELU: return 0.5f * z * (1 + erff(z * 0.70710678f));
    case SILU: return z / (1 + expf(-z));
    default: return z;
    }
}

/* That of relu is 0 at 0, as everywhere in PyTorch. */
INLINE float slope(float z, enum activation activation) {
    const float gate = 1 / (1 + expf(-z));
    switch (activation) {
    case RELU: return z > 0;
    case GELU: return 0.5f * (1 + erff(z * 0.70710678f)) + z * expf(-0.5f * z * z) * 0.39894228f;
    case SILU: return gate * (1 + z * (1 - gate));
    default: return 1;
    }
}

/* to += (bias + weight) * x */
INLINE void add_weighted(float *restrict to, const float *restrict bias, float weight, const float *restrict x, whole n) {
    for (whole c = 0; c < n; c++) to[c] += (bias[c] + weight) * x[c];
}

/* y_c = sum over j of (bias[c, j] + act(z_cj)) v_j with z_cj = weights[c, j] . v_j, times the inverse rms if `inverse` [S N] is
   not NULL. Bias [C S D], weights [C R D], z [S C N]. */
void grn(
    rows_in sources, const float *bias, const float *weights, rows_out results, float *z, float *inverse, float eps,
    whole activation, whole S, whole C, whole R, whole N, whole D, int threads) {
#pragma omp parallel for num_threads(threads) if (S * N * D > SMALL)
    for (whole n = 0; n < N; n++) {
        for (whole c = 0; c < C; c++) memset(results[c] + n * D, 0, D * sizeof(float));
        for (whole j = 0; j < S; j++) {
            const float *v = sources[j] + n * D;
            const float factor = inverse ? 1 / sqrtf(dot(v, v, D) / D + eps) : 1;
            if (inverse) inverse[j * N + n] = factor;
            for (whole c = 0; c < C; c++) {
                const float score = factor * dot(weights + (c * R + j % R) * D, v, D);
                z[(j * C + c) * N + n] = score;
                add_weighted(results[c] + n * D, bias + (c * S + j) * D, activated(score, activation), v, D);
            }
        }
    }
}

/* Gradients of all arguments; NULL in `results` is one that nobody asks for. Scratch: the sums over the rows of each part,
   bias_parts [PARTS C S D] and weight_parts [PARTS C R D]. */
void grn_backward(
    rows_in grads, rows_in sources, const float *bias, const float *weights, const float *z, const float *inverse,
    rows_out results, float *grad_bias, float *grad_weights, float *bias_parts, float *weight_parts, whole activation, whole S,
    whole C, whole R, whole N, whole D, int threads) {
#pragma omp parallel for num_threads(threads) if (S * N * D > SMALL)
    for (whole part = 0; part < PARTS; part++) {
        float *by_bias = bias_parts + part * C * S * D, *by_weight = weight_parts + part * C * R * D;
        memset(by_bias, 0, C * S * D * sizeof(float));
        memset(by_weight, 0, C * R * D * sizeof(float));
        for (whole n = first_row(part, N); n < first_row(part + 1, N); n++)
            for (whole j = 0; j < S; j++) {
                const float *restrict v = sources[j] + n * D;
                const float factor = inverse ? inverse[j * N + n] : 1;
                float *restrict to = results[j] ? results[j] + n * D : NULL;
                float along = 0;
                if (to) memset(to, 0, D * sizeof(float));
                for (whole c = 0; c < C; c++) {
                    const float *restrict g = grads[c] + n * D, *restrict w = weights + (c * R + j % R) * D;
                    const float *restrict b = bias + (c * S + j) * D;
                    float *restrict to_bias = by_bias + (c * S + j) * D, *restrict to_weight = by_weight + (c * R + j % R) * D;
                    const float score = z[(j * C + c) * N + n], s = activated(score, activation);
                    const float by_z = dot(g, v, D) * slope(score, activation), by_product = by_z * factor;
                    along += by_z * score;
                    for (whole k = 0; k < D; k++) {
                        to_bias[k] += g[k] * v[k];
                        to_weight[k] += by_product * v[k];
                    }
                    if (to)
                        for (whole k = 0; k < D; k++) to[k] += (b[k] + s) * g[k] + by_product * w[k];
                }
                if (to && inverse) add(to, -along * factor * factor / D, v, D);
            }
    }
    add_parts(grad_bias, bias_parts, C * S * D);
    add_parts(grad_weights, weight_parts, C * R * D);
}
