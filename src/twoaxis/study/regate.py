"""The gate of a report that was written before there was one, from the runs that the report itself records."""

from collections.abc import Mapping
from typing import Any

from twoaxis.model import DecoderConfig
from twoaxis.statistics import compare
from twoaxis.study import headline
from twoaxis.study.baselines import Baselines, measure_baselines
from twoaxis.study.charges import comparison_data
from twoaxis.study.gate import equals_at_start, fallen_arms, judge, obstacle
from twoaxis.study.report_data import ArmData, ComparisonData, ContrastData, GateData, ReportData
from twoaxis.train.recipe import TrainConfig

TIMED_ONCE = "seconds were measured before the runs only"

NOT_KEPT = "the report kept no interval of the verdict"


def with_gate(report: ReportData, baselines: Baselines | None = None) -> ReportData:
    """A report with its gate, the intervals of its verdicts, and no verdict that the gate withholds.

    Comparisons at equal FLOPs and seconds lose their verdicts: a report of then kept neither the error of the control's curve,
    which their intervals need, nor a second timing.

    Args:
        report: that has no gate.
        baselines: of its control's runs; None measures them.
    """
    runs = [run for run in report.runs if run.role == "control" and run.status == "finished"]
    recipes = {run.seed: TrainConfig.from_record(run.recipe) for run in runs}
    if baselines is None:
        baselines = measure_baselines(recipes, {run.seed: run.data for run in runs})
    gate = _gate(report, recipes, baselines)
    family = _family(report)
    arms = {name: arm if arm.control else _arm(report, name, arm, gate, family) for name, arm in report.arms.items()}
    contrasts = tuple(_contrast(one, gate, family) for one in report.contrasts)
    timing = None if report.timing is None else report.timing.replace(sentence=TIMED_ONCE)
    gated = report.replace(gate=gate, arms=arms, contrasts=contrasts, timing=timing)
    return gated.replace(answer=headline.answer(gated), findings=headline.findings(gated))


def _gate(report: ReportData, recipes: Mapping[int, TrainConfig], baselines: Baselines) -> GateData:
    control = report.arms[report.control]
    losses = {name: {int(seed): loss for seed, loss in arm.losses.items()} for name, arm in report.arms.items()}
    seeds = sorted(losses[report.control])
    models = {run.arm: run.recipe["model"] for run in report.runs if run.recipe}
    equal = [name for name in models if name in losses and name != report.control and _equal(models, name, report.control)]
    fallen = fallen_arms(losses, report.control, seeds, equal)
    accuracies = {int(seed): accuracy for seed, accuracy in control.accuracies.items()}
    first = recipes[min(recipes)] if recipes else TrainConfig.from_record(report.runs[0].recipe)
    return judge(baselines, losses[report.control], accuracies, control.replicates_planned, fallen, first)


def _equal(models: Mapping[str, Mapping[str, Any]], arm: str, control: str) -> bool:
    one, other = (DecoderConfig.from_record({**models[name], "vocab_size": 1}) for name in (arm, control))
    return equals_at_start(one, other)


def _family(report: ReportData) -> dict[str, ComparisonData]:
    """All comparisons at equal tokens that the report asks about, decided as one family; a contrast by both names."""
    asked = {name: arm for name, arm in report.arms.items() if arm.role == "treatment"}
    found = {name: one.comparison for name, arm in asked.items() if (one := arm.charged.get("tokens")) and one.comparison}
    found |= {f"{one.arm} {one.against}": one.comparison for one in report.contrasts if one.comparison is not None}
    rule = report.design["decision"]
    size = len(asked) + len({(one.arm, one.against) for one in report.contrasts})
    differences = {name: one.paired_differences for name, one in found.items()}
    compared = compare(differences, rule.get("alpha", 0.05), rule["smallest_effect"], size) if differences else {}
    return {name: comparison_data(one) for name, one in compared.items()}


def _arm(report: ReportData, name: str, arm: ArmData, gate: GateData, family: Mapping[str, ComparisonData]) -> ArmData:
    why, charged = obstacle(gate, name), {}
    for charge, found in arm.charged.items():
        reason = why or ("" if charge == "tokens" else NOT_KEPT)
        comparison = found.comparison
        if charge == "tokens" and name in family:
            comparison = family[name]
        if comparison is not None and (reason or arm.role == "companion"):
            comparison = comparison.withheld()
        charged[charge] = found.replace(comparison=comparison, unavailable=found.unavailable or (comparison and reason) or "")
    decisive = charged.get(report.charge)
    verdict = decisive.comparison.verdict if decisive and decisive.comparison else None
    no_verdict = "" if verdict else arm.no_verdict or why or (decisive.unavailable if decisive else "")
    sentence = arm.sentence if verdict == arm.verdict else f"{name}: no verdict, {no_verdict}."
    return arm.replace(charged=charged, verdict=verdict, no_verdict=no_verdict, sentence=sentence)


def _contrast(one: ContrastData, gate: GateData, family: Mapping[str, ComparisonData]) -> ContrastData:
    why = one.no_verdict or obstacle(gate, one.arm) or obstacle(gate, one.against)
    found = family.get(f"{one.arm} {one.against}")
    if found is None or not why:
        return one.replace(comparison=found)
    sentence = f"{one.arm} against {one.against}: no verdict, {why}."
    return one.replace(comparison=found.withheld(), no_verdict=why, sentence=sentence)
