"""The comparisons of a study: arms with the control at equal tokens, FLOPs or seconds, and contrasts, decided as one family.

A companion is compared with its arm (a contrast); against the control it gets numbers and no verdict.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from twoaxis.core.errors import StudyError
from twoaxis.display import numbers as words
from twoaxis.statistics import Comparison, SharedError, compare
from twoaxis.study.design.rules import DecisionConfig
from twoaxis.study.planning.study_plan import EQUAL, PlannedArm, PlannedContrast, StudyPlan
from twoaxis.study.report_data import UNITS, Charge, ComparisonData, CurveData, EqualCostData, PointData
from twoaxis.study.statistics.control_curve import (
    ControlCurve,
    EqualCostDifferences,
    OutOfRange,
    differences_at_equal_cost,
    fit_control_curve,
)

LINE_POINTS = 40
"""Points of the fitted curve in the report, for drawing."""

Losses = Mapping[str, Mapping[int, float]]
"""Validation losses of finished runs, by arm and seed."""


@dataclass(frozen=True)
class ControlCosts:
    """The losses of the control at all of its budgets, by one kind of cost.

    Attributes:
        charge: the kind of cost.
        budget: cost of the control itself; None for seconds that were not measured.
        curve: fitted to its losses; None with one budget, or while it cannot be fitted.
        why: reason for having no curve, or "".
        points: loss by seed and cost.
    """

    charge: Charge
    budget: float | None
    curve: ControlCurve | None = None
    why: str = ""
    points: dict[int, dict[float, float]] = field(default_factory=dict)

    def data(self) -> CurveData:
        """Converts to the form of the report."""
        found = [(seed, cost, loss) for seed, losses in self.points.items() for cost, loss in sorted(losses.items())]
        if self.curve is None:
            bare = tuple(PointData(seed=seed, cost=cost, loss=loss) for seed, cost, loss in found)
            return CurveData(points=bare, sentence=f"No curve: {self.why}.")
        curve = self.curve
        residuals = {(point.seed, point.cost): point.residual for point in curve.points}
        low, high = math.log(curve.low), math.log(curve.high)
        costs = [math.exp(low + (high - low) * i / (LINE_POINTS - 1)) for i in range(LINE_POINTS)]
        # Rounding must not move the ends outside the measured range.
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
    """Fits the loss of the control over its cost, where the design has several budgets."""
    budget = plan.cost_of(plan.control, charge)
    budgets = (plan.control, *plan.of_role("rung"))
    if budget is None:
        return ControlCosts(charge, None, why="seconds were not measured")
    points: dict[int, dict[float, float]] = {}
    for arm in budgets:
        cost = plan.cost_of(arm, charge)
        for seed, loss in losses.get(arm.name, {}).items():
            if cost is not None:
                points.setdefault(seed, {})[cost] = loss
    if len(budgets) == 1:
        why = "the design gives the control one budget only, so its loss at another cost is not known (budget.ladder)"
        return ControlCosts(charge, budget, why=why, points=points)
    missing = sum(len(arm.seeds) - len(losses.get(arm.name, {})) for arm in budgets)
    if missing:
        why = f"{missing} runs of the control at its budgets have not finished, or are no pairs"
        return ControlCosts(charge, budget, why=why, points=points)
    try:
        return ControlCosts(charge, budget, fit_control_curve(points, budget), points=points)
    except StudyError as error:
        return ControlCosts(charge, budget, why=str(error), points=points)


@dataclass(frozen=True)
class InputsAtEqualCost:
    """Inputs of the comparison of arms with the control at equal cost.

    Attributes:
        found: cost of each arm, with the reason if it cannot be compared.
        differences: arm minus control by seed, of arms that can be compared.
        shared: error common to all replicates of an arm, where there is one.
    """

    found: dict[str, EqualCostData]
    differences: dict[str, list[float]]
    shared: dict[str, SharedError]


def inputs_at_equal_cost(
    plan: StudyPlan, losses: Losses, reasons: Mapping[str, str], arms: Sequence[PlannedArm], control: ControlCosts
) -> InputsAtEqualCost:
    """Prepares the comparison of arms with the control at equal cost; `reasons` say why an arm cannot be compared, or ""."""
    inputs = InputsAtEqualCost({}, {}, {})
    for arm in arms:
        cost = plan.cost_of(arm, control.charge)
        ratio = plan.cost_ratio(arm, control.charge)
        why, values, error = reasons[arm.name], {}, None
        if not why:
            why, values, error = _differences(plan, arm, losses, control)
            if error is not None and control.charge == "seconds" and control.curve is not None and cost is not None:
                error = _with_timing_error(plan, arm, control.curve, cost, error)
        inputs.found[arm.name] = EqualCostData(cost=cost, cost_ratio=ratio, unavailable=why)
        if not why:
            inputs.differences[arm.name] = [values[seed] for seed in arm.seeds]
        if error is not None:
            inputs.shared[arm.name] = error
    return inputs


def _differences(
    plan: StudyPlan, arm: PlannedArm, losses: Losses, control: ControlCosts
) -> tuple[str, dict[int, float], SharedError | None]:
    own, other = losses[arm.name], losses[plan.control.name]
    cost, ratio = plan.cost_of(arm, control.charge), plan.cost_ratio(arm, control.charge)
    if cost is None or ratio is None:
        return "seconds were not measured", {}, None
    direct = {seed: loss - other[seed] for seed, loss in own.items()}
    if abs(ratio - 1) < EQUAL:
        return "", direct, None
    found = control.why if control.curve is None else differences_at_equal_cost(control.curve, own, other, cost)
    if isinstance(found, EqualCostDifferences):
        return "", found.differences, found.shared
    if plan.is_matched(arm, control.charge):
        # As equal as whole steps and sizes allow.
        return "", direct, None
    if isinstance(found, str):
        return found, {}, None
    return (
        f"takes {words.ratio(ratio)} the {UNITS[control.charge]} of the control, {multiple_text(found)}, outside the "
        "budgets that the control was run at; nothing is extrapolated",
        {},
        None,
    )


def _with_timing_error(plan: StudyPlan, arm: PlannedArm, curve: ControlCurve, cost: float, error: SharedError) -> SharedError:
    """Adds the error of the arm's seconds to that of the curve; both are common to all replicates.

    Equation: (dL/dlog C)^2 se^2 with dL/dlog C = -A alpha (C / C_0)^-alpha, and Satterthwaite's degrees of freedom.
    """
    slope = curve.amplitude * curve.exponent * (cost / curve.budget) ** -curve.exponent
    own = (slope * plan.log_seconds_error(arm)) ** 2
    total = error.variance + own
    if plan.timing is None or total == 0:
        return error
    return SharedError(total, total**2 / (error.variance**2 / error.df + own**2 / max(1, plan.timing.rounds - 1)))


def comparison_data(comparison: Comparison) -> ComparisonData:
    """Converts a comparison to the form of the report."""
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


def multiple_text(value: float | OutOfRange) -> str:
    """Formats a multiple of a cost."""
    return str(value).replace("x", words.TIMES) if isinstance(value, OutOfRange) else words.ratio(value)


def _fit_words(curve: ControlCurve, charge: Charge) -> str:
    budgets = len({point.cost for point in curve.points})
    exponent = f"exponent {curve.exponent:.2f}" + (
        ", an end of the range that was searched, so that it describes this range only" if curve.exponent_at_bound else ""
    )
    return (
        f"The control at {budgets} budgets of {UNITS[charge]}, each a whole schedule of its own, {len(curve.offsets)} seeds "
        f"each: one falling power law ({exponent}) with an offset per seed leaves {words.loss(curve.residual_sd)} nats per "
        f"token (standard deviation of the residuals, {curve.df} degrees of freedom)."
    )


COMPANION = "a companion is compared with its arm"
"""Reason for no verdict of a companion against the control."""


@dataclass(frozen=True)
class Obstacles:
    """Reasons for having no comparison or no verdict; each is "" where there is none.

    Attributes:
        missing: by arm, why it cannot be compared.
        untrained: by arm, why it gets no verdict although its runs have finished.
        seconds: why there is no verdict at equal seconds.
    """

    missing: Mapping[str, str]
    untrained: Mapping[str, str]
    seconds: str = ""


@dataclass(frozen=True)
class Comparisons:
    """The comparisons of a study.

    Attributes:
        charged: of every arm with the control, by arm and kind of equal cost.
        contrasts: of two arms, by both names.
    """

    charged: dict[str, dict[Charge, EqualCostData]]
    contrasts: dict[tuple[str, str], ComparisonData]


def family_size(plan: StudyPlan) -> int:
    """The number of comparisons corrected together."""
    return len(plan.of_role("treatment")) + len({(one.arm, one.against) for one in plan.contrasts})


def decide(
    plan: StudyPlan, losses: Losses, obstacles: Obstacles, curves: Mapping[Charge, ControlCosts], rule: DecisionConfig
) -> Comparisons:
    """Makes all comparisons, with a verdict for each planned one without an obstacle.

    Contrasts are corrected in the family of the kind of cost that the rule names.
    """
    size, charged = family_size(plan), {arm.name: {} for arm in plan.of_role("treatment", "companion")}
    contrasts: dict[tuple[str, str], ComparisonData] = {}
    for charge, curve in curves.items():
        treatments = inputs_at_equal_cost(plan, losses, obstacles.missing, plan.of_role("treatment"), curve)
        companions = inputs_at_equal_cost(plan, losses, obstacles.missing, plan.of_role("companion"), curve)
        differences = _contrasts(plan, losses, obstacles, charge)
        family = {**treatments.differences, **{f"{arm} {against}": d for (arm, against), d in differences.items()}}
        decided = compare(family, rule.alpha, rule.smallest_effect, size, treatments.shared) if family else {}
        alone = companions.differences
        descriptive = compare(alone, rule.alpha, rule.smallest_effect, len(alone), companions.shared) if alone else {}
        for name, one in {**treatments.found, **companions.found}.items():
            if name in decided:
                charged[name][charge] = _with_verdict(one, comparison_data(decided[name]), charge, obstacles, name)
            elif name in descriptive:
                data = comparison_data(descriptive[name]).withheld().replace(family=0, simultaneous=None)
                charged[name][charge] = one.replace(comparison=data, unavailable=COMPANION)
            else:
                charged[name][charge] = one
        if charge == rule.charge:
            contrasts = {pair: comparison_data(decided[f"{pair[0]} {pair[1]}"]) for pair in differences}
    return Comparisons(charged, contrasts)


def contrast_obstacle(plan: StudyPlan, obstacles: Obstacles, one: PlannedContrast, charge: Charge) -> str:
    """The reason for no verdict of a contrast at equal cost, or ""."""
    for name in (one.arm, one.against):
        for why in (obstacles.missing.get(name, ""), obstacles.untrained.get(name, "")):
            if why:
                return why if name == one.arm else f"{name}: {why}"
    return plan.unequal(one, charge) or (obstacles.seconds if one.matched == "seconds" else "")


def _with_verdict(one: EqualCostData, found: ComparisonData, charge: Charge, obstacles: Obstacles, name: str) -> EqualCostData:
    why = obstacles.untrained.get(name, "") or (obstacles.seconds if charge == "seconds" else "")
    return one.replace(comparison=found.withheld() if why else found, unavailable=why)


def _contrasts(plan: StudyPlan, losses: Losses, obstacles: Obstacles, charge: Charge) -> dict[tuple[str, str], list[float]]:
    return {
        (one.arm, one.against): [losses[one.arm][seed] - losses[one.against][seed] for seed in plan.arm(one.arm).seeds]
        for one in plan.contrasts
        if not (obstacles.missing.get(one.arm) or obstacles.missing.get(one.against) or plan.unequal(one, charge))
    }
