/* Elementary functions of a few numbers at once, by the polynomials of the Cephes library. */
#pragma once

#include "rows.h"

typedef int32_t ints __attribute__((vector_size(4 * LANES)));

INLINE lanes chosen(ints where, lanes then, lanes otherwise) { return (lanes)((where & (ints)then) | (~where & (ints)otherwise)); }

INLINE lanes all(float value) { return value - (lanes){0}; }

/* To two units in the last place; x is at most 88. */
INLINE lanes exponential(lanes x) {
    const lanes shift = all(12582912);
    const lanes n = (x * 1.44269504f + shift) - shift, r = x - n * 0.693359375f + n * 2.12194440e-4f;
    lanes p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * (lanes)((__builtin_convertvector(n, ints) + 127) << 23);
}

/* 0 below -87. */
INLINE lanes sigmoid(lanes x) {
    const ints low = x < -87;
    return chosen(low, (lanes){0}, 1 / (1 + exponential(chosen(low | (x > 87), chosen(low, all(87), all(-87)), -x))));
}

/* The polynomial where the other form would cancel. */
INLINE lanes tangent(lanes x) {
    const ints high = x > 9, low = x < -9;
    const lanes within = chosen(high, all(9), chosen(low, all(-9), x)), z = within * within;
    lanes p = z * -5.70498872745e-3f + 2.06390887954e-2f;
    p = p * z - 5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z - 3.33332819422e-1f;
    const lanes far = 1 - 2 / (exponential(2 * within) + 1);
    return chosen(z < 0.625f * 0.625f, p * z * within + within, far);
}
