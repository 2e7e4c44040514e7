"""The comparisons of a study: arms with the control at equal tokens, FLOPs or seconds, and contrasts, decided as one family.

A companion against the control is no question of a study, so it gets numbers and no verdict; its contrast is one.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from twoaxis.core.errors import StudyError
from twoaxis.display import numbers as words
from twoaxis.statistics import Comparison, SharedError, compare
from twoaxis.study.design.rules import DecisionConfig
from twoaxis.study.planning.plan import PlannedArm, StudyPlan
from twoaxis.study.report_data import (
    Charge,
    ChargedData,
    ComparisonData,
    CurveData,
    PointData,
)
from twoaxis.study.statistics.control_curve import ControlCurve, OutOfRange, differences_at_equal_cost, fit_control_curve

EQUAL = 1e-9
"""Costs that differ by less than this fraction are equal, and losses are then compared as they are."""

LINE_POINTS = 40
"""Points of the fitted curve that are kept for drawing."""

Losses = Mapping[str, Mapping[int, float]]
"""Validation losses of finished runs, by arm and seed."""


def cost_of(plan: StudyPlan, arm: PlannedArm, charge: Charge) -> float | None:
    """What one run of an arm takes; None for seconds that were not measured."""
    return {"tokens": float(arm.tokens), "flops": arm.flops, "seconds": plan.seconds_of(arm)}[charge]


@dataclass(frozen=True)
class ControlCosts:
    """The control at all of its budgets, by one charge.

    Attributes:
        charge: the unit.
        budget: what the control itself takes; None for seconds that were not measured.
        curve: fitted to its losses; None with one budget, or while it cannot be fitted.
        why: there is no curve, in words; "" with one.
        points: loss by seed and cost.
    """

    charge: Charge
    budget: float | None
    curve: ControlCurve | None = None
    why: str = ""
    points: dict[int, dict[float, float]] = field(default_factory=dict)

    def data(self) -> CurveData:
        """The same for the report."""
        found = [(seed, cost, loss) for seed, losses in self.points.items() for cost, loss in sorted(losses.items())]
        if self.curve is None:
            bare = tuple(PointData(seed=seed, cost=cost, loss=loss) for seed, cost, loss in found)
            return CurveData(points=bare, sentence=f"No curve: {self.why}.")
        curve = self.curve
        residuals = {(point.seed, point.cost): point.residual for point in curve.points}
        low, high = math.log(curve.low), math.log(curve.high)
        costs = [math.exp(low + (high - low) * i / (LINE_POINTS - 1)) for i in range(LINE_POINTS)]
        # Rounding must not carry the ends outside the measured range, where the curve says nothing.
        means = [(cost, curve.mean_loss(min(max(cost, curve.low), curve.high))) for cost in costs]
        return CurveData(
            points=tuple(
                PointData(seed=seed, cost=cost, loss=loss, residual=residuals.get((seed, cost))) for seed, cost, loss in found
            ),
            amplitude=curve.amplitude,
            exponent=curve.exponent,
            residual_sd=curve.residual_sd,
            line=tuple((cost, mean) for cost, mean in means if not isinstance(mean, OutOfRange)),
            sentence=_fit_words(curve, self.charge),
        )


def control_costs(plan: StudyPlan, losses: Losses, charge: Charge) -> ControlCosts:
    """Fits the loss of the control to what it was given, where the design gave it several budgets."""
    budget = cost_of(plan, plan.control, charge)
    budgets = (plan.control, *plan.of_role("rung"))
    if budget is None:
        return ControlCosts(charge, None, why="seconds were not measured")
    points: dict[int, dict[float, float]] = {}
    for arm in budgets:
        cost = cost_of(plan, arm, charge)
        for seed, loss in losses.get(arm.name, {}).items():
            if cost is not None:
                points.setdefault(seed, {})[cost] = loss
    if len(budgets) == 1:
        why = "the design gives the control one budget only, so its loss at another cost is not known (budget.ladder)"
        return ControlCosts(charge, budget, why=why, points=points)
    missing = sum(len(arm.seeds) - len(losses.get(arm.name, {})) for arm in budgets)
    if missing:
        why = f"{missing} runs of the control at its budgets have not finished"
        return ControlCosts(charge, budget, why=why, points=points)
    try:
        return ControlCosts(charge, budget, fit_control_curve(points, budget), points=points)
    except StudyError as error:
        return ControlCosts(charge, budget, why=str(error), points=points)


@dataclass(frozen=True)
class InputsAtEqualCost:
    """What a comparison with the control at equal cost rests on.

    Attributes:
        found: cost of each arm, and why it cannot be compared.
        differences: of the arms that can be, arm minus control in the order of the seeds.
        shared: the error that all replicates of an arm have in common, where there is one.
    """

    found: dict[str, ChargedData]
    differences: dict[str, list[float]]
    shared: dict[str, SharedError]


def inputs_at_equal_cost(
    plan: StudyPlan, losses: Losses, reasons: Mapping[str, str], arms: Sequence[PlannedArm], control: ControlCosts
) -> InputsAtEqualCost:
    """Prepares the comparison of some arms with the control at equal cost.

    Args:
        plan: of the study.
        losses: of finished runs.
        reasons: why an arm cannot be compared at all, by name; "" where it can.
        arms: to compare.
        control: its budgets, by the charge.
    """
    inputs = InputsAtEqualCost({}, {}, {})
    for arm in arms:
        cost = cost_of(plan, arm, control.charge)
        ratio = cost / control.budget if cost is not None and control.budget else None
        why, values, error = reasons[arm.name], {}, None
        if not why:
            why, values, error = _differences(losses[arm.name], losses[plan.control.name], cost, ratio, control)
            if error is not None and control.charge == "seconds" and control.curve is not None and cost is not None:
                error = _with_timing_error(plan, arm, control.curve, cost, error)
        inputs.found[arm.name] = ChargedData(cost=cost, cost_ratio=ratio, unavailable=why)
        if not why:
            inputs.differences[arm.name] = [values[seed] for seed in arm.seeds]
        if error is not None:
            inputs.shared[arm.name] = error
    return inputs


def _differences(
    arm: Mapping[int, float], other: Mapping[int, float], cost: float | None, ratio: float | None, control: ControlCosts
) -> tuple[str, dict[int, float], SharedError | None]:
    if cost is None or ratio is None:
        return "seconds were not measured", {}, None
    if abs(ratio - 1) < EQUAL:
        return "", {seed: loss - other[seed] for seed, loss in arm.items()}, None
    if control.curve is None:
        return control.why, {}, None
    found = differences_at_equal_cost(control.curve, arm, other, cost)
    if isinstance(found, OutOfRange):
        return (
            f"takes {words.ratio(ratio)} the {unit(control.charge)} of the control, {times(found)}, outside the "
            "budgets that the control was run at; nothing is extrapolated",
            {},
            None,
        )
    return "", found.differences, found.shared


def _with_timing_error(plan: StudyPlan, arm: PlannedArm, curve: ControlCurve, cost: float, error: SharedError) -> SharedError:
    """The error of the curve together with that of the arm's seconds, which all replicates have in common too.

    Equation: (dL/dlog C)^2 se^2 with dL/dlog C = -A alpha (C / C_0)^-alpha, and Satterthwaite's degrees of freedom.
    """
    slope = curve.amplitude * curve.exponent * (cost / curve.budget) ** -curve.exponent
    own = (slope * plan.log_seconds_error(arm)) ** 2
    total = error.variance + own
    if plan.timing is None or total == 0:
        return error
    return SharedError(total, total**2 / (error.variance**2 / error.df + own**2 / max(1, plan.timing.rounds - 1)))


def comparison_data(comparison: Comparison) -> ComparisonData:
    """A comparison of a family for the report."""
    test = comparison.test
    return ComparisonData(
        paired_differences=test.differences,
        mean_difference=test.mean,
        sd_difference=test.sd,
        ci95=(test.low, test.high) if test.varies else None,
        bootstrap95=test.bootstrap,
        p=test.p,
        p_holm=comparison.p_holm,
        power=comparison.power,
        replicates_needed=comparison.replicates_needed,
        verdict=comparison.verdict,
        family=comparison.family,
        simultaneous=comparison.simultaneous,
        suggestive=comparison.suggestive,
    )


def times(value: float | OutOfRange) -> str:
    """A multiple of a cost in words."""
    return str(value).replace("x", words.TIMES) if isinstance(value, OutOfRange) else words.ratio(value)


def unit(charge: Charge) -> str:
    """The unit of a cost in words."""
    return {"tokens": "tokens", "flops": "FLOPs", "seconds": "seconds"}[charge]


def _fit_words(curve: ControlCurve, charge: Charge) -> str:
    budgets = len({point.cost for point in curve.points})
    exponent = f"exponent {curve.exponent:.2f}" + (
        ", an end of the range that was searched, so that it describes this range only" if curve.exponent_at_bound else ""
    )
    return (
        f"The control at {budgets} budgets of {unit(charge)}, each a whole schedule of its own, {len(curve.offsets)} seeds "
        f"each: one falling power law ({exponent}) with an offset per seed leaves {words.loss(curve.residual_sd)} nats per "
        f"token (standard deviation of the residuals, {curve.df} degrees of freedom)."
    )


NOT_ASKED = "a companion is compared with its arm"
"""Why a companion has no verdict against the control."""


@dataclass(frozen=True)
class Obstacles:
    """What stands between numbers and a verdict.

    Attributes:
        missing: why an arm cannot be compared at all, by name; "" where it can.
        untrained: why an arm gets no verdict although its runs are there, by name; "" where it does.
        seconds: why there is no verdict at equal seconds; "" where there is.
    """

    missing: Mapping[str, str]
    untrained: Mapping[str, str]
    seconds: str = ""


@dataclass(frozen=True)
class Decided:
    """The comparisons of a study.

    Attributes:
        charged: of every arm with the control, by what both are given equally much of.
        contrasts: of an arm with another, by both names.
    """

    charged: dict[str, dict[Charge, ChargedData]]
    contrasts: dict[tuple[str, str], ComparisonData]


def family_size(plan: StudyPlan) -> int:
    """Comparisons that a study corrects together."""
    return len(plan.of_role("treatment")) + len({(one.arm, one.against) for one in plan.contrasts})


def decide(
    plan: StudyPlan, losses: Losses, obstacles: Obstacles, curves: Mapping[Charge, ControlCosts], rule: DecisionConfig
) -> Decided:
    """Makes all comparisons, with a verdict for each that the study asks for and nothing stands against.

    Args:
        plan: of the study.
        losses: of finished runs.
        obstacles: what stands against a comparison or a verdict.
        curves: the control at its budgets, by charge.
        rule: the decision rule; contrasts are those of the charge that decides.
    """
    size, charged = family_size(plan), {arm.name: {} for arm in plan.of_role("treatment", "companion")}
    differences = _contrasts(plan, losses, obstacles)
    contrasts: dict[tuple[str, str], ComparisonData] = {}
    for charge, curve in curves.items():
        treatments = inputs_at_equal_cost(plan, losses, obstacles.missing, plan.of_role("treatment"), curve)
        companions = inputs_at_equal_cost(plan, losses, obstacles.missing, plan.of_role("companion"), curve)
        family = {**treatments.differences, **{f"{arm} {against}": d for (arm, against), d in differences.items()}}
        asked = compare(family, rule.alpha, rule.smallest_effect, size, treatments.shared) if family else {}
        alone = companions.differences
        unasked = compare(alone, rule.alpha, rule.smallest_effect, len(alone), companions.shared) if alone else {}
        for name, one in {**treatments.found, **companions.found}.items():
            if name in asked:
                charged[name][charge] = _with_verdict(one, comparison_data(asked[name]), charge, obstacles, name)
            elif name in unasked:
                data = comparison_data(unasked[name]).withheld().replace(family=0, simultaneous=None)
                charged[name][charge] = one.replace(comparison=data, unavailable=NOT_ASKED)
            else:
                charged[name][charge] = one
        if charge == rule.charge:
            contrasts = {pair: comparison_data(asked[f"{pair[0]} {pair[1]}"]) for pair in differences}
    return Decided(charged, contrasts)


def contrast_obstacle(obstacles: Obstacles, arm: str, against: str, matched: str) -> str:
    """Why a contrast gets no verdict; "" where it does."""
    for name in (arm, against):
        for why in (obstacles.missing.get(name, ""), obstacles.untrained.get(name, "")):
            if why:
                return why if name == arm else f"{name}: {why}"
    return obstacles.seconds if matched == "seconds" else ""


def _with_verdict(one: ChargedData, found: ComparisonData, charge: Charge, obstacles: Obstacles, name: str) -> ChargedData:
    why = obstacles.untrained.get(name, "") or (obstacles.seconds if charge == "seconds" else "")
    return one.replace(comparison=found.withheld() if why else found, unavailable=why)


def _contrasts(plan: StudyPlan, losses: Losses, obstacles: Obstacles) -> dict[tuple[str, str], list[float]]:
    return {
        (one.arm, one.against): [losses[one.arm][seed] - losses[one.against][seed] for seed in plan.arm(one.arm).seeds]
        for one in plan.contrasts
        if not obstacles.missing.get(one.arm) and not obstacles.missing.get(one.against)
    }
