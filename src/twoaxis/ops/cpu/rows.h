/* What all kernels share. Letters: N rows (tokens), D width, at: the first number of a row in its tensor.

Rows are divided into PARTS, whatever the number of threads: a sum over rows is made by part, and the parts are added in order,
so that results do not depend on the number of threads. PARTS and MOST, the sources or results of one sum, come from library.py. */
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 8
/* Numbers below which threads take longer to start than to compute. */
#define SMALL 32768
#define INLINE static inline __attribute__((always_inline))

typedef int64_t whole;
typedef const float *const *rows_in;
typedef float *const *rows_out;

INLINE whole first_row(whole part, whole N) { return part * N / PARTS; }

typedef float lanes __attribute__((vector_size(4 * LANES)));

INLINE lanes load(const float *x) {
    lanes found;
    memcpy(&found, x, sizeof found);
    return found;
}

INLINE void store(float *to, lanes value) { memcpy(to, &value, sizeof value); }

/* From this many numbers on, a call writes them by non-temporal stores, which bypass the caches: these would first read what is
   replaced, and are too small to hold the results until they are needed. */
#define MANY (1 << 20)

#ifdef __AVX__
#include <immintrin.h>
INLINE void store_lanes(float *to, lanes value, int nontemporal) {
    if (nontemporal)
        _mm256_stream_ps(to, (__m256)value);
    else
        store(to, value);
}
INLINE void end_nontemporal(void) { _mm_sfence(); }
#else
INLINE void store_lanes(float *to, lanes value, int nontemporal) { store(to, value); }
INLINE void end_nontemporal(void) {}
#endif

/* Whether a call writes its results so, of n numbers each, in pieces of `piece`; NULL is a result that nobody asks for. */
static int stores_nontemporal(rows_out results, whole count, whole n, whole piece) {
    whole asked = 0;
    for (whole i = 0; i < count; i++) {
        if ((uintptr_t)results[i] % sizeof(lanes)) return 0;
        asked += results[i] != NULL;
    }
    return asked * n >= MANY && piece % LANES == 0;
}

INLINE float sum_of(lanes value) {
    float total = 0;
#pragma omp simd reduction(+ : total)
    for (int k = 0; k < LANES; k++) total += value[k];
    return total;
}

/* to = x + weight y */
INLINE void put_sum(
    float *restrict to, const float *restrict x, float weight, const float *restrict y, int nontemporal, whole n) {
    whole c = 0;
    for (; c + LANES <= n; c += LANES) store_lanes(to + c, load(x + c) + weight * load(y + c), nontemporal);
    for (; c < n; c++) to[c] = x[c] + weight * y[c];
}

INLINE void add(float *restrict to, float weight, const float *restrict x, whole n) {
    for (whole c = 0; c < n; c++) to[c] += weight * x[c];
}

/* total[c] = the sum of the parts [PARTS, n], in order. */
INLINE void add_parts(float *restrict total, const float *parts, whole n) {
    memset(total, 0, n * sizeof(float));
    for (whole part = 0; part < PARTS; part++) add(total, 1, parts + part * n, n);
}

/* For WAYS results i, to[i] = sum over j of weights[j * stride + i] * x[j], or if it ADDS, to[i] plus that, in rows from number `at`
   on: a source is loaded once for all of them. */
INLINE void ways_of_sum(
    const int WAYS, const int ADDS, rows_out to, whole to_at, const float *weights, whole stride, rows_in x, whole count, whole at,
    int nontemporal, whole n) {
    whole c = 0;
    for (; c + 2 * LANES <= n; c += 2 * LANES) {
        lanes first[4] = {{0}}, second[4] = {{0}};
        for (int i = 0; i < WAYS && ADDS; i++) {
            first[i] = load(to[i] + to_at + c);
            second[i] = load(to[i] + to_at + c + LANES);
        }
        for (whole j = 0; j < count; j++) {
            const lanes one = load(x[j] + at + c), other = load(x[j] + at + c + LANES);
            for (int i = 0; i < WAYS; i++) {
                first[i] += weights[j * stride + i] * one;
                second[i] += weights[j * stride + i] * other;
            }
        }
        for (int i = 0; i < WAYS; i++) {
            store_lanes(to[i] + to_at + c, first[i], nontemporal);
            store_lanes(to[i] + to_at + c + LANES, second[i], nontemporal);
        }
    }
    for (; c < n; c++)
        for (int i = 0; i < WAYS; i++) {
            float total = ADDS ? to[i][to_at + c] : 0;
            for (whole j = 0; j < count; j++) total += weights[j * stride + i] * x[j][at + c];
            to[i][to_at + c] = total;
        }
}

/* The same for any number of results; weights are [count, ways]. */
INLINE void any_sums(
    const int ADDS, rows_out to, whole ways, const float *weights, rows_in x, whole count, whole at, int nontemporal, whole n) {
    whole i = 0;
    for (; i + 4 <= ways; i += 4) ways_of_sum(4, ADDS, to + i, at, weights + i, ways, x, count, at, nontemporal, n);
    for (; i + 2 <= ways; i += 2) ways_of_sum(2, ADDS, to + i, at, weights + i, ways, x, count, at, nontemporal, n);
    for (; i < ways; i++) ways_of_sum(1, ADDS, to + i, at, weights + i, ways, x, count, at, nontemporal, n);
}

static void weighted_sums(
    rows_out to, whole ways, const float *weights, rows_in x, whole count, whole at, int nontemporal, whole n) {
    any_sums(0, to, ways, weights, x, count, at, nontemporal, n);
}

static void add_weighted_sums(rows_out to, whole ways, const float *weights, rows_in x, whole count, whole at, whole n) {
    any_sums(1, to, ways, weights, x, count, at, 0, n);
}

/* For WAYS rows i, products[i] = x . y[i], each y[i] from number `at` on. Sums of one row go on in turn, since an addition takes
   several cycles. */
INLINE void ways_of_dot(const int WAYS, float *products, const float *x, rows_in y, whole at, whole n) {
    const int TURNS = 4 / WAYS;
    lanes sums[4] = {{0}};
    whole c = 0;
    for (; c + TURNS * LANES <= n; c += TURNS * LANES)
        for (int turn = 0; turn < TURNS; turn++)
            for (int i = 0; i < WAYS; i++)
                sums[turn * WAYS + i] += load(x + c + turn * LANES) * load(y[i] + at + c + turn * LANES);
    for (int i = 0; i < WAYS; i++) {
        for (int turn = 1; turn < TURNS; turn++) sums[i] += sums[turn * WAYS + i];
        products[i] = sum_of(sums[i]);
        for (whole rest = c; rest < n; rest++) products[i] += x[rest] * y[i][at + rest];
    }
}

/* products[i] = x . y[i] for any number of rows. */
static void dots(float *products, const float *x, rows_in y, whole ways, whole at, whole n) {
    whole i = 0;
    for (; i + 4 <= ways; i += 4) ways_of_dot(4, products + i, x, y + i, at, n);
    for (; i + 2 <= ways; i += 2) ways_of_dot(2, products + i, x, y + i, at, n);
    for (; i < ways; i++) ways_of_dot(1, products + i, x, y + i, at, n);
}

INLINE float dot(const float *a, const float *b, whole n) {
    float product;
    ways_of_dot(1, &product, a, &b, 0, n);
    return product;
}
