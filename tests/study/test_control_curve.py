"""The curve of the control: against curves that are known, against scipy, and in what it refuses to say."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import curve_fit

from twoaxis.core.errors import StudyError
from twoaxis.statistics import paired_test
from twoaxis.study.statistics.control_curve import (
    LACK_OF_FIT,
    LARGEST_EXPONENT,
    LEAST_EXPONENT,
    ControlCurve,
    EqualCostDifferences,
    OutOfRange,
    differences_at_equal_cost,
    fit_control_curve,
)
from twoaxis.study.statistics.speedup import bootstrap_speedup, effective_speedup

BUDGETS = (0.5, 0.75, 1.0, 1.5, 2.0)

Points = dict[int, dict[float, float]]


def law(amplitude: float = 0.5, exponent: float = 0.3, noise: float = 0.0, n: int = 3, unit: float = 1.0) -> Points:
    generator = np.random.default_rng(0)
    return {
        seed: {unit * x: 3 + seed / 50 + amplitude * x**-exponent + noise * generator.normal() for x in BUDGETS}
        for seed in range(n)
    }


@given(st.floats(0.01, 10), st.floats(0.05, 2.5), st.sampled_from([1.0, 3e15]))
def test_recovers_a_curve_without_noise(amplitude: float, exponent: float, unit: float) -> None:
    curve = fit_control_curve(law(amplitude, exponent, unit=unit), unit)
    assert curve.exponent == pytest.approx(exponent, rel=1e-5)
    assert curve.amplitude == pytest.approx(amplitude, rel=1e-4)
    assert curve.offsets == pytest.approx({seed: 3 + seed / 50 for seed in range(3)}, abs=1e-4 * (1 + amplitude))
    assert not curve.exponent_at_bound
    assert (curve.low, curve.high) == (0.5 * unit, 2 * unit)


def test_agrees_with_least_squares_of_scipy() -> None:
    points = law(noise=0.004)
    curve = fit_control_curve(points, 1.0)
    seeds = np.repeat(np.arange(3), len(BUDGETS))

    def model(x: Any, amplitude: float, exponent: float, *offsets: float) -> Any:
        return np.array(offsets)[seeds] + amplitude * x**-exponent

    x, y = np.tile(BUDGETS, 3), np.array([points[seed][cost] for seed in range(3) for cost in BUDGETS])
    found, covariance = curve_fit(model, x, y, p0=[0.4, 0.4, 3, 3, 3])
    assert (curve.amplitude, curve.exponent) == pytest.approx(tuple(found[:2]), rel=1e-4)
    assert np.array(curve.covariance) == pytest.approx(covariance[:2, :2], rel=1e-3)
    residuals = y - model(x, *found)
    assert [point.residual for point in curve.points] == pytest.approx(residuals.tolist(), abs=1e-6)
    assert curve.residual_sd == pytest.approx(math.sqrt(residuals @ residuals / (15 - 5)), rel=1e-6)
    assert curve.df == 10


def test_the_error_of_the_drop_is_its_spread_over_repetitions() -> None:
    generator, drops, claimed, refused = np.random.default_rng(1), [], [], 0
    for _ in range(400):
        points = {seed: {x: 3 + 0.5 * x**-0.3 + generator.normal(0, 0.004) for x in BUDGETS} for seed in range(3)}
        try:
            curve = fit_control_curve(points, 1.0)
        except StudyError:
            refused += 1
            continue
        drops.append(curve.drop(1.5))
        claimed.append(curve.drop_error(1.5).variance)
    assert refused <= 400 * LACK_OF_FIT + 3 * math.sqrt(400 * LACK_OF_FIT)
    # A variance from 400 draws has a relative standard error of sqrt(2 / 399) = 7%.
    assert np.var(drops) / np.mean(claimed) == pytest.approx(1.0, abs=3 * 0.07)


@given(st.floats(0.5, 2.0))
def test_inverse_undoes_drop(cost: float) -> None:
    curve = fit_control_curve(law(noise=0.004), 1.0)
    drop = curve.drop(cost)
    assert isinstance(drop, float)
    assert curve.inverse(drop) == pytest.approx(cost, rel=1e-12)


def test_is_anchored_at_what_the_control_did_at_its_own_budget() -> None:
    curve = fit_control_curve(law(noise=0.01), 1.0)
    assert curve.drop(1.0) == 0.0
    assert curve.drop_error(1.0).variance == 0.0
    assert curve.inverse(0.0) == 1.0
    assert curve.mean_loss(1.0) == pytest.approx(np.mean(list(curve.offsets.values())) + curve.amplitude)


def test_says_nothing_beyond_the_measured_range() -> None:
    curve = fit_control_curve(law(), 1.0)
    less, more = OutOfRange("less", 0.5), OutOfRange("more", 2.0)
    assert curve.outside(2.0 * (1 + 1e-12)) is None
    for cost, expected in ((0.49, less), (2.01, more)):
        assert curve.drop(cost) == curve.mean_loss(cost) == expected
    for difference, expected in ((1.0, less), (-0.2, more), (-0.5, more), (-math.inf, more), (math.inf, less)):
        assert curve.inverse(difference) == expected
    assert (str(less), str(more)) == ("less than 0.50x", "more than 2.00x")


def test_a_straight_line_in_log_cost_ends_at_the_least_exponent() -> None:
    points = {seed: {x: 3 - 0.1 * math.log(x) for x in BUDGETS} for seed in (0, 1)}
    curve = fit_control_curve(points, 1.0)
    assert (curve.exponent, curve.exponent_at_bound) == (LEAST_EXPONENT, True)
    assert curve.drop(2.0) == pytest.approx(-0.1 * math.log(2), abs=1e-3)


def test_a_cliff_ends_at_the_largest_exponent() -> None:
    points = {seed: {x: 3 + x**-3.2 for x in BUDGETS} for seed in (0, 1)}
    curve = fit_control_curve(points, 1.0)
    assert (curve.exponent, curve.exponent_at_bound) == (pytest.approx(LARGEST_EXPONENT), True)


@pytest.mark.parametrize(
    "means",
    [
        pytest.param({0.5: 5.9, 0.75: 5.8, 1.0: 5.4, 1.5: 4.6, 2.0: 4.4}, id="a late plateau"),
        pytest.param({0.5: 4.10, 0.75: 4.05, 1.0: 3.99, 1.5: 3.86, 2.0: 3.80}, id="a bend"),
        pytest.param({0.5: 4.10, 1.0: 3.99, 2.0: 3.70}, id="three budgets, falling ever faster"),
        pytest.param({0.5: 4.30, 0.75: 4.10, 1.0: 4.0, 1.5: 3.93, 2.0: 3.96}, id="rises at the end"),
        pytest.param({0.5: 4.30, 1.0: 4.0, 2.0: 4.05}, id="three budgets, rising at the end"),
    ],
)
def test_refuses_a_curve_that_every_seed_leaves_in_the_same_way(means: dict[float, float]) -> None:
    generator, refused = np.random.default_rng(0), 0
    for _ in range(20):
        level = generator.normal(0, 0.03, 5)
        points = {seed: {x: mean + level[seed] + generator.normal(0, 0.01) for x, mean in means.items()} for seed in range(5)}
        try:
            fit_control_curve(points, 1.0)
        except StudyError as error:
            assert "from one falling power law" in str(error)
            refused += 1
    # Else an arm that equals the control has a difference, whose error more seeds make smaller than it is.
    assert refused == 20


def test_seeds_need_not_have_the_same_runs() -> None:
    points = law(n=4)
    del points[0][2.0], points[1][0.5], points[1][0.75]
    points[3] = {1.0: points[3][1.0]}
    curve = fit_control_curve(points, 1.0)
    assert curve.exponent == pytest.approx(0.3, rel=1e-5)
    assert curve.offsets == pytest.approx({seed: 3 + seed / 50 for seed in range(4)}, abs=1e-5)
    assert len(curve.points) == 13


def without(points: Points, *costs: float) -> Points:
    return {seed: {cost: loss for cost, loss in losses.items() if cost not in costs} for seed, losses in points.items()}


@pytest.mark.parametrize(
    ("points", "budget", "message"),
    [
        pytest.param({}, 1.0, "budgets of the control with one seed=0: must be at least 3; train it", id="nothing"),
        pytest.param(
            without(law(), 0.5, 0.75, 2.0), 1.0, "budgets of the control with one seed=2: must be at least 3", id="two"
        ),
        pytest.param(
            {seed: {1 + seed / 50: 3.0, 2 + seed / 50: 2.9} for seed in range(3)},
            1.0,
            "budgets of the control with one seed=2: must be at least 3",
            id="two, measured in seconds",
        ),
        pytest.param(
            {0: {0.5: 3.2, 1.0: 3.0}, 1: {0.5: 3.3, 1.0: 3.1}, 2: {0.5: 3.3, 1.0: 3.1}, 3: {2.0: 2.9}},
            1.0,
            "budgets of the control with one seed=2: must be at least 3",
            id="a third without its seed's others",
        ),
        pytest.param(without(law(n=1), 0.75, 1.5), 1.0, "runs of the control=3: must be at least 4 for 1 seeds", id="one seed"),
        pytest.param(
            law(), 2.5, "budget of the control=2.5: must be in the range of its measured costs, 0.5 to 2", id="budget"
        ),
        pytest.param(law(amplitude=-0.5), 1.0, "loss of the control by cost={0.5: .*must be lower where more", id="rises"),
        pytest.param({**law(), 0: {1.0: math.nan}}, 1.0, r"\(1.0, nan\): must be finite, with a cost above 0", id="nan"),
        pytest.param({**law(), 0: {0.0: 3.0}}, 1.0, r"\(0.0, 3.0\): must be finite, with a cost above 0", id="no cost"),
    ],
)
def test_refuses_what_is_no_curve(points: Points, budget: float, message: str) -> None:
    with pytest.raises(StudyError, match=message):
        fit_control_curve(points, budget)


@pytest.fixture(scope="module")
def curve() -> ControlCurve:
    return fit_control_curve(law(noise=0.002), 1.0)


ARM = {0: 3.455, 1: 3.463, 2: 3.484}
CONTROL = {0: 3.50, 1: 3.51, 2: 3.54}


def at_equal_cost(curve: ControlCurve, cost: float) -> EqualCostDifferences:
    found = differences_at_equal_cost(curve, ARM, CONTROL, cost)
    assert isinstance(found, EqualCostDifferences)
    return found


def test_an_arm_of_the_same_cost_is_compared_as_it_is(curve: ControlCurve) -> None:
    found = at_equal_cost(curve, 1.0)
    assert found.differences == {seed: ARM[seed] - CONTROL[seed] for seed in ARM}
    assert (found.drop, found.shared.variance) == (0.0, 0.0)


def test_a_costlier_arm_is_compared_with_a_better_control(curve: ControlCurve) -> None:
    found, drop = at_equal_cost(curve, 1.5), curve.drop(1.5)
    assert found.drop == drop and found.drop < 0
    assert found.differences == pytest.approx({seed: ARM[seed] - CONTROL[seed] - found.drop for seed in ARM})
    assert found.shared == curve.drop_error(1.5)
    assert differences_at_equal_cost(curve, ARM, CONTROL, 2.2) == OutOfRange("more", 2.0)


def test_charging_refuses_an_arm_without_its_control(curve: ControlCurve) -> None:
    with pytest.raises(StudyError, match=r"seeds of the control=\[0, 1\]: must be all of \[0, 1, 2\]"):
        differences_at_equal_cost(curve, ARM, {0: 3.5, 1: 3.51}, 1.2)


def test_speedup_on_a_known_curve_is_the_interval_of_the_difference() -> None:
    curve, test = fit_control_curve(law(), 1.0), paired_test([-0.040, -0.042, -0.047])
    speedup = effective_speedup(curve, test, cost=1.25)
    expected = [(1 + difference / 0.5) ** (-1 / 0.3) / 1.25 for difference in (test.mean, test.high, test.low)]
    assert [speedup.value, speedup.low, speedup.high] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("cost", [0.8, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.8])
def test_speedup_differs_from_1_exactly_when_the_difference_at_equal_cost_differs_from_0(
    curve: ControlCurve, cost: float
) -> None:
    found = at_equal_cost(curve, cost)
    at_cost = paired_test(list(found.differences.values()), shared=found.shared)
    speedup = effective_speedup(curve, paired_test([ARM[seed] - CONTROL[seed] for seed in ARM]), cost)
    low, high = (end.multiple if isinstance(end, OutOfRange) else end for end in (speedup.low, speedup.high))
    assert (low <= 1 <= high) == (at_cost.low <= 0 <= at_cost.high)


def test_the_error_of_the_curve_widens_the_speedup(curve: ControlCurve) -> None:
    test = paired_test([-0.0459, -0.046, -0.0461])
    speedup = effective_speedup(curve, test, 1.0)
    low, high = curve.inverse(test.high), curve.inverse(test.low)
    assert isinstance(low, float) and isinstance(high, float)
    assert isinstance(speedup.low, float) and isinstance(speedup.high, float)
    assert speedup.low < low - 1e-3 and speedup.high > high + 1e-3


@pytest.mark.parametrize(
    ("differences", "value", "low", "high"),
    [
        ([-0.3, -0.31, -0.32], "more", "more", "more"),
        ([0.3, 0.31, 0.32], "less", "less", "less"),
        ([-0.01, 0.0, 0.02], None, None, None),
        ([-0.3, 0.0, 0.31], None, "less", "more"),
        ([-0.08, -0.085, -0.1], None, None, "more"),
    ],
)
def test_speedup_is_never_extrapolated(
    curve: ControlCurve, differences: list[float], value: str | None, low: str | None, high: str | None
) -> None:
    speedup = effective_speedup(curve, paired_test(differences), cost=1.25)
    ends = {"less": OutOfRange("less", 0.4), "more": OutOfRange("more", 1.6)}
    for found, side in ((speedup.value, value), (speedup.low, low), (speedup.high, high)):
        assert found == ends[side] if side else isinstance(found, float) and 0.4 <= found <= 1.6


def test_no_speedup_without_an_interval(curve: ControlCurve) -> None:
    with pytest.raises(StudyError, match="must be different between replicates"):
        effective_speedup(curve, paired_test([-0.1, -0.1]), 1.0)


def test_bootstrap_fits_every_resample_anew() -> None:
    # Two seeds of which one falls twice as fast: the outermost of four resamples hold one of them twice.
    points = {0: {x: 3 + 0.5 * x**-0.3 for x in BUDGETS}, 1: {x: 3 + 1.0 * x**-0.3 for x in BUDGETS}}
    both = fit_control_curve(points, 1.0)
    low, high = bootstrap_speedup(both, {0: -0.05, 1: -0.05}, cost=1.0)
    # The exponent is found to a grid that is 1.3% wide, and the amplitude to the exponent.
    assert (low, high) == pytest.approx(((1 - 0.05) ** (-1 / 0.3), (1 - 0.1) ** (-1 / 0.3)), rel=2e-4)


def test_bootstrap_on_a_known_curve_is_that_of_the_differences() -> None:
    known, differences = fit_control_curve(law(), 1.0), {2: -0.05, 0: -0.02, 1: 0.01}
    low, high = bootstrap_speedup(known, differences, cost=1.25)
    expected = [(1 + difference / 0.5) ** (-1 / 0.3) / 1.25 for difference in (0.01, -0.05)]
    assert [low, high] == pytest.approx(expected, rel=1e-3)
    assert bootstrap_speedup(known, {0: -0.4, 1: -0.3, 2: 0.3}, 1.25) == (OutOfRange("less", 0.4), OutOfRange("more", 1.6))


def test_bootstrap_of_a_control_that_may_not_fall_is_beyond() -> None:
    points = {0: {x: 3 + 0.5 * x**-0.3 for x in BUDGETS}, 1: {x: 3 - 0.1 * x**-0.3 for x in BUDGETS}}
    uncertain = fit_control_curve(points, 1.0)
    assert bootstrap_speedup(uncertain, {0: -0.05, 1: -0.05}, 1.0)[1] == OutOfRange("more", 2.0)
    assert bootstrap_speedup(uncertain, {0: 0.05, 1: 0.05}, 1.0)[0] == OutOfRange("less", 0.5)


def test_bootstrap_refuses_seeds_that_are_not_those_of_the_curve(curve: ControlCurve) -> None:
    with pytest.raises(StudyError, match=r"seeds of the differences=\[0, 1\]: must be the 3 seeds of the curve"):
        bootstrap_speedup(curve, {0: -0.1, 1: -0.2}, 1.0)
