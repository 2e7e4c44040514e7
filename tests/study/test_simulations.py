"""Whether the statistics keep their promises when a study is repeated many times, and whether a broken one would be noticed.

Every promise is put to the functions that studies use, with fixed seeds. What may be missing is three standard errors of the
simulation itself, and beside each promise stands a fault that breaks it by more than that.
"""

import math
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from twoaxis.core.errors import StudyError
from twoaxis.statistics import PairedTest, bootstrap_interval, compare, holm, paired_test, power, replicates_needed
from twoaxis.study.statistics.control_curve import (
    LACK_OF_FIT,
    ControlCurve,
    EqualCostDifferences,
    OutOfRange,
    differences_at_equal_cost,
    fit_control_curve,
)
from twoaxis.study.statistics.speedup import EffectiveSpeedup, effective_speedup

ALPHA = 0.05
LEAST, MOST = 0.93, 0.97
"""What a 95% interval may cover."""

Interval = Callable[[list[float]], tuple[float, float]]


@pytest.fixture(autouse=True)
def no_bootstrap_inside_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out of `paired_test` what takes most of its time and is no part of its interval or p value."""
    monkeypatch.setattr("twoaxis.statistics.bootstrap_interval", lambda *_: (0.0, 0.0))


def margin(rate: float, trials: int) -> float:
    """Three standard errors of a rate that was found in so many trials."""
    return 3 * math.sqrt(rate * (1 - rate) / trials)


def normal(generator: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float64]:
    return generator.normal(size=shape)


def skewed(generator: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Skewness 0.5: one seed in forty is more than 2.3 standard deviations worse, as runs with a loss spike are."""
    return (generator.gamma(16.0, size=shape) - 16.0) / 4.0


def student(differences: list[float]) -> tuple[float, float]:
    test = paired_test(differences)
    return test.low, test.high


def coverage(interval: Interval, n: int, noise: Callable[..., NDArray[np.float64]] = normal, trials: int = 4000) -> float:
    """How often an interval from n differences holds their true mean."""
    draws = -0.01 + 0.02 * noise(np.random.default_rng(100 + n), (trials, n))
    return float(np.mean([low <= -0.01 <= high for low, high in map(interval, draws.tolist())]))


@pytest.mark.parametrize("noise", [normal, skewed])
@pytest.mark.parametrize("n", [2, 3, 5, 10])
def test_95_percent_intervals_cover_95_percent(n: int, noise: Callable[..., NDArray[np.float64]]) -> None:
    rate = coverage(student, n, noise)
    assert LEAST <= rate <= MOST
    if noise is normal:
        assert rate == pytest.approx(0.95, abs=margin(0.95, 4000))


def interval_of(quantile: float, ddof: int = 1) -> Interval:
    def interval(differences: list[float]) -> tuple[float, float]:
        half = quantile * float(np.std(differences, ddof=ddof)) / math.sqrt(len(differences))
        return float(np.mean(differences)) - half, float(np.mean(differences)) + half

    return interval


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(interval_of(1.96), id="normal quantile"),
        pytest.param(interval_of(float(stats.t.ppf(0.975, 3))), id="n degrees of freedom"),
        pytest.param(interval_of(float(stats.t.ppf(0.975, 2)), ddof=0), id="sd with n"),
        pytest.param(lambda differences: student(differences[:-1] + differences[:2]), id="replicates counted twice"),
    ],
)
def test_an_interval_that_is_too_narrow_is_noticed(fault: Interval) -> None:
    assert coverage(fault, 3) < 0.95 - 2 * margin(0.95, 4000)


# From 20,000 trials each, and written in the docstring of `bootstrap_interval`.
@pytest.mark.parametrize(("n", "declared"), [(3, 0.75), (5, 0.92), (10, 0.945)])
def test_the_bootstrap_covers_what_its_docstring_says(n: int, declared: float) -> None:
    assert coverage(bootstrap_interval, n, trials=2000) == pytest.approx(declared, abs=margin(declared, 2000))
    text = " ".join((bootstrap_interval.__doc__ or "").split())
    assert f"{100 * declared:.3g}% at n = {n}" in text


def uncorrected(p_values: dict[str, float]) -> dict[str, float]:
    return p_values


def corrected_among_the_significant(p_values: dict[str, float]) -> dict[str, float]:
    return {**p_values, **holm({name: p for name, p in p_values.items() if p <= ALPHA})}


@lru_cache
def p_values_of_ten_arms(real: int) -> tuple[dict[str, float], ...]:
    """P values of 10 arms against one control; the first few really differ from it."""
    trials, n = 1000, 5
    losses = (
        3.0
        + 0.005 * normal(np.random.default_rng(7), (trials, 11, n))
        + 0.02 * normal(np.random.default_rng(8), (trials, 1, n))
    )
    losses[:, 1 : 1 + real] -= 0.05
    return tuple({str(arm): paired_test((trial[arm] - trial[0]).tolist()).p for arm in range(1, 11)} for trial in losses)


def family_wise_rate(correct: Callable[[dict[str, float]], dict[str, float]], real: int) -> float:
    """How often an arm that is no different is found different."""
    found = [correct(p_values) for p_values in p_values_of_ten_arms(real)]
    return float(np.mean([any(p[str(arm)] <= ALPHA for arm in range(1 + real, 11)) for p in found]))


@pytest.mark.parametrize("real", [0, 4])
def test_ten_arms_that_share_a_control_give_a_false_verdict_in_5_percent_of_studies(real: int) -> None:
    assert family_wise_rate(holm, real) <= ALPHA + margin(ALPHA, 1000)


@pytest.mark.parametrize("fault", [uncorrected, corrected_among_the_significant])
def test_a_missing_correction_is_noticed(fault: Callable[[dict[str, float]], dict[str, float]]) -> None:
    assert family_wise_rate(fault, 0) > ALPHA + 2 * margin(ALPHA, 1000)


def two_arms(seed_sd: float, effect: float, trials: int, n: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Losses of control and arm; what a seed does to both has sd `seed_sd`, and what it does to one of them 0.005."""
    generator = np.random.default_rng(3)
    common = 3.0 + seed_sd * normal(generator, (trials, n))
    control, arm = (common + 0.005 * normal(generator, (trials, n)) for _ in range(2))
    return control, arm + effect


def pairing(seed_sd: float) -> tuple[float, float]:
    """Width of the paired interval over that of Welch's, and its power less Welch's."""
    control, arm = two_arms(seed_sd, -0.012, trials := 2000, n=5)
    paired = [paired_test(differences) for differences in (arm - control).tolist()]
    welch: Any = stats.ttest_ind(arm, control, axis=1, equal_var=False)
    unpaired = welch.confidence_interval(0.95)
    width = np.mean([test.high - test.low for test in paired]) / np.mean(unpaired.high - unpaired.low)
    found = np.array([[test.p <= ALPHA for test in paired], welch.pvalue <= ALPHA], dtype=np.float64)
    assert margin(0.5, trials) < 0.04
    return float(width), float(found[0].mean() - found[1].mean())


def joint_coverage(effects: tuple[float, ...], n: int, cut: bool = True, trials: int = 1500) -> float:
    """How often all intervals of a family that shares its control hold their means."""
    generator = np.random.default_rng(7 * n + len(effects))
    held = 0
    for _ in range(trials):
        control = generator.normal(size=n)
        values = {str(at): (effect + generator.normal(size=n) - 0.5 * control).tolist() for at, effect in enumerate(effects)}
        found = compare(values, ALPHA, 0.02)
        ends = [one.simultaneous if cut else (one.test.low, one.test.high) for one in found.values()]
        held += all(low <= effect <= high for (low, high), effect in zip(ends, effects, strict=True))  # type: ignore[misc]
    return held / trials


@pytest.fixture
def intervals_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out what takes nearly all of the time of a comparison and is no part of its interval."""
    for name, value in (("power", 0.5), ("replicates_needed", 5)):
        monkeypatch.setattr(f"twoaxis.statistics.{name}", lambda *_, value=value: value)


@pytest.mark.usefixtures("intervals_only")
@pytest.mark.parametrize(
    ("n", "effects"),
    [(3, (0.0,) * 6), (5, (0.0,) * 6), (3, (0.0, 0.0, 0.0, 3.0, 3.0, 9.0)), (5, (-0.5, 0.5, 1.0, 2.0, 4.0, 8.0))],
)
def test_intervals_of_the_verdicts_hold_all_their_means_in_95_percent_of_studies(n: int, effects: tuple[float, ...]) -> None:
    assert joint_coverage(effects, n) >= 0.95 - margin(0.95, 1500)


@pytest.mark.usefixtures("intervals_only")
def test_intervals_of_single_comparisons_do_not() -> None:
    assert joint_coverage((0.0,) * 6, 5, cut=False) < 0.95 - 2 * margin(0.95, 1500)


def test_pairing_pays_when_seeds_correlate_and_does_not_when_they_do_not() -> None:
    width, power_gained = pairing(seed_sd=0.02)
    assert width < 0.4 and power_gained > 0.5
    width, power_gained = pairing(seed_sd=0.0)
    # Four degrees of freedom instead of eight, for nothing.
    assert 1.0 < width < 1.3 and -0.2 < power_gained < 0


def test_pairs_of_different_seeds_are_noticed() -> None:
    control, arm = two_arms(0.02, -0.012, 1000, 5)
    right, wrong = (
        np.mean([paired_test(differences).p <= ALPHA for differences in (arm - other).tolist()])
        for other in (control, np.roll(control, 1, axis=1))
    )
    assert wrong < right - 2 * margin(0.5, 1000)


def found_rate(n: int, effect: float, alpha: float, trials: int = 4000) -> float:
    """How often an effect, in standard deviations of the differences, is found."""
    draws = normal(np.random.default_rng(n), (trials, n)) + effect
    return float(np.mean([paired_test(differences).p <= alpha for differences in draws.tolist()]))


@pytest.mark.parametrize(
    ("n", "effect", "alpha"), [(3, 1.5, 0.05), (3, 4.0, 0.005), (5, -1.0, 0.05), (10, 1.0, 0.05), (10, 0.0, 0.05)]
)
def test_power_is_what_is_found(n: int, effect: float, alpha: float) -> None:
    predicted = power(n, effect, 1.0, alpha)
    assert found_rate(n, effect, alpha) == pytest.approx(predicted, abs=margin(predicted, 4000))


def test_power_by_the_normal_distribution_is_noticed() -> None:
    guess = float(stats.norm.cdf(1.5 * math.sqrt(3) - 1.96))
    assert abs(found_rate(3, 1.5, 0.05) - guess) > 2 * margin(guess, 4000)


@pytest.mark.parametrize(("effect", "alpha"), [(1.0, 0.05), (2.0, 0.0125)])
def test_replicates_needed_reach_their_power_and_one_fewer_does_not(effect: float, alpha: float) -> None:
    needed = replicates_needed(effect, 1.0, alpha)
    assert found_rate(needed, effect, alpha) >= 0.8 - margin(0.8, 4000)
    assert found_rate(needed - 1, effect, alpha) < 0.8 + margin(0.8, 4000)


def stop_at_the_first_verdict(differences: list[float]) -> bool:
    return any(paired_test(differences[:n]).p <= ALPHA for n in range(3, len(differences) + 1))


def drop_the_worst_replicate(differences: list[float]) -> bool:
    return paired_test(sorted(differences)[:-1]).p <= ALPHA


@pytest.mark.parametrize("fault", [stop_at_the_first_verdict, drop_the_worst_replicate])
def test_why_studies_that_peek_or_drop_replicates_are_refused(fault: Callable[[list[float]], bool]) -> None:
    draws = normal(np.random.default_rng(11), (1000, 8))
    assert np.mean([fault(differences) for differences in draws.tolist()]) > ALPHA + 2 * margin(ALPHA, 1000)


class Repetition:
    """A study whose control follows the power law: its curve, one arm, and what is true of it.

    `common` is the share of the noise of a run at the control's own budget that the arm has in common with it, beyond what
    the seed does to all runs: the same batches under the same schedule.
    """

    budgets = (0.5, 0.75, 1.0, 1.5, 2.0)
    effect = -0.01

    def __init__(self, generator: np.random.Generator, n: int, cost: float, common: float) -> None:
        self.cost = cost
        noise = 0.004 * normal(generator, (n, len(self.budgets)))
        own = 0.004 * normal(generator, (n,))
        level = 3.0 + 0.02 * normal(generator, (n,))
        points = {
            seed: {x: level[seed] + self.law(x) + noise[seed, i] for i, x in enumerate(self.budgets)} for seed in range(n)
        }
        at_budget = noise[:, self.budgets.index(1.0)]
        arm = level + self.law(cost) + self.effect + math.sqrt(common) * at_budget + math.sqrt(1 - common) * own
        self.control = {seed: points[seed][1.0] for seed in points}
        self.arm = dict(enumerate(arm.tolist()))
        self.curve: ControlCurve = fit_control_curve(points, 1.0)

    @staticmethod
    def law(x: float) -> float:
        return 0.5 * x**-0.3

    @property
    def true_speedup(self) -> float:
        return ((self.law(self.cost) + self.effect) / 0.5) ** (-1 / 0.3) / self.cost

    @property
    def differences(self) -> dict[int, float]:
        return {seed: self.arm[seed] - self.control[seed] for seed in self.arm}

    @property
    def test(self) -> PairedTest:
        return paired_test(list(self.differences.values()))

    def at_equal_cost(self) -> EqualCostDifferences:
        found = differences_at_equal_cost(self.curve, self.arm, self.control, self.cost)
        assert isinstance(found, EqualCostDifferences)
        return found

    def holds(self, low: float | OutOfRange, high: float | OutOfRange) -> bool:
        """Whether what an interval says of the speedup is true, "more than 1.3x" included."""
        if isinstance(low, OutOfRange):
            low = low.multiple if low.side == "more" else 0.0
        if isinstance(high, OutOfRange):
            high = high.multiple if high.side == "less" else math.inf
        return low <= self.true_speedup <= high


@lru_cache
def repetitions(n: int, cost: float, common: float, trials: int = 1000) -> tuple[Repetition, ...]:
    generator, found = np.random.default_rng([n, int(100 * cost), int(100 * common)]), list[Repetition]()
    for _ in range(trials):
        with suppress(StudyError):
            found.append(Repetition(generator, n, cost, common))
    # What follows the law is refused as rarely as the curve says.
    assert len(found) >= trials * (1 - LACK_OF_FIT) - 3 * math.sqrt(trials * LACK_OF_FIT)
    return tuple(found)


SCENARIOS = [(3, 1.3, 0.9), (5, 0.7, 0.0), (5, 1.9, 0.9)]
"""Replicates, cost of the arm over that of the control, and noise in common."""


@pytest.mark.parametrize(("n", "cost", "common"), SCENARIOS)
def test_intervals_at_equal_cost_cover_95_percent(n: int, cost: float, common: float) -> None:
    covered = []
    for study in repetitions(n, cost, common):
        found = study.at_equal_cost()
        test = paired_test(list(found.differences.values()), shared=found.shared)
        covered.append(test.low <= study.effect <= test.high)
    assert LEAST <= np.mean(covered) <= MOST


def test_comparing_without_the_error_of_the_curve_is_noticed() -> None:
    covered = []
    for study in repetitions(5, 1.9, 0.9):
        test = paired_test(list(study.at_equal_cost().differences.values()))
        covered.append(test.low <= study.effect <= test.high)
    assert np.mean(covered) < LEAST - margin(LEAST, 1000)


def speedup_coverage(studies: tuple[Repetition, ...], of: Callable[[Repetition], EffectiveSpeedup]) -> float:
    found = [(study, of(study)) for study in studies]
    return float(np.mean([study.holds(speedup.low, speedup.high) for study, speedup in found]))


def with_the_curve(study: Repetition) -> EffectiveSpeedup:
    return effective_speedup(study.curve, study.test, study.cost)


def without_the_curve(study: Repetition) -> EffectiveSpeedup:
    ends = (study.curve.inverse(difference) for difference in (study.test.mean, study.test.high, study.test.low))
    value, low, high = (end / study.cost if isinstance(end, float) else end for end in ends)
    return EffectiveSpeedup(value, low, high)


@pytest.mark.parametrize(("n", "cost", "common"), SCENARIOS[:2])
def test_intervals_of_the_effective_speedup_cover_95_percent(n: int, cost: float, common: float) -> None:
    assert LEAST <= speedup_coverage(repetitions(n, cost, common), with_the_curve) <= MOST


def test_a_speedup_without_the_error_of_the_curve_is_noticed() -> None:
    assert speedup_coverage(repetitions(3, 1.3, 0.9), without_the_curve) < LEAST - margin(LEAST, 1000)
