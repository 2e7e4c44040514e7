/* Sinkhorn normalisation: matrices [n n N], one for each of N tokens. Tokens are taken BLOCK at a time, as one vector.
   BLOCK and LARGEST, the most streams, come from library.py. */
#include "rows.h"

typedef float block __attribute__((vector_size(4 * BLOCK)));

enum start { EXP, EXP_MINUS_MAX, SOFTMAX };

/* The places of the matrix entries over which sum `line` along an axis goes. */
INLINE int place(int axis, int line, int k, int n) { return axis ? line * n + k : k * n + line; }

INLINE void divide_by_sums(block *matrix, block *sums, int axis, float eps, int n) {
    for (int line = 0; line < n; line++) {
        block total = matrix[place(axis, line, 0, n)];
        for (int k = 1; k < n; k++) total += matrix[place(axis, line, k, n)];
        sums[line] = total + eps;
        for (int k = 0; k < n; k++) matrix[place(axis, line, k, n)] /= sums[line];
    }
}

INLINE void read_block(block *to, const float *from, whole entries, whole first, whole N) {
    for (whole e = 0; e < entries; e++)
        for (whole k = 0; k < BLOCK; k++) to[e][k] = first + k < N ? from[e * N + first + k] : 0;
}

INLINE void write_block(float *to, const block *from, whole entries, whole first, whole N) {
    for (whole e = 0; e < entries; e++)
        for (whole k = 0; k < BLOCK && first + k < N; k++) to[e * N + first + k] = from[e][k];
}

/* The start from logits, before its eps; `largest` is 1 where a logit is the maximum that it is shifted by. */
INLINE void begin(block *matrix, block *largest, int axis, enum start start, int n) {
    for (int line = 0; line < n; line++) {
        block top = matrix[place(axis, line, 0, n)], total = {0};
        for (int k = 1; k < n; k++)
            for (int t = 0; t < BLOCK; t++) top[t] = fmaxf(top[t], matrix[place(axis, line, k, n)][t]);
        for (int k = 0; k < n; k++) {
            block *one = matrix + place(axis, line, k, n);
            for (int t = 0; t < BLOCK; t++) {
                largest[place(axis, line, k, n)][t] = (*one)[t] == top[t];
                (*one)[t] = expf((*one)[t] - (start == EXP ? 0 : top[t]));
            }
            total += *one;
        }
        for (int k = 0; k < n && start == SOFTMAX; k++) matrix[place(axis, line, k, n)] /= total;
    }
}

/* All rounds. The sum that divides first is over axis `first`; sums are [2 rounds n], for the way back. */
INLINE int normalise(
    block *matrix, block *largest, block *sums, int rounds, int first, enum start start, float start_eps, float sum_eps, int n) {
    int done = 0;
    begin(matrix, largest, first, start, n);
    for (int e = 0; e < n * n; e++) matrix[e] += start_eps;
    for (int turn = start == SOFTMAX; turn < 2 * rounds; turn++)
        divide_by_sums(matrix, sums + n * done++, turn % 2 ? 1 - first : first, sum_eps, n);
    return done;
}

/* Scratch: [PARTS 2 rounds n BLOCK]. */
void sinkhorn(
    const float *logits, float *result, float *scratch, whole rounds, whole first, whole start, float start_eps, float sum_eps,
    whole n, whole N, int threads) {
    const whole blocks = (N + BLOCK - 1) / BLOCK;
#pragma omp parallel for num_threads(threads) if (n * n * rounds * N > SMALL)
    for (whole part = 0; part < PARTS; part++) {
        block matrix[LARGEST * LARGEST], largest[LARGEST * LARGEST];
        block *sums = (block *)scratch + part * 2 * rounds * n;
        for (whole b = first_row(part, blocks); b < first_row(part + 1, blocks); b++) {
            read_block(matrix, logits, n * n, b * BLOCK, N);
            normalise(matrix, largest, sums, rounds, first, start, start_eps, sum_eps, n);
            write_block(result, matrix, n * n, b * BLOCK, N);
        }
    }
}

/* With G the gradient by log M, dividing by a sum is G <- G - M sum(G), and undone by multiplying with that sum. */
void sinkhorn_backward(
    const float *grad, const float *logits, float *result, float *scratch, whole rounds, whole first, whole start,
    float start_eps, float sum_eps, whole n, whole N, int threads) {
    const whole blocks = (N + BLOCK - 1) / BLOCK;
#pragma omp parallel for num_threads(threads) if (n * n * rounds * N > SMALL)
    for (whole part = 0; part < PARTS; part++) {
        block matrix[LARGEST * LARGEST], largest[LARGEST * LARGEST], by_log[LARGEST * LARGEST];
        block *sums = (block *)scratch + part * 2 * rounds * n;
        for (whole b = first_row(part, blocks); b < first_row(part + 1, blocks); b++) {
            read_block(matrix, logits, n * n, b * BLOCK, N);
            read_block(by_log, grad, n * n, b * BLOCK, N);
            const int done = normalise(matrix, largest, sums, rounds, first, start, start_eps, sum_eps, n);
            for (int e = 0; e < n * n; e++) by_log[e] *= matrix[e];
            for (int turn = done - 1; turn >= 0; turn--) {
                const int axis = (turn + (start == SOFTMAX)) % 2 ? 1 - first : first;
                for (int line = 0; line < n; line++) {
                    block total = {0};
                    for (int k = 0; k < n; k++) total += by_log[place(axis, line, k, n)];
                    for (int k = 0; k < n; k++) {
                        block *one = matrix + place(axis, line, k, n);
                        by_log[place(axis, line, k, n)] -= total * *one;
                        *one *= sums[turn * n + line];
                    }
                }
            }
            for (int line = 0; line < n; line++) {
                block total = {0}, shifted = {0};
                for (int k = 0; k < n; k++) {
                    const int e = place(first, line, k, n);
                    if (start_eps) by_log[e] *= (matrix[e] - start_eps) / matrix[e];
                    total += by_log[e];
                    shifted += largest[e];
                }
                for (int k = 0; k < n; k++) {
                    const int e = place(first, line, k, n);
                    if (start == SOFTMAX) by_log[e] -= total * (matrix[e] - start_eps);
                    if (start == EXP_MINUS_MAX) by_log[e] -= total * largest[e] / shifted;
                }
            }
            write_block(result, by_log, n * n, b * BLOCK, N);
        }
    }
}
