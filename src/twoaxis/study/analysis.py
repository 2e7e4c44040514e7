"""From the records of a study to everything that its report says."""

import statistics
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from twoaxis.study import verdicts
from twoaxis.study.charges import ControlCosts, Losses, charged, comparison_data, control_costs, speedup
from twoaxis.study.design import StudyConfig
from twoaxis.study.folder import Place, RunRecord
from twoaxis.study.pairing import Pair, verify_pairs
from twoaxis.study.plan import PlannedArm, StudyPlan
from twoaxis.study.report_data import (
    ArmData,
    Charge,
    ContrastData,
    PairingData,
    ReportData,
    RunData,
    TimingData,
    TuningData,
)
from twoaxis.study.statistics import compare
from twoaxis.train.result import Result

CHARGES: tuple[Charge, ...] = ("tokens", "flops", "seconds")

Records = Mapping[Place, RunRecord]


def analyse(
    study: StudyConfig,
    plan: StudyPlan,
    records: Records,
    learning_rates: Mapping[str, float] | None = None,
    audits: Mapping[str, dict[str, Any]] | None = None,
    command: str = "",
) -> ReportData:
    """Compares every arm with the control by the decision rule of the study, at equal tokens, FLOPs and seconds.

    An arm gets no difference, interval or verdict while a replicate of it or of the control is missing, or when its
    runs turn out not to be pairs with the control's.

    Args:
        study: the design.
        plan: made before the first run.
        records: of every run.
        learning_rates: that trials have found, by arm.
        audits: what was found in one run of an arm, by arm.
        command: that makes the study again.
    """
    pairs = verify_pairs(plan, records)
    losses = {arm.name: _losses(arm, records) for arm in plan.arms}
    compared = plan.of_role("treatment", "companion")
    reasons = {arm.name: _no_verdict(plan, arm, records, pairs) for arm in compared}
    curves: dict[Charge, ControlCosts] = {charge: control_costs(plan, losses, charge) for charge in CHARGES}
    found = {arm.name: {} for arm in plan.arms}
    for charge in CHARGES:
        # Two families: what was asked, and what was generated beside it.
        for family in (plan.of_role("treatment"), plan.of_role("companion")):
            for name, one in charged(plan, losses, reasons, family, curves[charge], study.decision).items():
                found[name][charge] = one
    shown = plan.of_role("control", "treatment", "companion")
    rates = dict(learning_rates or {})
    arms = {arm.name: _arm(study, plan, arm, records, losses, rates) for arm in shown}
    for arm in compared:
        arms[arm.name] = _with_verdict(study, plan, arms[arm.name], arm, found[arm.name], reasons[arm.name], losses, curves)
    arms = _with_fronts({name: arm.replace(audit=(audits or {}).get(name)) for name, arm in arms.items()})
    complete = all(record.status == "finished" for place, record in records.items() if plan.arm(place.arm).role != "trial")
    report = ReportData(
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        question=study.question,
        answer="",
        complete=complete and not any(pair.problems for pair in pairs),
        design=study.to_data(),
        command=command,
        decision_rule=verdicts.decision_rule(study),
        charge=study.decision.charge,
        arms=arms,
        contrasts=_contrasts(study, plan, losses, reasons),
        curves={charge: curves[charge].data() for charge in ("flops", "seconds") if plan.of_role("rung")},
        tuning=_tuning(plan, records, rates),
        timing=_timing(plan),
        pairing=_pairing(pairs),
        spent=_spent(records),
        overturn=verdicts.overturn(study),
        limits=tuple(verdicts.limits(study, plan, list(records.values()))),
        runs=tuple(_run(plan, record) for record in records.values()),
    )
    return report.replace(answer=verdicts.answer(report))


def _no_verdict(plan: StudyPlan, arm: PlannedArm, records: Records, pairs: list[Pair]) -> str:
    for one in (arm, plan.control):
        runs = [records[Place(one.name, seed)] for seed in one.seeds]
        finished = [run for run in runs if run.loss is not None]
        if len(finished) < len(runs):
            whose = "" if one is arm else "control has "
            others = sorted({run.status for run in runs if run.loss is None})
            return f"{whose}{len(finished)} of {len(runs)} replicates ({', '.join(others)})"
    if any(pair.problems for pair in pairs if pair.place.arm == arm.name):
        return "not paired with the control"
    return ""


def _losses(arm: PlannedArm, records: Records) -> dict[int, float]:
    found = {seed: records[Place(arm.name, seed)].loss for seed in arm.seeds}
    return {seed: loss for seed, loss in found.items() if loss is not None}


def _arm(
    study: StudyConfig, plan: StudyPlan, arm: PlannedArm, records: Records, losses: Losses, rates: Mapping[str, float]
) -> ArmData:
    pairs = [(_result(records, arm.name, seed), _result(records, plan.control.name, seed)) for seed in arm.seeds]
    own = [result for result, _ in pairs if result is not None]
    accuracies = {str(seed): r.validation_accuracy for seed, (r, _) in zip(arm.seeds, pairs, strict=True) if r is not None}
    complete = len(losses[arm.name]) == len(arm.seeds)
    timing = plan.timing
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
        lr=rates.get(arm.tuned_as, arm.train_config(arm.seeds[0]).optimizer.lr),
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
    found: dict[Charge, Any],
    reason: str,
    losses: Losses,
    curves: Mapping[Charge, ControlCosts],
) -> ArmData:
    decisive = found[study.decision.charge]
    no_verdict = reason or decisive.unavailable
    speedups = {}
    for charge in ("flops", "seconds"):
        one = None if reason else speedup(plan, arm, losses, curves[charge])
        if one is not None:
            speedups[charge] = one
    verdict = None if decisive.comparison is None else decisive.comparison.verdict
    data = data.replace(charged=found, speedup=speedups, verdict=verdict, no_verdict=no_verdict)
    return data.replace(sentence=verdicts.verdict_sentence(study, arm.name, decisive.comparison, no_verdict))


def _with_fronts(arms: dict[str, ArmData]) -> dict[str, ArmData]:
    """Marks the arms that no other beats in both loss and what it takes."""

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


def _contrasts(study: StudyConfig, plan: StudyPlan, losses: Losses, reasons: Mapping[str, str]) -> tuple[ContrastData, ...]:
    known = {**reasons, plan.control.name: ""}
    rule, keys = study.decision, [(contrast.arm, contrast.against) for contrast in plan.contrasts]
    differences = {
        f"{arm} {against}": [losses[arm][seed] - losses[against][seed] for seed in plan.arm(arm).seeds]
        for arm, against in keys
        if not known[arm] and not known[against]
    }
    compared = compare(differences, rule.alpha, rule.smallest_effect, len(set(keys))) if differences else {}
    found = []
    for contrast in plan.contrasts:
        one = compared.get(f"{contrast.arm} {contrast.against}")
        data = None if one is None else comparison_data(one)
        reason = known[contrast.arm] or (known[contrast.against] and f"{contrast.against}: {known[contrast.against]}")
        found.append(
            ContrastData(
                arm=contrast.arm,
                against=contrast.against,
                why=contrast.why,
                matched=contrast.matched,
                comparison=data,
                no_verdict=reason,
                sentence=verdicts.contrast_sentence(study, contrast, data, reason),
            )
        )
    return tuple(found)


def _tuning(plan: StudyPlan, records: Records, rates: Mapping[str, float]) -> TuningData | None:
    trials = plan.of_role("trial")
    if not trials:
        return None
    losses: dict[str, dict[str, float | None]] = {}
    for arm in trials:
        lr = arm.train_config(arm.seeds[0]).optimizer.lr
        losses.setdefault(arm.tuned_as, {})[f"{lr:g}"] = records[Place(arm.name, arm.seeds[0])].loss
    return TuningData(seed=trials[0].seeds[0], losses=losses, chosen=dict(rates), tokens=sum(arm.tokens for arm in trials))


def _timing(plan: StudyPlan) -> TimingData | None:
    if plan.timing is None:
        return None
    timing = plan.timing
    return TimingData(
        warmup_steps=timing.warmup_steps,
        steps_in_a_turn=timing.steps_in_a_turn,
        seconds=timing.seconds,
        environment=timing.environment,
    )


def _pairing(pairs: list[Pair]) -> PairingData:
    return PairingData(
        verified=bool(pairs) and not any(pair.problems for pair in pairs),
        sentence=verdicts.pairing_sentence(pairs),
        pairs=tuple(
            {
                "arm": pair.place.arm,
                "seed": pair.place.seed,
                "shared_parameter_tensors": pair.shared,
                "equal_parameter_tensors": pair.equal,
                "problems": list(pair.problems),
            }
            for pair in pairs
        ),
    )


def _spent(records: Records) -> dict[str, float]:
    """What this study's own runs took; those of another study are not charged twice."""
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
        arm=run.place.arm,
        seed=run.place.seed,
        role=plan.arm(run.place.arm).role,
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
    """The memory a run is charged: that of the GPU where one was used, else that of the process, in bytes."""
    return result.peak_device_memory_bytes or result.peak_memory_bytes


def _result(records: Records, arm: str, seed: int) -> Result | None:
    record = records[Place(arm, seed)]
    return record.result if record.status == "finished" else None


def _ratio(pairs: list[tuple[Result | None, Result | None]], of: Callable[[Result], float | None]) -> float | None:
    found = [(of(ours), of(control)) for ours, control in pairs if ours is not None and control is not None]
    return _median([ours / control for ours, control in found if ours and control])


def _median(values: list[float] | list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
