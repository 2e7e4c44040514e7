/* The dynamic read of parallel streams. Letters as in rows.h; n streams of m fractions, P = n m pieces of E numbers, C columns.

A piece is scored by its normalised product with each of the maps [C E], z = r map . x; r is its inverse deviation or, without
`centred`, its inverse rms, and maps that meet a centred piece have no mean. Column c of its weights is
base[c] + scale[c] act(z + offset[c]), and the first m columns weight the piece in the fractions of the view. */
#include "elementary.h"

/* Pieces of row n, in order. */
INLINE void pieces_of(const float **pieces, rows_in streams, whole n_streams, whole m, whole n, whole E) {
    for (whole k = 0; k < n_streams; k++)
        for (whole f = 0; f < m; f++) pieces[k * m + f] = streams[k] + (n * m + f) * E;
}

/* changes = act(z + offset) of one piece; the arrays have room for whole lanes. */
INLINE void changes_of(float *changes, const float *z, const float *offset, int bounded, whole C) {
    for (whole c = 0; c < C; c++) changes[c] = z[c] + offset[c];
    if (!bounded) return;
    for (whole c = C; c % LANES; c++) changes[c] = 0;
    for (whole c = 0; c < C; c += LANES) store(changes + c, tangent(load(changes + c)));
}

INLINE float mean_of(const float *x, whole E) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (whole k = 0; k < E; k++) sum += x[k];
    return sum / E;
}

INLINE float mean_square(const float *x, float mean, whole E) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (whole k = 0; k < E; k++) sum += (x[k] - mean) * (x[k] - mean);
    return sum / E;
}

/* Results: the view [N m E], all weights and the scores z [P C N], r [P N], and the means [P N] if `centred`. */
void hyper_read(
    rows_in streams, const float *base, const float *scale, const float *maps, const float *offset, float *view,
    float *weights, float *scores, float *inverse, float *means, float eps, float smallest, int centred, int bounded, whole n_streams,
    whole m, whole C, whole N, whole E, int threads) {
    const whole P = n_streams * m;
    const float *rows[MOST];
    for (whole c = 0; c < C; c++) rows[c] = maps + c * E;
#pragma omp parallel for num_threads(threads) if (P * N * E > SMALL)
    for (whole n = 0; n < N; n++) {
        const float *pieces[MOST];
        float z[MOST + LANES], changes[MOST + LANES], reads[MOST * MOST], *to[MOST];
        pieces_of(pieces, streams, n_streams, m, n, E);
        for (whole r = 0; r < m; r++) to[r] = view + (n * m + r) * E;
        for (whole j = 0; j < P; j++) {
            const float mean = centred ? mean_of(pieces[j], E) : 0, square = mean_square(pieces[j], mean, E) + eps;
            const float factor = 1 / sqrtf(square < smallest ? smallest : square);
            inverse[j * N + n] = factor;
            if (centred) means[j * N + n] = mean;
            dots(z, pieces[j], rows, C, 0, E);
            for (whole c = 0; c < C; c++) z[c] *= factor;
            changes_of(changes, z, offset, bounded, C);
            for (whole c = 0; c < C; c++) {
                const float weight = base[j * C + c] + scale[c] * changes[c];
                scores[(j * C + c) * N + n] = z[c];
                weights[(j * C + c) * N + n] = weight;
                if (c < m) reads[j * m + c] = weight;
            }
        }
        weighted_sums(to, m, reads, pieces, P, 0, 0, E);
    }
}

/* to = sum + later + along x - by_mean */
INLINE void piece_gradient(
    float *restrict to, const float *restrict sum, const float *restrict later, const float *restrict x, float along, float by_mean,
    int nontemporal, whole n) {
    whole k = 0;
    for (; k + LANES <= n; k += LANES)
        store_lanes(to + k, load(sum + k) + (load(later + k) + along * load(x + k) - by_mean), nontemporal);
    for (; k < n; k++) to[k] = sum[k] + (later[k] + along * x[k] - by_mean);
}

/* Gradients of all arguments, from that of the view, those of the other columns [P C-m N], and those of later users of the
   streams. Scratch: the sums over the rows of each part, small_parts [PARTS P+2 C] and map_parts [PARTS C E], and those of one
   row, sum_parts [PARTS P E]. */
void hyper_read_backward(
    const float *grad_view, const float *grad_rest, rows_in passed, rows_in streams, const float *base, const float *scale,
    const float *maps, const float *offset, const float *scores, const float *inverse, const float *means, rows_out results,
    float *grad_small, float *grad_maps, float *small_parts, float *map_parts, float *sum_parts, int bounded, whole n_streams,
    whole m, whole C, whole N, whole E, int threads) {
    const whole P = n_streams * m;
    const int nontemporal = stores_nontemporal(results, n_streams, N * m * E, E);
#pragma omp parallel for num_threads(threads) if (P * N * E > SMALL)
    for (whole part = 0; part < PARTS; part++) {
        float *by_static = small_parts + part * (P + 2) * C, *by_scale = by_static + P * C, *by_offset = by_scale + C;
        float z[MOST + LANES], changes[MOST + LANES], by_weight[MOST], along[MOST], by_map[MOST * MOST], factors[2 * MOST * MOST];
        float *by_maps[MOST], *sums[MOST];
        const float *pieces[MOST], *arrived[MOST], *terms[2 * MOST];
        memset(by_static, 0, (P + 2) * C * sizeof(float));
        memset(map_parts + part * C * E, 0, C * E * sizeof(float));
        for (whole c = 0; c < C; c++) by_maps[c] = map_parts + (part * C + c) * E, terms[m + c] = maps + c * E;
        for (whole j = 0; j < P; j++) sums[j] = sum_parts + (part * P + j) * E;
        for (whole n = first_row(part, N); n < first_row(part + 1, N); n++) {
            pieces_of(pieces, streams, n_streams, m, n, E);
            pieces_of(arrived, passed, n_streams, m, n, E);
            for (whole r = 0; r < m; r++) terms[r] = grad_view + (n * m + r) * E;
            for (whole j = 0; j < P; j++) {
                const float factor = inverse[j * N + n];
                for (whole c = 0; c < C; c++) z[c] = scores[(j * C + c) * N + n];
                changes_of(changes, z, offset, bounded, C);
                dots(by_weight, pieces[j], terms, m, 0, E);
                for (whole c = m; c < C; c++) by_weight[c] = grad_rest[(j * (C - m) + c - m) * N + n];
                along[j] = 0;
                for (whole c = 0; c < C; c++) {
                    const float by_score = by_weight[c] * scale[c] * (bounded ? 1 - changes[c] * changes[c] : 1);
                    by_static[j * C + c] += by_weight[c];
                    by_scale[c] += by_weight[c] * changes[c];
                    by_offset[c] += by_score;
                    along[j] -= by_score * z[c] * factor * factor / E;
                    by_map[j * C + c] = factors[(m + c) * P + j] = by_score * factor;
                }
                for (whole r = 0; r < m; r++) factors[r * P + j] = base[j * C + r] + scale[r] * changes[r];
            }
            add_weighted_sums(by_maps, C, by_map, pieces, P, 0, E);
            weighted_sums(sums, P, factors, terms, m + C, 0, 0, E);
            for (whole j = 0; j < P; j++) {
                float *to = results[j / m] + (n * m + j % m) * E;
                const float by_mean = means ? along[j] * means[j * N + n] : 0;
                piece_gradient(to, sums[j], arrived[j], pieces[j], along[j], by_mean, nontemporal, E);
            }
        }
        if (nontemporal) end_nontemporal();
    }
    add_parts(grad_small, small_parts, (P + 2) * C);
    add_parts(grad_maps, map_parts, C * E);
}
