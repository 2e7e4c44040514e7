/* What every block has: RMS norm, rotation of queries and keys, and the gate of a feed-forward. Letters as in rows.h. */
#include "elementary.h"

/* Rows of the input are [a | b], of F numbers each: silu(a) b. */
void silu_gate(const float *x, float *result, whole N, whole F, int threads) {
#pragma omp parallel for num_threads(threads) if (N * F > SMALL)
    for (whole n = 0; n < N; n++) {
        const float *a = x + n * 2 * F, *b = a + F;
        float *to = result + n * F;
        whole c = 0;
        for (; c + LANES <= F; c += LANES) store(to + c, load(a + c) * sigmoid(load(a + c)) * load(b + c));
        for (; c < F; c++) to[c] = a[c] / (1 + expf(-a[c])) * b[c];
    }
}

void silu_gate_backward(const float *grad, const float *x, float *result, whole N, whole F, int threads) {
#pragma omp parallel for num_threads(threads) if (N * F > SMALL)
    for (whole n = 0; n < N; n++) {
        const float *a = x + n * 2 * F, *b = a + F, *g = grad + n * F;
        float *to_a = result + n * 2 * F, *to_b = to_a + F;
        whole c = 0;
        for (; c + LANES <= F; c += LANES) {
            const lanes va = load(a + c), vg = load(g + c), s = sigmoid(va);
            store(to_a + c, vg * load(b + c) * s * (1 + va * (1 - s)));
            store(to_b + c, vg * va * s);
        }
        for (; c < F; c++) {
            const float s = 1 / (1 + expf(-a[c]));
            to_a[c] = g[c] * b[c] * s * (1 + a[c] * (1 - s));
            to_b[c] = g[c] * a[c] * s;
        }
    }
}

/* Pairs of channels (i, i + K / 2) of H heads; a row of x begins `stride` numbers after the one before, and a row of cosines and
   sines serves row n of N, or row n % turns. Backward, the sine of the other channel counts. */
void rotate(
    const float *x, const float *cosines, const float *sines, float *result, int backward, whole N, whole H, whole K, whole stride,
    whole turns, int threads) {
    const whole half = K / 2;
#pragma omp parallel for num_threads(threads) if (N * H * K > SMALL)
    for (whole n = 0; n < N; n++) {
        const float *restrict cosine = cosines + n % turns * K, *restrict sine = sines + n % turns * K;
        const float *restrict first_sine = sine + (backward ? half : 0), *restrict second_sine = sine + (backward ? 0 : half);
        for (whole h = 0; h < H; h++) {
            const float *restrict from = x + n * stride + h * K;
            float *restrict to = result + (n * H + h) * K;
            for (whole c = 0; c < half; c++) {
                to[c] = from[c] * cosine[c] + from[c + half] * first_sine[c];
                to[c + half] = from[c + half] * cosine[c + half] + from[c] * second_sine[c];
            }
        }
    }
}

/* y = scale x / sqrt(mean(x^2) + eps) gain; a gain of NULL is 1. */
void rms_norm(const float *x, const float *gain, float *result, float *factors, float eps, float scale, whole N, whole D, int threads) {
#pragma omp parallel for num_threads(threads) if (N * D > SMALL)
    for (whole n = 0; n < N; n++) {
        const float *restrict from = x + n * D;
        float *restrict to = result + n * D;
        factors[n] = 1 / sqrtf(dot(from, from, D) / D + eps);
        const float factor = factors[n] * scale;
        if (gain)
            for (whole c = 0; c < D; c++) to[c] = from[c] * factor * gain[c];
        else
            for (whole c = 0; c < D; c++) to[c] = from[c] * factor;
    }
}

/* Scratch: gain_parts [PARTS 2 D], whose second half holds the gradient times the gain of one row. */
void rms_norm_backward(
    const float *grad, const float *x, const float *gain, const float *factors, float *result, float *grad_gain, float *gain_parts,
    float scale, whole N, whole D, int threads) {
#pragma omp parallel for num_threads(threads) if (N * D > SMALL)
    for (whole part = 0; part < PARTS; part++) {
        float *restrict by_gain = gain_parts + part * D, *restrict row = gain_parts + (PARTS + part) * D;
        if (gain) memset(by_gain, 0, D * sizeof(float));
        for (whole n = first_row(part, N); n < first_row(part + 1, N); n++) {
            const float *restrict from = x + n * D, *restrict g = grad + n * D;
            const float factor = factors[n];
            float *restrict to = result + n * D;
            if (gain)
                for (whole c = 0; c < D; c++) row[c] = g[c] * gain[c];
            const float *by_normal = gain ? row : g;
            const float along = -scale * factor * factor * factor * dot(by_normal, from, D) / D;
            for (whole c = 0; c < D; c++) to[c] = by_normal[c] * (factor * scale) + along * from[c];
            if (gain)
                for (whole c = 0; c < D; c++) by_gain[c] += g[c] * from[c] * (factor * scale);
        }
    }
    if (gain) add_parts(grad_gain, gain_parts, D);
}
