"""The loss of the control as a function of cost, fitted so that arms can be compared with it at equal cost.

The control is trained with the seeds of the study at several budgets, each with a whole schedule. A cost is in FLOPs or
seconds, the same unit throughout; x is a cost over the control's own budget. Nothing is extrapolated: outside the measured
range, results are `OutOfRange`.

Letters: P runs of the control.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int
from scipy.optimize import minimize_scalar
from scipy.special import fdtrc

from twoaxis.core.errors import StudyError, problem
from twoaxis.statistics import SharedError

FEWEST_COSTS = 3
"""With two budgets, every exponent fits; the third determines it."""

# Measured seconds of one budget vary a little; different budgets differ by more than this factor.
_SAME_BUDGET = 1.1

_ROUNDING = 1e-9

LEAST_EXPONENT, LARGEST_EXPONENT = 0.02, 3.0
"""Range of the search. At the least exponent, the curve is nearly a straight line in log x."""

LACK_OF_FIT = 0.01
"""Probability of refusing the losses of a control that do follow the curve."""

_HARMLESS = 0.01
"""Misfit over the fall of the loss that no comparison notices."""

_EXPONENTS = np.geomspace(LEAST_EXPONENT, LARGEST_EXPONENT, 400)


@dataclass(frozen=True)
class OutOfRange:
    """A result outside the measured range; prints as a bound.

    Attributes:
        side: of the range on which the result lies.
        multiple: the end of the range on that side, as a multiple of the control's budget or of an arm's cost.

    Example:
        >>> print(OutOfRange("more", 2.0))
        more than 2.00x
    """

    side: Literal["less", "more"]
    multiple: float

    def __str__(self) -> str:
        return f"{self.side} than {self.multiple:.2f}x"


class CurvePoint(NamedTuple):
    """One run of the control, with its residual from the curve in nats per token."""

    seed: int
    cost: float
    loss: float
    residual: float


@dataclass(frozen=True)
class ControlCurve:
    """The fitted loss of the control over cost.

    Equation: L_s(C) = b_s + A (C / C_0)^-alpha: seeds shift the curve without changing its shape. The irreducible loss is
    part of every b_s.

    Attributes:
        budget: C_0, the cost of the control in the study itself.
        amplitude: A > 0, nats per token.
        exponent: alpha.
        exponent_at_bound: whether the search ended at its least or largest exponent, which then has no meaning.
        offsets: b_s by seed, nats per token.
        points: the fitted runs, with residuals.
        residual_sd: standard deviation of the residuals with `df`, nats per token.
        df: degrees of freedom.
        low: the least measured cost.
        high: the largest measured cost.
        covariance: of (A, alpha), by least squares around the fit.
    """

    budget: float
    amplitude: float
    exponent: float
    exponent_at_bound: bool
    offsets: dict[int, float]
    points: tuple[CurvePoint, ...]
    residual_sd: float
    df: int
    low: float
    high: float
    covariance: tuple[tuple[float, float], tuple[float, float]]

    def outside(self, cost: float) -> OutOfRange | None:
        """Returns OutOfRange for a cost outside the measured range, in multiples of the control's budget; else None."""
        if cost < self.low * (1 - _ROUNDING):
            return OutOfRange("less", self.low / self.budget)
        return OutOfRange("more", self.high / self.budget) if cost > self.high * (1 + _ROUNDING) else None

    def mean_loss(self, cost: float) -> float | OutOfRange:
        """The fitted loss at a cost, averaged over the seeds, nats per token."""
        level = math.fsum(self.offsets.values()) / len(self.offsets)
        return self.outside(cost) or level + self.amplitude * (cost / self.budget) ** -self.exponent

    def drop(self, cost: float) -> float | OutOfRange:
        """The expected change of the control's loss from its own budget to this cost, nats per token.

        Equation: A ((C / C_0)^-alpha - 1), which is 0 at its own budget for every fit.
        """
        return self.outside(cost) or self.amplitude * ((cost / self.budget) ** -self.exponent - 1)

    def drop_error(self, cost: float) -> SharedError:
        """The error of `drop` from fitting the curve, by the delta method.

        Equation: g^T cov(A, alpha) g with the gradient g of the drop. The error is common to all replicates, so their spread
        does not show it and it has to be added. Runs at the control's own budget are in the curve and in the differences;
        their unknown covariance is not subtracted, which makes intervals wider.

        In simulation (4000 studies each, n = 3 to 10, arms of 0.7 to 1.9 times the control's cost), intervals without this
        error cover 94% to 95% when arm and control share only the seed's offset, but 53% to 91% when 90% of a run's noise is
        common to both; with it they cover 95% to 97%.
        """
        x = cost / self.budget
        by_amplitude, by_exponent = x**-self.exponent - 1, -self.amplitude * x**-self.exponent * math.log(x)
        (aa, ae), (_, ee) = self.covariance
        variance = by_amplitude**2 * aa + 2 * by_amplitude * by_exponent * ae + by_exponent**2 * ee
        return SharedError(max(variance, 0.0), self.df)

    def inverse(self, difference: float) -> float | OutOfRange:
        """The cost at which the control's loss differs by this from the loss at its own budget.

        Equation: C = C_0 (1 + difference / A)^(-1 / alpha)
        """
        remaining = 1 + difference / self.amplitude
        if remaining <= 0:
            return OutOfRange("more", self.high / self.budget)
        cost = self.budget * math.exp(min(-math.log(remaining) / self.exponent, 700.0))
        return self.outside(cost) or cost


def fit_control_curve(points: Mapping[int, Mapping[float, float]], budget: float) -> ControlCurve:
    """Fits the loss of the control over cost, with one shape for all seeds and an offset for each.

    Equation: least squares of L_s(C) = b_s + A (C / C_0)^-alpha. It is linear for a given alpha, and offsets vanish when every
    seed's mean is subtracted, so only alpha is searched: on a grid, then between its neighbours.

    Args:
        points: loss in nats per token, by seed and cost.
        budget: cost of the control in the study itself.

    Raises:
        StudyError: too few budgets or runs, a budget outside the measured range, a number that is not finite, a loss that
            does not fall with cost, or one that leaves the curve in the same way with every seed.

    Example:
        >>> losses = {seed: {cost: 3 + seed / 50 + 0.5 * cost**-0.3 for cost in (0.5, 1, 2)} for seed in (0, 1)}
        >>> curve = fit_control_curve(losses, budget=1.0)
        >>> round(curve.amplitude, 4), round(curve.exponent, 4), round(curve.inverse(-0.05), 4)
        (0.5, 0.3, 1.4208)
        >>> print(curve.inverse(-0.2))
        more than 2.00x
    """
    seeds, index, costs, losses = _arrays(points)
    _check(index, costs, losses, budget)
    x, y = costs / budget, centred(losses, index)
    exponent, at_bound = best_exponent(x, y, index)
    amplitude = float(profile(x, y, index, np.array([exponent]))[0][0])
    if amplitude <= 0:
        ends = {cost: float(losses[costs == cost].mean()) for cost in (costs.min(), costs.max())}
        raise StudyError(
            problem(
                "loss of the control by cost",
                {float(cost): round(loss, 4) for cost, loss in ends.items()},
                "lower where more was spent",
                "give the control budgets that are further apart, or more replicates",
            )
        )
    level = losses - amplitude * x**-exponent
    offsets = np.bincount(index, level) / np.bincount(index)
    residuals, df = level - offsets[index], len(losses) - len(seeds) - 2
    _check_fit(x, losses, index, residuals, shape=1 if at_bound else 2)
    residual_sd = math.sqrt(float(residuals @ residuals) / df)
    basis = centred(gradient(x, amplitude, exponent), index)
    covariance = residual_sd**2 * np.linalg.inv(basis @ basis.T)
    return ControlCurve(
        budget=budget,
        amplitude=amplitude,
        exponent=exponent,
        exponent_at_bound=at_bound,
        offsets=dict(zip(seeds, offsets.tolist(), strict=True)),
        points=tuple(
            CurvePoint(seeds[i], *row)
            for i, *row in zip(index, costs.tolist(), losses.tolist(), residuals.tolist(), strict=True)
        ),
        residual_sd=residual_sd,
        df=df,
        low=float(costs.min()),
        high=float(costs.max()),
        covariance=(tuple(covariance[0].tolist()), tuple(covariance[1].tolist())),
    )


@dataclass(frozen=True)
class EqualCostDifferences:
    """Differences between arm and control at the cost of the arm.

    Attributes:
        differences: arm minus control at the arm's cost, by seed, nats per token.
        drop: correction of the control's loss, nats per token.
        shared: the error of `drop`, which is common to all replicates; `paired_test` and `compare` need it.
    """

    differences: dict[int, float]
    drop: float
    shared: SharedError


def differences_at_equal_cost(
    curve: ControlCurve, losses_arm: Mapping[int, float], losses_control: Mapping[int, float], cost_of_arm: float
) -> EqualCostDifferences | OutOfRange:
    """Compares an arm with the control at the cost of the arm.

    Equation: d_s = L_arm,s - (L_control,s + drop(C_arm)), over the seeds of the arm.

    Args:
        curve: of the control, over the same kind of cost.
        losses_arm: final loss by seed, nats per token.
        losses_control: of the control at its own budget, by seed.
        cost_of_arm: of one run.

    Returns:
        The differences, or `OutOfRange` when the cost is outside the measured range.

    Raises:
        StudyError: the control has no loss for a seed of the arm.

    Example:
        >>> losses = {seed: {cost: 3 + 0.5 * cost**-0.3 for cost in (0.5, 1, 2)} for seed in (0, 1)}
        >>> curve = fit_control_curve(losses, budget=1.0)
        >>> found = differences_at_equal_cost(curve, {0: 3.45, 1: 3.44}, {0: 3.5, 1: 3.5}, cost_of_arm=1.3)
        >>> {seed: round(value, 4) for seed, value in found.differences.items()}
        {0: -0.0122, 1: -0.0222}
        >>> print(differences_at_equal_cost(curve, {0: 3.4, 1: 3.4}, {0: 3.5, 1: 3.5}, cost_of_arm=3.0))
        more than 2.00x
    """
    missing = [seed for seed in losses_arm if seed not in losses_control]
    if missing:
        raise StudyError(
            problem(
                "seeds of the control", sorted(losses_control), f"all of {sorted(losses_arm)}", "run the missing replicates"
            )
        )
    drop = curve.drop(cost_of_arm)
    if isinstance(drop, OutOfRange):
        return drop
    differences = {seed: loss - (losses_control[seed] + drop) for seed, loss in losses_arm.items()}
    return EqualCostDifferences(differences, drop, curve.drop_error(cost_of_arm))


def _arrays(
    points: Mapping[int, Mapping[float, float]],
) -> tuple[list[int], Int[np.ndarray, " P"], Float[np.ndarray, " P"], Float[np.ndarray, " P"]]:
    seeds = [seed for seed, losses in points.items() if losses]
    rows = [(i, cost, loss) for i, seed in enumerate(seeds) for cost, loss in sorted(points[seed].items())]
    table = np.array(rows, dtype=np.float64).reshape(-1, 3)
    return seeds, table[:, 0].astype(np.int64), table[:, 1], table[:, 2]


def _check(
    index: Int[np.ndarray, " P"], costs: Float[np.ndarray, " P"], losses: Float[np.ndarray, " P"], budget: float
) -> None:
    if not (np.isfinite(losses).all() and np.isfinite(costs).all() and (costs > 0).all()):
        bad = [
            (c, loss)
            for c, loss in zip(costs.tolist(), losses.tolist(), strict=True)
            if not (0 < c < math.inf and loss - loss == 0)
        ]
        raise StudyError(problem("(cost, loss) of the control", bad[0], "finite, with a cost above 0", "leave that run out"))
    n_seeds = len(set(index.tolist()))
    distinct = max((_distinct(costs[index == i].tolist()) for i in range(n_seeds)), default=0)
    if distinct < FEWEST_COSTS:
        raise StudyError(
            problem(
                "budgets of the control with one seed",
                distinct,
                f"at least {FEWEST_COSTS}",
                "train it at half and twice its budget too",
            )
        )
    if costs.size < n_seeds + 3:
        allowed = f"at least {n_seeds + 3} for {n_seeds} seeds"
        raise StudyError(problem("runs of the control", costs.size, allowed, "train each seed at each budget"))
    if not costs.min() <= budget <= costs.max():
        raise StudyError(
            problem(
                "budget of the control",
                budget,
                f"in the range of its measured costs, {costs.min():.4g} to {costs.max():.4g}",
                "include its own runs among the points",
            )
        )


def _check_fit(
    x: Float[np.ndarray, " P"],
    losses: Float[np.ndarray, " P"],
    index: Int[np.ndarray, " P"],
    residuals: Float[np.ndarray, " P"],
    shape: int,
) -> None:
    """Refuses a curve with residuals that seeds share: `drop_error` takes them for noise, which more seeds would average out.

    An F test against a free mean for every budget. It needs more budgets than the curve has parameters of its shape, and seeds
    that repeat them.
    """
    member = (np.unique(index)[:, None] == index).astype(np.float64)
    levels = (np.unique(x)[1:, None] == x).astype(np.float64)
    free = np.concatenate([member, levels]).T
    best, _, rank, _ = np.linalg.lstsq(free, losses)
    around = float(((losses - free @ best) ** 2).sum())
    shared = max(float(residuals @ residuals) - around, 0.0)
    df_shared, df = int(rank) - len(member) - shape, len(losses) - int(rank)
    misfit, fall = math.sqrt(shared / len(losses)), float(np.ptp(centred(losses - residuals, index)))
    if df_shared < 1 or df < 1 or misfit < _HARMLESS * fall:
        return
    if around == 0 or fdtrc(df_shared, df, shared / df_shared / (around / df)) < LACK_OF_FIT:
        raise StudyError(
            problem(
                "distance of the control's losses from one falling power law",
                f"{misfit:.4f} nats per token, the same way with every seed",
                "within the noise of single runs",
                "match the arms to the control's cost, or give budgets nearer to those of the arms",
            )
        )


def _distinct(costs: list[float]) -> int:
    """Counts the different budgets among the ascending costs of one seed."""
    return sum(i == 0 or cost > _SAME_BUDGET * costs[i - 1] for i, cost in enumerate(costs))


def centred(values: Float[np.ndarray, "*E P"], index: Int[np.ndarray, " P"]) -> Float[np.ndarray, "*E P"]:
    """Subtracts from every value the mean over its seed, which eliminates free offsets of seeds from a fit."""
    member = (index == np.unique(index)[:, None]).astype(np.float64)
    means = (values @ member.T) / member.sum(axis=1)
    return values - means @ member


def gradient(x: Float[np.ndarray, " P"], amplitude: float, exponent: float) -> Float[np.ndarray, "2 P"]:
    """The gradient of A x^-alpha with respect to A and alpha."""
    power = x**-exponent
    return np.stack([power, -amplitude * power * np.log(x)])


def profile(
    x: Float[np.ndarray, " P"], y: Float[np.ndarray, " P"], index: Int[np.ndarray, " P"], exponents: Float[np.ndarray, " E"]
) -> tuple[Float[np.ndarray, " E"], Float[np.ndarray, " E"]]:
    """The best amplitude for each exponent, and its residual sum of squares; y is centred."""
    z = centred(x ** -exponents[:, None], index)
    amplitudes = (z @ y) / (z * z).sum(axis=1)
    return amplitudes, ((y - amplitudes[:, None] * z) ** 2).sum(axis=1)


def best_exponent(x: Float[np.ndarray, " P"], y: Float[np.ndarray, " P"], index: Int[np.ndarray, " P"]) -> tuple[float, bool]:
    """The exponent with the least sum of squares, and whether it is at an end of the search."""

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
    """Fits each of R weightings of the seeds: exponents on the grid, and amplitudes, which are 0 without a fit."""
    y, z = centred(y, index), centred(x ** -_EXPONENTS[:, None], index)
    member = (index[:, None] == np.arange(weights.shape[1])).astype(np.float64)
    # A seed drawn twice counts twice, so sums over a resample are weighted sums over the seeds.
    zz, zy = weights @ ((z * z) @ member).T, weights @ ((z * y) @ member).T
    # Seeds with one run each do not determine the shape: amplitude 0.
    zz = np.where(zz > 0, zz, np.inf)
    best = (zy * zy / zz).argmax(axis=1)
    rows = np.arange(len(best))
    return _EXPONENTS[best], zy[rows, best] / zz[rows, best]
