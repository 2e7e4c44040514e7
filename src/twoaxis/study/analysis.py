"""From the records of a study to what can be said about each arm."""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from twoaxis.study.design import StudyConfig
from twoaxis.study.folder import Place, RunRecord
from twoaxis.study.pairing import Pair, verify_pairs
from twoaxis.study.statistics import Comparison, compare
from twoaxis.train.result import Result


@dataclass(frozen=True)
class ArmSummary:
    """One arm of a study.

    Attributes:
        name: the arm.
        planned: replicates the study was decided with.
        losses: validation loss of every finished run by seed, nats per token.
        accuracies: validation accuracy of every finished run by seed; empty for a corpus that asks for no answers.
        comparison: with the control; None for the control itself and whenever there is `no_verdict`.
        no_verdict: why nothing is concluded about this arm, in words; "" otherwise.
        parameters: a count; None before any run has a result, like the fields below.
        training_flops_per_token: forward and backward, a count.
        tokens_per_second: median over the replicates.
        tokens_per_second_ratio: to the control of the same seed, median over the pairs.
        peak_memory_bytes: of the process, or of the GPU where one was used; median over the replicates.
        peak_memory_ratio: to the control of the same seed, median over the pairs.
    """

    name: str
    planned: int
    losses: dict[int, float]
    accuracies: dict[int, float]
    comparison: Comparison | None
    no_verdict: str
    parameters: int | None
    training_flops_per_token: float | None
    tokens_per_second: float | None
    tokens_per_second_ratio: float | None
    peak_memory_bytes: float | None
    peak_memory_ratio: float | None

    @property
    def complete(self) -> bool:
        """Whether every planned replicate has finished."""
        return len(self.losses) == self.planned

    @property
    def mean_loss(self) -> float | None:
        """Mean over all planned replicates, nats per token; None while one is missing."""
        return statistics.fmean(self.losses.values()) if self.complete else None


@dataclass(frozen=True)
class Analysis:
    """Everything that is concluded from a study.

    Attributes:
        study: the design.
        arms: in the order of the design.
        runs: in the order they were made.
        pairs: the verification of every pair of finished runs.
    """

    study: StudyConfig
    arms: tuple[ArmSummary, ...]
    runs: tuple[RunRecord, ...]
    pairs: tuple[Pair, ...]

    @property
    def complete(self) -> bool:
        """Whether every planned run has finished and every pair is one."""
        return all(arm.complete for arm in self.arms) and not any(pair.problems for pair in self.pairs)

    @property
    def treatments(self) -> tuple[ArmSummary, ...]:
        """The arms that are compared with the control."""
        return tuple(arm for arm in self.arms if arm.name != self.study.control)


def analyse(study: StudyConfig, records: Mapping[Place, RunRecord]) -> Analysis:
    """Compares every arm with the control by the decision rule of the study.

    An arm gets no difference, interval or verdict while a replicate of it or of the control is missing, or when its
    runs turn out not to be pairs with the control's.
    """
    pairs = verify_pairs(study, records)
    reasons = {arm: _no_verdict(study, arm, records, pairs) for arm in study.treatments}
    losses = {arm: _losses(study, arm, records) for arm in study.arms}
    differences = {
        arm: [losses[arm][seed] - losses[study.control][seed] for seed in study.replicates]
        for arm, reason in reasons.items()
        if not reason
    }
    rule = study.decision
    compared = compare(differences, rule.alpha, rule.smallest_effect, len(study.treatments)) if differences else {}
    arms = tuple(_summary(study, arm, records, compared.get(arm), reasons.get(arm, "")) for arm in study.arms)
    return Analysis(study, arms, tuple(records.values()), tuple(pairs))


def _no_verdict(study: StudyConfig, arm: str, records: Mapping[Place, RunRecord], pairs: list[Pair]) -> str:
    for name in (arm, study.control):
        runs = [records[Place(name, seed)] for seed in study.replicates]
        finished = [run for run in runs if run.loss is not None]
        if len(finished) < len(runs):
            whose = "" if name == arm else "control has "
            others = sorted({run.status for run in runs if run.loss is None})
            return f"{whose}{len(finished)} of {len(runs)} replicates ({', '.join(others)})"
    if any(pair.problems for pair in pairs if pair.place.arm == arm):
        return "not paired with the control"
    return ""


def _losses(study: StudyConfig, arm: str, records: Mapping[Place, RunRecord]) -> dict[int, float]:
    found = {seed: records[Place(arm, seed)].loss for seed in study.replicates}
    return {seed: loss for seed, loss in found.items() if loss is not None}


def _accuracies(study: StudyConfig, arm: str, records: Mapping[Place, RunRecord]) -> dict[int, float]:
    results = {seed: _result(records, arm, seed) for seed in study.replicates}
    found = {seed: result.validation_accuracy for seed, result in results.items() if result is not None}
    return {seed: accuracy for seed, accuracy in found.items() if accuracy is not None}


def _summary(
    study: StudyConfig, arm: str, records: Mapping[Place, RunRecord], comparison: Comparison | None, no_verdict: str
) -> ArmSummary:
    pairs = [(_result(records, arm, seed), _result(records, study.control, seed)) for seed in study.replicates]
    own = [result for result, _ in pairs if result is not None]
    any_result = next((result for seed in study.replicates if (result := records[Place(arm, seed)].result)), None)
    return ArmSummary(
        name=arm,
        planned=len(study.replicates),
        losses=_losses(study, arm, records),
        accuracies=_accuracies(study, arm, records),
        comparison=comparison,
        no_verdict=no_verdict,
        parameters=any_result.parameters if any_result else None,
        training_flops_per_token=any_result.training_flops_per_token if any_result else None,
        tokens_per_second=_median([result.tokens_per_second for result in own]),
        tokens_per_second_ratio=_ratio(pairs, lambda result: result.tokens_per_second),
        peak_memory_bytes=_median([peak_memory(result) for result in own]),
        peak_memory_ratio=_ratio(pairs, peak_memory),
    )


def peak_memory(result: Result) -> float:
    """The memory a run is charged: that of the GPU where one was used, else that of the process, in bytes."""
    return result.peak_device_memory_bytes or result.peak_memory_bytes


def _result(records: Mapping[Place, RunRecord], arm: str, seed: int) -> Result | None:
    record = records[Place(arm, seed)]
    return record.result if record.status == "finished" else None


def _ratio(pairs: list[tuple[Result | None, Result | None]], of: Callable[[Result], float | None]) -> float | None:
    found = [(of(ours), of(control)) for ours, control in pairs if ours is not None and control is not None]
    return _median([ours / control for ours, control in found if ours and control])


def _median(values: list[float] | list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
