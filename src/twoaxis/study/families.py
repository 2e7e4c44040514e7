"""The family of comparisons of a study: its arms against the control, and its contrasts, corrected together.

A companion against the control is no question of a study, so it gets numbers and no verdict; its contrast is one.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from twoaxis.statistics import compare
from twoaxis.study.charges import ControlCosts, Losses, charged_inputs, comparison_data
from twoaxis.study.plan import StudyPlan
from twoaxis.study.report_data import Charge, ChargedData, ComparisonData
from twoaxis.study.rules import DecisionConfig

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
        treatments = charged_inputs(plan, losses, obstacles.missing, plan.of_role("treatment"), curve)
        companions = charged_inputs(plan, losses, obstacles.missing, plan.of_role("companion"), curve)
        family = {**treatments.differences, **{f"{arm} {against}": d for (arm, against), d in differences.items()}}
        asked = compare(family, rule.alpha, rule.smallest_effect, size, treatments.shared) if family else {}
        beside = companions.differences
        unasked = compare(beside, rule.alpha, rule.smallest_effect, len(beside), companions.shared) if beside else {}
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
