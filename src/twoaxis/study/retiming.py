"""Seconds of steps measured a second time, after the last run: whether both timings agree, and both as one."""

import math

from scipy.special import stdtrit

from twoaxis.study.folder import StudyFolder, places
from twoaxis.study.plan import StudyPlan
from twoaxis.study.timing import Timer, Timing

DISAGREE = 0.05
"""The chance that two timings of the same arms are found to disagree although nothing but their error differs."""

SAME_MACHINE = ("platform", "device", "device_name", "threads")

ENDED = ("finished", "diverged")

_ROUNDING = 1e-9


def time_again(folder: StudyFolder, timer: Timer) -> bool:
    """Measures the seconds of a study again once all its runs have ended; returns whether it did.

    Args:
        folder: of a study whose plan holds the first timing.
        timer: measures recipes in rounds, as before the first run.
    """
    plan = folder.plan
    if plan.timing is None or folder.timing_after is not None:
        return False
    if any(folder.record(place).status not in ENDED for place in places(plan)):
        return False
    arms = [plan.arm(name) for name in plan.timing.seconds]
    folder.keep_timing_after(timer({arm.name: folder.recipe_of(arm, arm.seeds[0]) for arm in arms}))
    return True


def disagreement(before: Timing, after: Timing, control: str) -> dict[str, float]:
    """The arms whose seconds over the control's changed by more than the errors of both timings, with the factor.

    Equation: |r_after - r_before| > t sqrt(e_before^2 + e_after^2) with r the logarithm of the ratio, e its standard error, and
    t the quantile of Student's t at 1 - 0.05 / (2 m) for m arms, with one degree of freedom fewer than rounds.

    Args:
        before: the first runs.
        after: the last one.
        control: the arm that seconds are divided by.
    """
    arms = [arm for arm in before.seconds if arm != control and arm in after.seconds]
    found = {}
    for arm in arms:
        (first, error), (second, other) = before.log_ratio(arm, control), after.log_ratio(arm, control)
        df = max(1, min(before.rounds, after.rounds) - 1)
        limit = float(stdtrit(df, 1 - DISAGREE / (2 * len(arms)))) * math.hypot(error, other)
        if abs(second - first) > limit + _ROUNDING:
            found[arm] = math.exp(second - first)
    return found


def pooled(before: Timing, after: Timing) -> Timing:
    """Both timings as one with the rounds of both."""
    seconds = {arm: (*times, *after.seconds.get(arm, ())) for arm, times in before.seconds.items()}
    return before.replace(seconds=seconds)


def timing_words(plan: StudyPlan, after: Timing | None) -> tuple[bool | None, str]:
    """Whether the timings before and after the runs agree, and the same in words; None while there is only one.

    Args:
        plan: with the first timing.
        after: the second.
    """
    if plan.timing is None:
        return None, "seconds were not measured"
    if after is None:
        return None, "seconds were measured before the runs only; run the study again to measure them after the runs"
    here, there = ([one.environment.get(key) for key in SAME_MACHINE] for one in (plan.timing, after))
    if here != there:
        return False, "seconds before and after the runs were measured on different machines"
    found = disagreement(plan.timing, after, plan.control.name)
    if found:
        changed = ", ".join(f"{arm} by a factor of {factor:.3f}" for arm, factor in found.items())
        return False, f"seconds before and after the runs disagree by more than their error: {changed}"
    return True, "seconds before and after the runs agree within their error"
