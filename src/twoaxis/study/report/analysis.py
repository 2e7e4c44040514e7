"""Computes the data of a report from the records of a study."""

import statistics
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import torch

from twoaxis.core.errors import DataError
from twoaxis.core.parameters import declarations
from twoaxis.model import Decoder
from twoaxis.study.design import StudyConfig
from twoaxis.study.planning.equal_cost import vocab_size
from twoaxis.study.planning.study_plan import PlannedArm, StudyPlan
from twoaxis.study.report import verdicts
from twoaxis.study.report.answer import answer, findings
from twoaxis.study.report.validity import COMPARED, Pair, equals_at_start, judge, obstacle, untrained_arms, verify_pairs
from twoaxis.study.report_data import (
    DONE,
    UNITS,
    ArmData,
    Charge,
    ContrastData,
    GateData,
    PairingData,
    RatesData,
    ReportData,
    RunData,
    TimingData,
    TuningData,
)
from twoaxis.study.running.baselines import Baselines
from twoaxis.study.running.study_folder import RunKey, RunRecord
from twoaxis.study.statistics import Comparisons, ControlCosts, Losses, Obstacles, contrast_obstacle, control_costs, decide
from twoaxis.study.statistics.speedup import speedup
from twoaxis.study.timing import Timing, pooled, timing_words
from twoaxis.train.metrics import Result
from twoaxis.train.optim import parameter_groups
from twoaxis.train.recipe import TrainConfig

Records = Mapping[RunKey, RunRecord]


def analyse(
    study: StudyConfig,
    plan: StudyPlan,
    records: Records,
    baselines: Baselines,
    *,
    timing_after: Timing | None = None,
    learning_rates: Mapping[str, float] | None = None,
    audits: Mapping[str, dict[str, Any]] | None = None,
    command: str = "",
) -> ReportData:
    """Compares every arm with the control by the decision rule of the study, at equal tokens, FLOPs and seconds.

    An arm gets no comparison while a replicate of it or of the control is missing, or when its runs are not paired with the
    control's. It gets no verdict when the control was not trained, see `judge`.
    """
    first, (agree, words) = plan.timing, timing_words(plan.timing, timing_after, plan.control.name)
    plan = plan.replace(timing=pooled(first, timing_after)) if first and timing_after else plan
    pairs, rates = verify_pairs(plan, records, learning_rates or {}), dict(learning_rates or {})
    losses = {arm.name: _losses(arm, records) for arm in plan.arms}
    size = _vocab_size(plan, records)
    gate = _gate(plan, records, losses, baselines, rates, size)
    obstacles = _obstacles(plan, records, pairs, gate, "" if agree else words)
    unpaired = {pair.key for pair in pairs if pair.problems}
    paired = {arm: {seed: loss for seed, loss in own.items() if (arm, seed) not in unpaired} for arm, own in losses.items()}
    curves: dict[Charge, ControlCosts] = {charge: control_costs(plan, paired, charge) for charge in UNITS}
    found = decide(plan, losses, obstacles, curves, study.decision)
    arms = {
        arm.name: _arm(plan, arm, records, losses, rates, size) for arm in plan.of_role("control", "treatment", "companion")
    }
    for arm in plan.of_role("treatment", "companion"):
        arms[arm.name] = _with_verdict(study, plan, arms[arm.name], arm, found, obstacles, losses, curves)
    arms = _with_fronts({name: arm.replace(audit=(audits or {}).get(name)) for name, arm in arms.items()})
    report = ReportData(
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        question=study.question,
        answer="",
        gate=gate,
        complete=_complete(plan, records, pairs),
        design=study.to_data(),
        command=command,
        decision_rule=verdicts.decision_rule(study, plan),
        charge=study.decision.charge,
        arms=arms,
        contrasts=_contrasts(study, plan, found, obstacles),
        curves={charge: curves[charge].data() for charge in ("flops", "seconds") if plan.of_role("rung")},
        tuning=_tuning(plan, records, rates),
        timing=_timing(first, timing_after, agree, words),
        pairing=_pairing(pairs),
        spent=_spent(records),
        overturn=verdicts.overturn(study),
        limits=tuple(verdicts.limits(study, plan, list(records.values()))),
        runs=tuple(_run(plan, record) for record in records.values()),
    )
    return report.replace(answer=answer(report), findings=findings(report))


def _obstacles(plan: StudyPlan, records: Records, pairs: list[Pair], gate: GateData, seconds: str) -> Obstacles:
    compared = plan.of_role("treatment", "companion")
    missing = {arm.name: _no_verdict(plan, arm, records, pairs) for arm in compared}
    return Obstacles(missing, {arm.name: obstacle(gate, arm.name) for arm in compared}, seconds)


def _complete(plan: StudyPlan, records: Records, pairs: list[Pair]) -> bool:
    runs = [record for key, record in records.items() if plan.arm(key.arm).role != "trial"]
    return all(record.status == "finished" for record in runs) and not any(pair.problems for pair in pairs)


def _vocab_size(plan: StudyPlan, records: Records) -> int:
    """That of all arms, as runs have recorded it where text or tokenizer are gone."""
    try:
        return vocab_size(plan.control.train_config(plan.control.seeds[0]))
    except DataError:
        recorded = [record.data["tokenizer"]["vocab_size"] for record in records.values() if record.data]
        if not recorded:
            raise
        return recorded[0]


def _gate(
    plan: StudyPlan, records: Records, losses: Losses, baselines: Baselines, rates: Mapping[str, float], size: int
) -> GateData:
    control, seeds = plan.control, plan.control.seeds
    recipe = control.train_config(seeds[0], rates.get(control.tuned_as))
    equal = [
        arm.name
        for arm in plan.of_role("treatment", "companion")
        if arm.steps >= control.steps and equals_at_start(arm.train_config(seeds[0]).decoder(size), recipe.decoder(size))
    ]
    results = {seed: _result(records, control.name, seed) for seed in seeds}
    accuracies = {
        seed: result.validation_accuracy
        for seed, result in results.items()
        if result is not None and result.validation_accuracy is not None
    }
    untrained = untrained_arms(losses, control.name, seeds, equal)
    compared = {arm.name: losses[arm.name] for arm in plan.of_role(*COMPARED)}
    return judge(baselines, compared, control.name, accuracies, len(seeds), untrained, recipe)


def _no_verdict(plan: StudyPlan, arm: PlannedArm, records: Records, pairs: list[Pair]) -> str:
    for one in (arm, plan.control):
        runs = [records[RunKey(one.name, seed)] for seed in one.seeds]
        finished = [run for run in runs if run.loss is not None]
        if len(finished) < len(runs):
            whose = "" if one is arm else "control has "
            ended = sorted({run.status for run in runs if run.loss is None and run.status in ("failed", "diverged")})
            how = f"({', '.join(ended)})" if ended else "so far"
            return f"{whose}{len(finished)} of {len(runs)} replicates {how}"
    if any(pair.problems for pair in pairs if pair.key.arm == arm.name):
        return "not paired with the control"
    return ""


def _losses(arm: PlannedArm, records: Records) -> dict[int, float]:
    found = {seed: records[RunKey(arm.name, seed)].loss for seed in arm.seeds}
    return {seed: loss for seed, loss in found.items() if loss is not None}


def _arm(plan: StudyPlan, arm: PlannedArm, records: Records, losses: Losses, rates: Mapping[str, float], size: int) -> ArmData:
    pairs = [(_result(records, arm.name, seed), _result(records, plan.control.name, seed)) for seed in arm.seeds]
    own = [result for result, _ in pairs if result is not None]
    accuracies = {str(seed): r.validation_accuracy for seed, (r, _) in zip(arm.seeds, pairs, strict=True) if r is not None}
    complete = len(losses[arm.name]) == len(arm.seeds)
    timing, lr = plan.timing, rates.get(arm.tuned_as)
    return ArmData(
        role=arm.role,
        control=arm.role == "control",
        why=arm.why,
        to=next((contrast.arm for contrast in plan.contrasts if contrast.against == arm.name), ""),
        changes=arm.changes,
        replicates=len(losses[arm.name]),
        replicates_planned=len(arm.seeds),
        losses={str(seed): loss for seed, loss in losses[arm.name].items()},
        mean_loss=statistics.fmean(losses[arm.name].values()) if complete else None,
        accuracies={seed: accuracy for seed, accuracy in accuracies.items() if accuracy is not None},
        steps=arm.steps,
        tokens=arm.tokens,
        lr=arm.train_config(arm.seeds[0], lr).optimizer.lr,
        rates=rates_of(arm.train_config(arm.seeds[0], lr), size),
        parameters=arm.parameters,
        training_flops_per_token=arm.training_flops_per_token,
        training_flops=arm.flops,
        step_seconds=plan.step_seconds(arm),
        step_seconds_ratio=None if timing is None else timing.ratio(arm.name, plan.control.name),
        step_seconds_ratio_error=None if timing is None else plan.log_seconds_error(arm),
        seconds=plan.seconds_of(arm),
        predicted_memory_bytes=plan.memory_bytes(arm),
        peak_memory_bytes=_median([peak_memory(result) for result in own]),
        peak_memory_ratio=_ratio(pairs, peak_memory),
        tokens_per_second=_median([result.tokens_per_second for result in own]),
        tokens_per_second_ratio=_ratio(pairs, lambda result: result.tokens_per_second),
    )


def _with_verdict(
    study: StudyConfig,
    plan: StudyPlan,
    data: ArmData,
    arm: PlannedArm,
    found: Comparisons,
    obstacles: Obstacles,
    losses: Losses,
    curves: Mapping[Charge, ControlCosts],
) -> ArmData:
    charged = found.charged[arm.name]
    decisive, reason = charged[study.decision.charge], obstacles.missing[arm.name]
    speedups = {}
    for charge in ("flops", "seconds"):
        known = not reason and not (charge == "seconds" and obstacles.seconds)
        one = speedup(plan, arm, losses, curves[charge]) if known else None
        if one is not None:
            speedups[charge] = one
    comparison = decisive.comparison
    verdict = None if comparison is None else comparison.verdict
    no_verdict = "" if verdict else reason or obstacles.untrained[arm.name] or decisive.unavailable
    control = losses[plan.control.name]
    so_far = [loss - control[seed] for seed, loss in losses[arm.name].items() if seed in control]
    data = data.replace(charged=charged, speedup=speedups, verdict=verdict, no_verdict=no_verdict)
    return data.replace(sentence=verdicts.verdict_sentence(study, arm.name, comparison, no_verdict, so_far))


def _with_fronts(arms: dict[str, ArmData]) -> dict[str, ArmData]:
    """Marks arms that no other beats in both loss and cost."""

    def on_front(name: str, of: Callable[[ArmData], float | None]) -> bool | None:
        loss, cost = arms[name].mean_loss, of(arms[name])
        if loss is None or cost is None:
            return None
        others = [(arm.mean_loss, of(arm)) for other, arm in arms.items() if other != name]
        return not any(
            other is not None and taken is not None and other <= loss and taken <= cost and (other, taken) != (loss, cost)
            for other, taken in others
        )

    return {
        name: arm.replace(
            front_seconds=on_front(name, lambda one: one.seconds),
            front_memory=on_front(name, lambda one: one.peak_memory_bytes),
        )
        for name, arm in arms.items()
    }


def _contrasts(study: StudyConfig, plan: StudyPlan, decided: Comparisons, obstacles: Obstacles) -> tuple[ContrastData, ...]:
    found = []
    for contrast in plan.contrasts:
        comparison = decided.contrasts.get((contrast.arm, contrast.against))
        reason = contrast_obstacle(plan, obstacles, contrast, study.decision.charge)
        if comparison is not None and reason:
            comparison = comparison.withheld()
        found.append(
            ContrastData(
                arm=contrast.arm,
                against=contrast.against,
                why=contrast.why,
                matched=contrast.matched,
                comparison=comparison,
                no_verdict=reason,
                sentence=verdicts.contrast_sentence(study, contrast, comparison, reason),
            )
        )
    return tuple(found)


def _tuning(plan: StudyPlan, records: Records, rates: Mapping[str, float]) -> TuningData | None:
    trials = plan.of_role("trial")
    if not trials:
        return None
    losses: dict[str, dict[str, float | None]] = {}
    for arm in trials:
        lr, record = arm.train_config(arm.seeds[0]).optimizer.lr, records[RunKey(arm.name, arm.seeds[0])]
        tried = losses.setdefault(arm.tuned_as, {})
        if record.status in DONE:
            tried[f"{lr:g}"] = record.loss
    edges = {name: {f(map(float, tried)) for f in (min, max)} for name, tried in losses.items() if tried}
    return TuningData(
        seed=trials[0].seeds[0],
        losses=losses,
        chosen=dict(rates),
        tokens=sum(arm.tokens for arm in trials),
        tokens_each=trials[0].tokens,
        at_edge=tuple(name for name, lr in rates.items() if float(f"{lr:g}") in edges.get(name, ())),
    )


def _timing(before: Timing | None, after: Timing | None, agree: bool | None, sentence: str) -> TimingData | None:
    if before is None:
        return None
    return TimingData(
        warmup_steps=before.warmup_steps,
        steps_in_a_turn=before.steps_in_a_turn,
        seconds=before.seconds,
        environment=before.environment,
        seconds_after=None if after is None else after.seconds,
        agree=agree,
        sentence=sentence,
    )


def _pairing(pairs: list[Pair]) -> PairingData:
    return PairingData(
        verified=bool(pairs) and not any(pair.problems for pair in pairs),
        sentence=verdicts.pairing_sentence(pairs),
        pairs=tuple(
            {
                "arm": pair.key.arm,
                "seed": pair.key.seed,
                "shared_parameter_tensors": pair.shared,
                "equal_parameter_tensors": pair.equal,
                "problems": list(pair.problems),
            }
            for pair in pairs
        ),
    )


def _spent(records: Records) -> dict[str, float]:
    """The totals of this study's runs, without those reused from another study."""
    results = [record.result for record in records.values() if record.result is not None and not record.reused_from]
    return {
        "runs": float(len(results)),
        "reused_runs": float(sum(bool(record.reused_from) for record in records.values())),
        "tokens": float(sum(result.tokens for result in results)),
        "training_flops": sum(result.tokens * result.training_flops_per_token for result in results),
        "train_seconds": sum(result.train_seconds for result in results),
    }


def _run(plan: StudyPlan, run: RunRecord) -> RunData:
    return RunData(
        arm=run.key.arm,
        seed=run.key.seed,
        role=plan.arm(run.key.arm).role,
        status=run.status,
        message=run.message,
        reused_from=run.reused_from,
        loss=run.loss,
        curve=run.curve,
        result=run.result.to_data() if run.result is not None else None,
        recipe=run.recipe,
        data=run.data,
        environment=run.environment,
    )


def peak_memory(result: Result) -> float:
    """The peak memory of the GPU, or else of the process, in bytes."""
    return result.peak_device_memory_bytes or result.peak_memory_bytes


def _result(records: Records, arm: str, seed: int) -> Result | None:
    record = records[RunKey(arm, seed)]
    return record.result if record.status == "finished" else None


def _ratio(pairs: list[tuple[Result | None, Result | None]], of: Callable[[Result], float | None]) -> float | None:
    found = [(of(ours), of(control)) for ours, control in pairs if ours is not None and control is not None]
    return _median([ours / control for ours, control in found if ours and control])


def _median(values: list[float] | list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def rates_of(recipe: TrainConfig, vocab_size: int) -> tuple[RatesData, ...]:
    """The optimizer settings of the parameters of a recipe, by group and declared kind.

    Example:
        >>> recipe = TrainConfig(model={"d_model": 8, "n_layers": 1, "depth": "residual_scalars",
        ...                             "blocks": [[{"kind": "attention", "n_heads": 1}, "swiglu"]]})
        >>> {one.what: (one.lr, one.weight_decay) for one in rates_of(recipe, 256)}["mixing"]
        (0.001, 0.0)
    """
    with torch.device("meta"):
        model = Decoder(recipe.decoder(vocab_size))
    tags = {name: declaration.tag for name, _, declaration in declarations(model)}
    found = []
    for group in parameter_groups(model, recipe.parameter_options):
        for tag in group.tags:
            own = [parameter for name, parameter in group.parameters.items() if tags[name] == tag]
            found.append(
                RatesData(
                    what=tag if group.rule == "adamw" else f"{tag} by {group.rule}",
                    lr=recipe.optimizer.lr * group.lr_scale,
                    weight_decay=group.weight_decay,
                    tensors=len(own),
                    parameters=sum(parameter.numel() for parameter in own),
                )
            )
    return tuple(found)
