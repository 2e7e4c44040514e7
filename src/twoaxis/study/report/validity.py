"""Conditions of a verdict: the control was trained, the arm did not fall behind it, and compared runs are pairs."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from twoaxis.core.parameters import Init, declarations
from twoaxis.display import numbers as words
from twoaxis.local import LocalConfig
from twoaxis.model import Decoder, DecoderConfig
from twoaxis.sequence import SequenceConfig
from twoaxis.statistics import compare
from twoaxis.study.planning.study_plan import StudyPlan
from twoaxis.study.report.answer import answer, findings
from twoaxis.study.report_data import ArmData, ComparisonData, ContrastData, GateData, ReportData
from twoaxis.study.running.baselines import Baselines, SeedBaselines, measure_baselines
from twoaxis.study.running.study_folder import RunKey, RunRecord
from twoaxis.study.statistics import comparison_data
from twoaxis.train.recipe import TrainConfig
from twoaxis.train.run_folder import first_difference, other_recipe

UNTRAINED_CONTROL = "the control was not trained"
"""Reason for no verdict on any arm."""

UNKNOWN_GATE = "whether the control was trained is not known"

COMPARED = ("control", "treatment", "companion")
"""Roles of the arms that the gate judges."""

NOT_TRAINED = "not trained"
"""Reason for no verdict on a single arm."""


def judge(
    baselines: Baselines,
    losses: Mapping[str, Mapping[int, float]],
    control: str,
    accuracies: Mapping[int, float],
    planned: int,
    untrained: Mapping[str, Sequence[float]],
    recipe: TrainConfig,
) -> GateData:
    """Compares the control, and on text every arm, with the baselines in every replicate.

    Args:
        baselines: by seed, fitted to the control's tokens.
        losses: of the finished runs of all compared arms, by arm and seed.
        control: its name.
        accuracies: of its runs on the answers, for a synthetic task.
        planned: number of replicates.
        untrained: see `untrained_arms`.
        recipe: of the control, for advice.
    """
    own = losses.get(control, {})
    found = {seed: baselines.by_seed[seed] for seed in own if seed in baselines.by_seed}
    arms = {name: _behind(name, differences) for name, differences in untrained.items()}
    data = GateData(passed=None, sentence="", reasons=tuple(arms.values()), not_trained=tuple(arms))
    if not found:
        why = baselines.missing or ("no run of the control has finished" if not own else "no baselines were measured")
        return data.replace(sentence=f"Gate not decided: {why}.", change=_change(recipe) if arms else "")
    means = {
        key: statistics.fmean(values)
        for key in SeedBaselines.model_fields
        if (values := [v for one in found.values() if (v := getattr(one, key)) is not None]) and len(values) == len(found)
    }
    counted, mean = round(means.pop("counted")), statistics.fmean(own[seed] for seed in found)
    data = data.replace(**means, counted=counted, control=mean)
    if accuracies and set(found) <= set(accuracies):
        data = data.replace(control_accuracy=statistics.fmean(accuracies[seed] for seed in found))
    failed = [seed for seed, one in found.items() if not _beats(one, own[seed], accuracies.get(seed))]
    reasons = (_control_reason(data, failed, len(found)),) if failed else ()
    if not failed:
        arms = _beaten_by_bigram({name: losses[name] for name in losses if name != control}, found) | arms
    return data.replace(
        passed=not failed,
        sentence=_sentence(data, failed, len(found), planned),
        reasons=(*reasons, *arms.values()),
        change=_change(recipe) if failed or arms else "",
        not_trained=tuple(arms),
    )


def _beats(one: SeedBaselines, loss: float, accuracy: float | None) -> bool:
    if one.bigram is not None:
        return loss < one.bigram
    assert one.chance is not None and one.majority is not None
    return loss < one.chance and (accuracy is None or accuracy > one.majority)


def _sentence(data: GateData, failed: Sequence[int], n: int, planned: int) -> str:
    assert data.control is not None
    so_far = "" if n == planned else f" So far {n} of {planned} replicates."
    if data.bigram is None:
        rest = (
            f" and {_side(data.control, data.in_context, 'a uniform guess among the answers in the sample')}"
            if data.in_context
            else ""
        )
        right = "" if data.control_accuracy is None else f"; accuracy {words.percentage(data.control_accuracy)}"
        right += "" if data.majority is None or not right else f" against {words.percentage(data.majority)} for the majority"
        said = f"Control {data.control:.2f} nats, {_side(data.control, data.chance, 'chance')}{rest}{right}"
    else:
        bigram, trigram = _side(data.control, data.bigram, "the bigram"), _side(data.control, data.trigram, "the trigram")
        said = f"Control {data.control:.2f} nats, {bigram} and {trigram}"
    some = "" if not failed or len(failed) == n else f", but not in every replicate (seeds {', '.join(map(str, failed))} fail)"
    return f"{said}{some}{': not trained' if failed else ''}.{so_far}"


def _side(loss: float, baseline: float | None, name: str) -> str:
    assert baseline is not None
    digits = 2 if round(loss, 2) != round(baseline, 2) else 4
    return f"{'below' if loss < baseline else 'above'} {name} {baseline:.{digits}f}"


def _control_reason(data: GateData, failed: Sequence[int], n: int) -> str:
    what = "the bigram counted in its own training tokens" if data.bigram is not None else "a guess by chance or majority"
    return f"the control does not beat {what} in {len(failed)} of {words.replicates(n)}"


def _beaten_by_bigram(losses: Mapping[str, Mapping[int, float]], baselines: Mapping[int, SeedBaselines]) -> dict[str, str]:
    """The arms that do not beat the control's bigram in every replicate, each with the reason; none for a synthetic task."""
    found = {}
    for name, by_seed in losses.items():
        bigrams = {seed: one for seed in by_seed if (one := baselines.get(seed)) and one.bigram is not None}
        if failed := [seed for seed, one in bigrams.items() if not _beats(one, by_seed[seed], None)]:
            some = f"{len(failed)} of {words.replicates(len(bigrams))}"
            mean = statistics.fmean(by_seed[seed] for seed in bigrams)
            found[name] = f"{name} does not beat the control's bigram in {some} and ends at {mean:.2f} nats: not trained"
    return found


def _behind(name: str, differences: Sequence[float]) -> str:
    n = len(differences)
    return (
        f"{name} equals the control at step 0 and ends worse in all {words.replicates(n)}, by "
        f"{statistics.fmean(differences):.4f} nats on average: not trained"
    )


def _change(recipe: TrainConfig) -> str:
    """Advises on settings to leave the plateau sooner, with their present values."""
    warmup = recipe.schedule.warmup(recipe.steps)
    tokens = words.count(recipe.steps * recipe.batch_size * recipe.data.seq_len)
    return (
        f"Change the learning rate (now {recipe.optimizer.lr:g}; tuning.lr tries several for every arm), the budget (now "
        f"{tokens} tokens), the scale of the embedding, or the warm-up (now {warmup} steps)."
    )


def obstacle(gate: GateData, arm: str) -> str:
    """The reason for no verdict on an arm whose runs have finished, or ""."""
    if gate.passed is None:
        return UNKNOWN_GATE
    if not gate.passed:
        return UNTRAINED_CONTROL
    return NOT_TRAINED if arm in gate.not_trained else ""


def untrained_arms(
    losses: Mapping[str, Mapping[int, float]], control: str, seeds: Sequence[int], equal: Sequence[str]
) -> dict[str, list[float]]:
    """Finds the arms of `equal`, which equal the control at step 0 and take as many steps, that end worse in every replicate.

    Returns:
        Their paired differences.

    Example:
        >>> untrained_arms({"c": {0: 1.0, 1: 1.0}, "a": {0: 1.5, 1: 1.25}, "b": {0: 0.5, 1: 2.0}}, "c", (0, 1), ("a", "b"))
        {'a': [0.5, 0.25]}
    """
    found = {}
    for name in equal:
        own, other = losses.get(name, {}), losses.get(control, {})
        if all(seed in own and seed in other for seed in seeds):
            differences = [own[seed] - other[seed] for seed in seeds]
            if min(differences) > 0:
                found[name] = differences
    return found


def equals_at_start(arm: DecoderConfig, control: DecoderConfig) -> bool:
    """Whether both compute the same at step 0: exact along depth, and equal except for sublayers that add nothing yet.

    Example:
        >>> blocks = [[{"kind": "attention", "n_heads": 1}, "swiglu"]]
        >>> control = DecoderConfig(vocab_size=8, d_model=8, n_layers=2, blocks=blocks)
        >>> local = {"kind": "short_swa", "n_heads": 1, "output_init": "zero"}
        >>> equals_at_start(control.replace(blocks=[[local, *control.blocks[0]]]), control)
        True
        >>> equals_at_start(control.replace(depth="deep_delta"), control)
        False
    """
    exact = all(config.depth.init_equivalence.relation == "exact" for config in (arm, control))
    return exact and _at_start(arm) == _at_start(control)


def _at_start(config: DecoderConfig) -> dict[str, Any]:
    """The data of a decoder without its depth mixer and without sublayers that add nothing at step 0, block by block."""
    layers = [[_sublayer(part) for part in block if not _adds_nothing(part)] for block in config.layers]
    return {**config.to_data(), "depth": None, "blocks": layers}


def _adds_nothing(sublayer: Any) -> bool:
    return isinstance(sublayer, SequenceConfig) and sublayer.init_equivalence.relation == "exact"


def _sublayer(config: Any) -> dict[str, Any]:
    """The data of a sublayer without local mixers that start as the identity."""
    identities = [
        name
        for name in type(config).model_fields
        if isinstance(local := getattr(config, name), LocalConfig) and local.init_equivalence.relation == "exact"
    ]
    return {**config.to_data(), **dict.fromkeys(identities)}


TIMED_ONCE = "seconds were measured before the runs only"

NOT_KEPT = "the report kept no interval of the verdict"


def with_gate(report: ReportData, baselines: Baselines | None = None) -> ReportData:
    """Adds the validity gate and the intervals of verdicts to an old report, measuring baselines unless given.

    Comparisons at equal FLOPs and seconds lose their verdicts: old reports lack the error of the control's curve and the
    second timing.
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
    return gated.replace(answer=answer(gated), findings=findings(gated))


def _gate(report: ReportData, recipes: Mapping[int, TrainConfig], baselines: Baselines) -> GateData:
    control = report.arms[report.control]
    losses = {name: {int(seed): loss for seed, loss in arm.losses.items()} for name, arm in report.arms.items()}
    seeds = sorted(losses[report.control])
    models = {run.arm: run.recipe["model"] for run in report.runs if run.recipe}
    equal = [
        name
        for name in models
        if name in losses
        and name != report.control
        and report.arms[name].steps >= control.steps
        and _equal(models, name, report.control)
    ]
    untrained = untrained_arms(losses, report.control, seeds, equal)
    accuracies = {int(seed): accuracy for seed, accuracy in control.accuracies.items()}
    first = recipes[min(recipes)] if recipes else TrainConfig.from_record(report.runs[0].recipe)
    compared = {name: own for name, own in losses.items() if report.arms[name].role in COMPARED}
    return judge(baselines, compared, report.control, accuracies, control.replicates_planned, untrained, first)


def _equal(models: Mapping[str, Mapping[str, Any]], arm: str, control: str) -> bool:
    one, other = (DecoderConfig.from_record({**models[name], "vocab_size": 1}) for name in (arm, control))
    return equals_at_start(one, other)


def _family(report: ReportData) -> dict[str, ComparisonData]:
    """Decides all treatments and contrasts at equal tokens as one family; contrasts are keyed by both names."""
    treatments = {name: arm for name, arm in report.arms.items() if arm.role == "treatment"}
    found = {name: one.comparison for name, arm in treatments.items() if (one := arm.charged.get("tokens")) and one.comparison}
    found |= {f"{one.arm} {one.against}": one.comparison for one in report.contrasts if one.comparison is not None}
    rule = report.design["decision"]
    size = len(treatments) + len({(one.arm, one.against) for one in report.contrasts})
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


ORDER_OF_DATA = ("seed", "batch_size", "data")
"""Keys of a recipe that fix the order of the tokens."""


@dataclass(frozen=True)
class Pair:
    """The verification of one run against the control of the same seed.

    Attributes:
        key: the run.
        shared: number of parameters with the same name, shape and declared initial value in both.
        equal: how many of them had the same initial values.
        problems: reasons why the runs are no pair.
    """

    key: RunKey
    shared: int
    equal: int
    problems: tuple[str, ...]


def verify_pairs(plan: StudyPlan, records: Mapping[RunKey, RunRecord], learning_rates: Mapping[str, float]) -> list[Pair]:
    """Verifies every finished run against the finished control of its seed, and both against the plan; trials are no pairs."""
    found = []
    for arm in plan.of_role("treatment", "companion", "rung"):
        for seed in arm.seeds:
            run, control = records[RunKey(arm.name, seed)], records[RunKey(plan.control.name, seed)]
            if run.status == control.status == "finished":
                planned = [one.train_config(seed, learning_rates.get(one.tuned_as)) for one in (arm, plan.control)]
                found.append(_verify(run, control, *planned))
    return found


def _verify(run: RunRecord, control: RunRecord, planned: TrainConfig, planned_control: TrainConfig) -> Pair:
    problems = []
    if not all((record.data and record.parameters and record.recipe) for record in (run, control)):
        problems.append("the run or its control recorded no recipe, no data or no initial values")
        return Pair(run.key, 0, 0, tuple(problems))
    for whose, record, plan in (("", run, planned), ("the control has ", control, planned_control)):
        if difference := other_recipe(TrainConfig.from_record(record.recipe), plan):
            problems.append(
                f"{whose}another recipe than the plan's: {difference[0]} is {difference[1]!r}, not {difference[2]!r}"
            )
    if difference := first_difference(control.data, run.data):
        problems.append(f"other tokens than the control's: {difference[0]} differs")
    for key in ORDER_OF_DATA:
        if difference := first_difference(control.recipe.get(key), run.recipe.get(key), key):
            problems.append(f"another order of the data than the control's: {difference[0]} differs")
    starts = [_initial_values(record) for record in (run, control)]
    shared = [name for name, start in starts[0].items() if starts[1].get(name) == start]
    different = [name for name in shared if name not in run.parameters or run.parameters[name] != control.parameters.get(name)]
    if different:
        problems.append(
            f"{len(different)} of {len(shared)} shared parameters start at other values than the control's, "
            f"{different[0]} for example"
        )
    return Pair(run.key, len(shared), len(shared) - len(different), tuple(problems))


def initial_values(config: DecoderConfig) -> dict[str, tuple[tuple[int, ...], Init]]:
    """Shape and declared initial value of every parameter by name, found on the meta device."""
    with torch.device("meta"):
        model = Decoder(config)
    return {name: (tuple(parameter.shape), declaration.init) for name, parameter, declaration in declarations(model)}


def _initial_values(record: RunRecord) -> dict[str, tuple[tuple[int, ...], Init]]:
    recipe = TrainConfig.from_record(record.recipe)
    return initial_values(recipe.decoder(record.data["tokenizer"]["vocab_size"]))
