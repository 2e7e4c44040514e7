"""The statistics against known numbers, and against their own promises in simulation."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from twoaxis.core.errors import StudyError
from twoaxis.statistics import (
    SharedError,
    bootstrap_interval,
    compare,
    holm,
    paired_test,
    power,
    replicates_needed,
)

# R's `sleep` data: extra sleep of ten patients under two drugs; t.test(paired = TRUE) and power.t.test give these numbers.
DRUG_1 = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
DRUG_2 = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]


def test_paired_test_of_the_sleep_data() -> None:
    test = paired_test([a - b for a, b in zip(DRUG_1, DRUG_2, strict=True)])
    assert test.mean == pytest.approx(-1.58)
    assert test.p == pytest.approx(0.002833, abs=5e-7)
    assert (test.low, test.high) == pytest.approx((-2.4598858, -0.7001142), abs=5e-8)


def test_two_replicates_have_one_degree_of_freedom() -> None:
    test = paired_test([-0.10, -0.11])
    half = 12.7062047 * np.std([-0.10, -0.11], ddof=1) / math.sqrt(2)
    assert (test.low, test.high) == pytest.approx((-0.105 - half, -0.105 + half))


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=8), st.sampled_from([0.8, 0.95, 0.99]))
def test_paired_test_agrees_with_scipy(values: list[float], confidence: float) -> None:
    ours = paired_test(values, confidence)
    if not ours.varies:
        assert (ours.low, ours.high, ours.p) == (ours.mean, ours.mean, 1.0)
        return
    theirs: Any = stats.ttest_1samp(values, 0.0)
    low, high = theirs.confidence_interval(confidence)
    assert ours.p == pytest.approx(theirs.pvalue, rel=1e-9)
    assert (ours.low, ours.high) == pytest.approx((low, high), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("values", [[], [0.1], [0.1, math.nan], [0.1, math.inf]])
def test_refuses_what_has_no_interval(values: list[float]) -> None:
    with pytest.raises(StudyError, match="at least 2 finite numbers"):
        paired_test(values)


def test_holm_against_r() -> None:
    p = dict(zip("abcde", [0.01, 0.02, 0.03, 0.04, 0.05], strict=True))
    assert holm(p) == pytest.approx({"a": 0.05, "b": 0.08, "c": 0.09, "d": 0.09, "e": 0.09})


@given(st.lists(st.floats(0, 1), min_size=2, max_size=5), st.data())
def test_holm_with_results_still_to_come_is_an_upper_bound(values: list[float], data: st.DataObject) -> None:
    p = {str(index): value for index, value in enumerate(values)}
    known = data.draw(st.sets(st.sampled_from(sorted(p)), min_size=1))
    final, early = holm(p), holm({name: p[name] for name in sorted(known)}, len(p))
    assert all(early[name] >= final[name] - 1e-15 for name in known)


def test_power_against_r() -> None:
    # power.t.test(n = 20, delta = 1, sd = 1, type = "paired") and the n it finds for power 0.9 at delta 0.5.
    assert power(20, 1.0, 1.0, 0.05) == pytest.approx(0.9886, abs=5e-5)
    assert replicates_needed(0.5, 1.0, 0.05, target=0.9) == 44


@given(st.integers(2, 60), st.floats(0.01, 3), st.sampled_from([0.05, 0.0166]))
def test_power_grows_with_n_and_reaches_the_target_where_it_says(n: int, effect: float, alpha: float) -> None:
    assert power(n, effect, 1.0, alpha) <= power(n + 1, effect, 1.0, alpha) + 1e-9
    needed = replicates_needed(effect, 1.0, alpha)
    assert power(needed, effect, 1.0, alpha) >= 0.8
    assert needed == 2 or power(needed - 1, effect, 1.0, alpha) < 0.8


def test_power_in_simulation() -> None:
    draws = np.random.default_rng(3).normal(0.8, 1.0, (4000, 5))
    tests: Any = stats.ttest_1samp(draws, 0.0, axis=1)
    found = np.mean(tests.pvalue <= 0.05)
    assert found == pytest.approx(power(5, 0.8, 1.0, 0.05), abs=0.025)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_intervals_cover_the_truth_in_95_percent(n: int) -> None:
    draws = np.random.default_rng(n).normal(0.3, 0.05, (1000, n))
    covered = np.mean([test.low <= 0.3 <= test.high for test in map(paired_test, draws.tolist())])
    assert 0.93 <= covered <= 0.97


@pytest.mark.parametrize("n", [2, 3, 5])
def test_false_verdicts_under_the_null_stay_below_alpha(n: int) -> None:
    # The arms of a study share the control's runs, so their differences are correlated.
    # Without a correction, 12 to 14 percent of these trials are false; the bound is 7.9 percent.
    generator, trials, false = np.random.default_rng(10 + n), 500, 0
    for losses in generator.normal(3.0, 0.02, (trials, 4, n)):
        found = compare({str(arm): (losses[arm] - losses[0]).tolist() for arm in (1, 2, 3)}, 0.05, 0.02)
        false += any(comparison.verdict != "undecided" for comparison in found.values())
    assert false / trials <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / trials)


def test_pairing_pays_when_seeds_matter() -> None:
    generator = np.random.default_rng(0)
    paired, shuffled = 0, 0
    for _ in range(300):
        seed_effect = generator.normal(0, 0.1, 5)
        control = 3.0 + seed_effect + generator.normal(0, 0.01, 5)
        arm = 2.97 + seed_effect + generator.normal(0, 0.01, 5)
        paired += compare({"arm": (arm - control).tolist()}, 0.05, 0.02)["arm"].verdict == "better"
        shuffled += paired_test((arm - np.roll(control, 1)).tolist()).p <= 0.05
    assert paired > 270
    assert shuffled < 60


def test_verdicts() -> None:
    found = compare({"down": [-0.1, -0.11, -0.1], "up": [0.1, 0.11, 0.1], "noise": [0.1, -0.1, 0.02]}, 0.05, 0.02)
    assert {name: comparison.verdict for name, comparison in found.items()} == {
        "down": "better",
        "up": "worse",
        "noise": "undecided",
    }
    assert found["noise"].replicates_needed is not None and found["noise"].replicates_needed > 100
    assert found["noise"].power < 0.1


@given(
    st.lists(st.tuples(st.floats(-0.2, 0.2), st.lists(st.floats(-0.1, 0.1), min_size=4, max_size=4)), min_size=1, max_size=8),
    st.integers(0, 4),
)
def test_the_interval_of_the_verdict_agrees_with_it(arms: list[tuple[float, list[float]]], missing: int) -> None:
    differences = {str(n): [mean + noise for noise in values] for n, (mean, values) in enumerate(arms)}
    shared = {"0": SharedError(0.0004, 3)}
    for one in compare(differences, 0.05, 0.02, len(arms) + missing, shared).values():
        assert one.family == len(arms) + missing
        if one.simultaneous is None:
            assert one.verdict == "undecided" and not one.suggestive
            continue
        low, high = one.simultaneous
        assert one.verdict == ("better" if high <= 0 else "worse" if low >= 0 else "undecided")
        assert (low <= one.test.mean <= high and low <= one.test.low) or low == 0
        assert one.suggestive == (one.verdict == "undecided" and not one.test.low <= 0 <= one.test.high)


def test_holm_decides_where_bonferroni_would_not_and_the_interval_ends_at_zero() -> None:
    differences = {"clear": [-0.1, -0.1001, -0.1002], "close": [-0.05, -0.079, -0.04]}
    close = compare(differences, 0.05, 0.02)["close"]
    assert 0.05 / 2 < close.test.p <= 0.05 and close.verdict == "better"
    assert close.simultaneous is not None and close.simultaneous[1] == 0.0 and not close.suggestive


def test_an_interval_that_the_correction_does_not_keep_is_suggestive() -> None:
    close = compare({"close": [-0.05, -0.062, -0.054]}, 0.05, 0.02, comparisons=40)["close"]
    assert close.verdict == "undecided" and close.suggestive and close.test.high < 0
    assert close.simultaneous is not None and close.simultaneous[0] < 0 < close.simultaneous[1]


def test_replicates_that_do_not_vary_decide_nothing() -> None:
    comparison = compare({"arm": [-0.1, -0.1, -0.1]}, 0.05, 0.02)["arm"]
    assert (comparison.verdict, comparison.replicates_needed, comparison.power) == ("undecided", None, 0.0)


def test_correction_counts_arms_without_a_result() -> None:
    differences = {"arm": [-0.1, -0.101, -0.09]}
    alone, planned = compare(differences, 0.05, 0.02)["arm"], compare(differences, 0.05, 0.02, comparisons=4)["arm"]
    assert planned.p_holm == pytest.approx(4 * alone.p_holm)


VARIED = [-0.1, -0.2, -0.14, -0.16, -0.12, -0.19]


def test_bootstrap_of_three_replicates_ends_at_the_outermost() -> None:
    # 1 resample in 27 draws one replicate three times, more than an interval may leave out on a side.
    assert bootstrap_interval([-0.1, -0.2, -0.13]) == pytest.approx((-0.2, -0.1))


@given(st.floats(-5, 5), st.floats(0.1, 10))
def test_bootstrap_moves_with_its_data(shift: float, scale: float) -> None:
    low, high = bootstrap_interval(VARIED)
    moved = bootstrap_interval([shift + scale * value for value in VARIED])
    assert moved == pytest.approx((shift + scale * low, shift + scale * high), abs=1e-9)


def test_bootstrap_is_the_same_on_every_call_and_close_under_another_seed() -> None:
    assert bootstrap_interval(VARIED) == bootstrap_interval(VARIED)
    other = bootstrap_interval(VARIED, seed=1)
    assert other != bootstrap_interval(VARIED)
    assert other == pytest.approx(bootstrap_interval(VARIED), abs=0.01)


def test_bootstrap_of_many_replicates_agrees_with_student() -> None:
    test = paired_test(np.random.default_rng(0).normal(0.0, 1.0, 400).tolist())
    assert test.bootstrap == pytest.approx((test.low, test.high), abs=0.01)


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=8), st.sampled_from([0.8, 0.95]))
def test_bootstrap_stays_within_the_replicates_and_grows_with_confidence(values: list[float], confidence: float) -> None:
    low, high = bootstrap_interval(values, confidence)
    wide_low, wide_high = bootstrap_interval(values, 0.99)
    assert min(values) - 1e-12 <= wide_low <= low <= high <= wide_high <= max(values) + 1e-12


def test_bootstrap_stands_beside_the_interval_of_student() -> None:
    assert compare({"arm": VARIED}, 0.05, 0.02)["arm"].test.bootstrap == bootstrap_interval(VARIED)
    assert paired_test([-0.1, -0.1, -0.1]).bootstrap is None


@pytest.mark.parametrize("values", [[], [0.1], [0.1, math.nan]])
def test_bootstrap_refuses_what_has_no_interval(values: list[float]) -> None:
    with pytest.raises(StudyError, match="at least 2 finite numbers"):
        bootstrap_interval(values)


def test_a_shared_error_is_that_of_an_unpaired_second_sample() -> None:
    # Welch's test: the mean of the second sample is an error that all members of the first share.
    first, second = np.array(VARIED), np.array([0.3, -0.25, 0.1, -0.15])
    theirs: Any = stats.ttest_ind(first, second, equal_var=False)
    low, high = theirs.confidence_interval(0.95)
    ours = paired_test((first - second.mean()).tolist(), shared=SharedError(float(second.var(ddof=1)) / 4, 3))
    assert ours.p == pytest.approx(theirs.pvalue, rel=1e-9)
    assert (ours.low, ours.high) == pytest.approx((low, high), rel=1e-9)


@given(st.floats(0, 1), st.floats(1, 30), st.sampled_from([2, 3, 6]))
def test_a_shared_error_never_adds_confidence(variance: float, df: float, n: int) -> None:
    alone, shared = paired_test(VARIED[:n]), paired_test(VARIED[:n], shared=SharedError(variance, df))
    assert shared.p >= alone.p
    assert shared.low <= alone.low and shared.high >= alone.high
    assert (shared.p <= 0.05) == (shared.high < 0 or shared.low > 0)


def test_a_shared_error_counts_in_verdict_and_power() -> None:
    alone = compare({"arm": VARIED, "other": VARIED}, 0.05, 0.05)
    shared = compare({"arm": VARIED, "other": VARIED}, 0.05, 0.05, shared={"arm": SharedError(0.04, 10)})
    assert shared["other"] == alone["other"]
    assert (alone["arm"].verdict, shared["arm"].verdict) == ("better", "undecided")
    assert shared["arm"].test.spread == pytest.approx(math.sqrt(alone["arm"].test.sd ** 2 + 6 * 0.04))
    assert shared["arm"].power == pytest.approx(power(6, 0.05, shared["arm"].test.spread, 0.025))
    assert (shared["arm"].replicates_needed or 0) > (alone["arm"].replicates_needed or 0)
