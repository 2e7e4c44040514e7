"""Least squares of a power law with one shape for all seeds and an offset for each: y = b_s + A x^-alpha.

For a given exponent it is linear, and the offsets drop out when every seed's mean is subtracted, so only the exponent is
searched for.

Letters: P points, N seeds, E exponents, R resamples. `index` is the number of each point's seed, from 0.
"""

from typing import Any

import numpy as np
from jaxtyping import Float, Int
from scipy.optimize import minimize_scalar

LEAST_EXPONENT, LARGEST_EXPONENT = 0.02, 3.0
"""The exponents that are tried. The least one is a straight line in log x for all that a few budgets can show."""

_EXPONENTS = np.geomspace(LEAST_EXPONENT, LARGEST_EXPONENT, 400)


def centred(values: Float[np.ndarray, "*E P"], index: Int[np.ndarray, " P"]) -> Float[np.ndarray, "*E P"]:
    """Subtracts from every value the mean over its seed, which is what a free offset for each seed does to a fit."""
    member = (index == np.unique(index)[:, None]).astype(np.float64)
    means = (values @ member.T) / member.sum(axis=1)
    return values - means @ member


def gradient(x: Float[np.ndarray, " P"], amplitude: float, exponent: float) -> Float[np.ndarray, "2 P"]:
    """Of A x^-alpha by A and alpha."""
    power = x**-exponent
    return np.stack([power, -amplitude * power * np.log(x)])


def profile(
    x: Float[np.ndarray, " P"], y: Float[np.ndarray, " P"], index: Int[np.ndarray, " P"], exponents: Float[np.ndarray, " E"]
) -> tuple[Float[np.ndarray, " E"], Float[np.ndarray, " E"]]:
    """The best amplitude for each exponent, and the sum of squares it leaves; y is centred."""
    z = centred(x ** -exponents[:, None], index)
    amplitudes = (z @ y) / (z * z).sum(axis=1)
    return amplitudes, ((y - amplitudes[:, None] * z) ** 2).sum(axis=1)


def best_exponent(x: Float[np.ndarray, " P"], y: Float[np.ndarray, " P"], index: Int[np.ndarray, " P"]) -> tuple[float, bool]:
    """The exponent with the least sum of squares, and whether it is an end of the searched range."""

    def remainder(exponent: float) -> float:
        return float(profile(x, y, index, np.array([exponent]))[1][0])

    best = int(profile(x, y, index, _EXPONENTS)[1].argmin())
    around = _EXPONENTS[max(best - 1, 0)], _EXPONENTS[min(best + 1, _EXPONENTS.size - 1)]
    result: Any = minimize_scalar(remainder, bounds=around, method="bounded", options={"xatol": 1e-10})
    found = float(result.x)
    if best in (0, _EXPONENTS.size - 1) and remainder(float(_EXPONENTS[best])) <= remainder(found):
        return float(_EXPONENTS[best]), True
    return found, False


def refits(
    x: Float[np.ndarray, " P"],
    y: Float[np.ndarray, " P"],
    index: Int[np.ndarray, " P"],
    weights: Float[np.ndarray, "R N"],
) -> tuple[Float[np.ndarray, " R"], Float[np.ndarray, " R"]]:
    """Exponent, to the grid, and amplitude of the fit to each of R weighings of the seeds; the amplitude is 0 where none is."""
    y, z = centred(y, index), centred(x ** -_EXPONENTS[:, None], index)
    member = (index[:, None] == np.arange(weights.shape[1])).astype(np.float64)
    # A seed that is drawn twice counts twice, so sums over a resample are weighted sums over the seeds.
    zz, zy = weights @ ((z * z) @ member).T, weights @ ((z * y) @ member).T
    # Seeds with one run each say nothing about the shape: amplitude 0.
    zz = np.where(zz > 0, zz, np.inf)
    best = (zy * zy / zz).argmax(axis=1)
    rows = np.arange(len(best))
    return _EXPONENTS[best], zy[rows, best] / zz[rows, best]
