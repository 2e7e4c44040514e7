"""The data of a report, `report.json`, from which the page, figures and tables are made.

Losses and differences are in nats per token; unknown values are null. `report.schema.json` in the same folder describes it.
"""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from twoaxis.core.config import Config
from twoaxis.core.errors import ConfigError, StudyError
from twoaxis.core.text import json_value
from twoaxis.display import numbers as words

VERSION = "twoaxis.report/2"
"""Version of the file format; it changes when a field changes its meaning."""

Charge = Literal["tokens", "flops", "seconds"]
"""The kind of cost at which two arms are compared."""

UNITS: dict[Charge, str] = {"tokens": "tokens", "flops": "FLOPs", "seconds": "seconds"}
"""Names of the kinds of cost in text."""

Role = Literal["control", "treatment", "companion", "rung", "trial"]
"""Of an arm; a `companion` rules out another explanation, a `rung` is the control at another budget, a `trial` tries a rate."""

DONE = ("finished", "diverged")
"""Statuses of runs that another call of the study leaves as they are."""

Word = Literal["better", "worse", "undecided"]
"""A verdict."""


class ComparisonData(Config):
    """One arm against another over all replicates.

    Attributes:
        paired_differences: arm minus the other, in the order of the seeds.
        mean_difference: over replicates; below zero is better.
        sd_difference: standard deviation with n - 1.
        ci95: uncorrected Student interval of the mean; null when the replicates do not vary.
        bootstrap95: bootstrap interval of the mean, uncorrected.
        p: two-sided, uncorrected.
        p_holm: after Holm's correction over the family.
        power: probability of finding the smallest effect that matters with this n.
        replicates_needed: for power 0.8.
        verdict: by the decision rule; null without one.
        family: number of comparisons corrected together; 0 for a comparison without a verdict by design, and in old reports.
        simultaneous: the interval of the verdict over the family; null in old reports, and when the replicates do not vary.
        suggestive: whether the uncorrected interval excludes zero but the verdict is undecided.
    """

    paired_differences: tuple[float, ...]
    mean_difference: float
    sd_difference: float
    ci95: tuple[float, float] | None
    bootstrap95: tuple[float, float] | None = None
    p: float
    p_holm: float
    power: float
    replicates_needed: int | None
    verdict: Word | None
    family: int = 0
    simultaneous: tuple[float, float] | None = None
    suggestive: bool = False

    @property
    def remark(self) -> str:
        """The verdict, with `suggestive` where it applies; "" without a verdict."""
        return f"{self.verdict} (suggestive)" if self.suggestive else self.verdict or ""

    def withheld(self) -> "ComparisonData":
        """The same numbers without a verdict."""
        return self.replace(verdict=None, suggestive=False)


class EqualCostData(Config):
    """A comparison with the control at equal cost of one kind.

    Attributes:
        cost: of a run of the arm, in tokens, FLOPs or seconds.
        cost_ratio: to the control.
        comparison: null when the data do not allow it.
        unavailable: reason for no comparison or no verdict, or "".
    """

    cost: float | None
    cost_ratio: float | None
    comparison: ComparisonData | None = None
    unavailable: str = ""


class SpeedupData(Config):
    """The cost at which the control reaches an arm's loss, over the arm's cost; above 1 the arm is cheaper.

    Ends outside the measured budgets of the control are null, bounded in `sentence`, and never extrapolated.

    Attributes:
        value: of the mean difference.
        low: lower end of the interval.
        high: upper end of the interval.
        bootstrap95: interval of a bootstrap over seeds that refits the curve.
        sentence: summary.
        beyond: for a value outside the measured budgets, its side of them and the bound there; null in old reports.
    """

    value: float | None
    low: float | None
    high: float | None
    bootstrap95: tuple[float | None, float | None] | None = None
    sentence: str
    beyond: tuple[Literal["less", "more"], float] | None = None

    @property
    def outside(self) -> str:
        """Where a value lies that is outside the measured budgets."""
        return "outside the measured budgets" if self.beyond is None else f"{self.beyond[0]} than {words.ratio(self.beyond[1])}"


class ChangeData(Config):
    """A change of an arm by the planner, to match another arm.

    Attributes:
        path: the changed key of the recipe.
        before: its former value.
        after: its new value.
        of: the matched kind of cost.
        to: the matched arm.
        wanted: cost of the matched arm.
        got: cost of this arm after the change.
    """

    path: str
    before: Any
    after: Any
    of: Literal["tokens", "flops", "params", "seconds"]
    to: str
    wanted: float
    got: float


class RatesData(Config):
    """The optimizer settings of one group of parameters.

    Attributes:
        what: the declared kind of its parameters, such as `matrix` or `mixing`, and what updates them unless it is AdamW.
        lr: learning rate after the warm-up.
        weight_decay: times the learning rate per step.
        tensors: a count.
        parameters: a count.
    """

    what: str
    lr: float
    weight_decay: float
    tensors: int
    parameters: int


class ArmData(Config):
    """One arm.

    Attributes:
        role: in the study.
        control: whether it is the control.
        why: its purpose in one line, or "".
        to: for a companion its arm, else "".
        changes: by the planner.
        replicates: finished.
        replicates_planned: by the design.
        losses: validation loss of every finished run by seed.
        mean_loss: over all planned replicates; null while one is missing.
        accuracies: on the answers of a probe, by seed.
        steps: of every run.
        tokens: of every run.
        lr: learning rate.
        rates: learning rate and weight decay of every group of parameters.
        parameters: a count.
        training_flops_per_token: by the declared costs (the ledger), forward and backward.
        training_flops: of a whole run.
        step_seconds: median over interleaved segments after a warm-up, without telemetry.
        step_seconds_ratio: to the control, by medians over rounds.
        step_seconds_ratio_error: standard error of its logarithm, so the relative error of the ratio.
        seconds: steps times step_seconds.
        predicted_memory_bytes: parameters, gradients, optimizer and saved activations, counted before the runs.
        peak_memory_bytes: measured, of the GPU or else the process; median over replicates.
        peak_memory_ratio: to the control of the same seed.
        tokens_per_second: in the runs, median over replicates.
        tokens_per_second_ratio: to the control of the same seed.
        front_seconds: whether no other arm has both a lower mean loss and fewer seconds.
        front_memory: the same with memory.
        verdict: at the equal cost that the design declares decisive; null for the control and while runs are missing.
        no_verdict: reason for no verdict, or "".
        sentence: the result in words.
        charged: comparisons by kind of equal cost.
        speedup: effective speedup by FLOPs and by seconds.
        audit: result of `twoaxis audit` on the run of the first seed.
    """

    role: Role
    control: bool
    why: str = ""
    to: str = ""
    changes: tuple[ChangeData, ...] = ()
    replicates: int
    replicates_planned: int
    losses: dict[str, float]
    mean_loss: float | None
    accuracies: dict[str, float] = Field(default_factory=dict)
    steps: int
    tokens: int
    lr: float
    rates: tuple[RatesData, ...] = ()
    parameters: int | None
    training_flops_per_token: float | None
    training_flops: float | None
    step_seconds: float | None
    step_seconds_ratio: float | None
    step_seconds_ratio_error: float | None = None
    seconds: float | None
    predicted_memory_bytes: float | None
    peak_memory_bytes: float | None
    peak_memory_ratio: float | None
    tokens_per_second: float | None
    tokens_per_second_ratio: float | None
    front_seconds: bool | None = None
    front_memory: bool | None = None
    verdict: Word | None = None
    no_verdict: str = ""
    sentence: str = ""
    charged: dict[Charge, EqualCostData] = Field(default_factory=dict)
    speedup: dict[Literal["flops", "seconds"], SpeedupData] = Field(default_factory=dict)
    audit: dict[str, Any] | None = None


class ContrastData(Config):
    """A treatment against one of its companions, or another arm.

    Attributes:
        arm: the treatment.
        against: the other.
        why: which other explanation is ruled out.
        matched: the cost made equal, or "".
        comparison: null while runs are missing.
        no_verdict: reason for no verdict, or "".
        sentence: the result in words.
    """

    arm: str
    against: str
    why: str = ""
    matched: str = ""
    comparison: ComparisonData | None
    no_verdict: str = ""
    sentence: str


class PointData(Config):
    """One run of the control at one budget: loss, and residual from the fitted curve."""

    seed: int
    cost: float
    loss: float
    residual: float | None = None


class CurveData(Config):
    """The control's loss over cost: L_s(C) = b_s + A (C / C_0)^-alpha.

    Attributes:
        points: runs of the control at all of its budgets.
        amplitude: A; null without a fit, like the next two.
        exponent: alpha.
        residual_sd: standard deviation of the residuals.
        line: the curve with the mean offset, as (cost, loss), over the measured range only.
        sentence: quality of the fit, or the reason for having none.
    """

    points: tuple[PointData, ...]
    amplitude: float | None = None
    exponent: float | None = None
    residual_sd: float | None = None
    line: tuple[tuple[float, float], ...] = ()
    sentence: str


class TuningData(Config):
    """Results and cost of the trials of learning rates.

    Attributes:
        seed: of all trials; no replicate has it.
        losses: by arm and learning rate; null for a diverged trial, and absent for one that has not ended.
        chosen: learning rate by arm.
        tokens: of all trials.
        tokens_each: of one trial; null in old reports.
        at_edge: arms whose chosen rate is the least or the largest tried, so that a better one may lie outside.
    """

    seed: int
    losses: dict[str, dict[str, float | None]]
    chosen: dict[str, float]
    tokens: int
    tokens_each: int | None = None
    at_edge: tuple[str, ...] = ()

    @property
    def rates(self) -> list[str]:
        """All tried rates, as keys of `losses`, in ascending order."""
        return sorted({rate for losses in self.losses.values() for rate in losses}, key=float)

    def is_chosen(self, arm: str, rate: str) -> bool:
        """Whether a rate, as a key of `losses`, is the one chosen for the arm."""
        return arm in self.chosen and f"{self.chosen[arm]:g}" == rate


class TimingData(Config):
    """Seconds of a step, measured in rounds in which every arm takes a turn.

    Attributes:
        warmup_steps: of every arm, not counted.
        steps_in_a_turn: steps timed together.
        seconds: of a step, by arm and round, before the runs.
        environment: in which they were measured.
        seconds_after: after the last run; null until then.
        agree: whether both timings agree within their errors; null with one timing.
        sentence: summary of the agreement.
    """

    warmup_steps: int
    steps_in_a_turn: int
    seconds: dict[str, tuple[float, ...]]
    environment: dict[str, Any]
    seconds_after: dict[str, tuple[float, ...]] | None = None
    agree: bool | None = None
    sentence: str = ""


class GateData(Config):
    """The validity gate: whether the control was trained; without it, differences say nothing about methods.

    Losses are means over finished replicates, in nats per token, or per answer for a synthetic task.

    Attributes:
        passed: whether the control beats the bigram (synthetic: chance and majority) in every replicate; null while unknown.
        sentence: the result with its numbers.
        reasons: for withholding verdicts, of the control and of single arms.
        change: advice on how to obtain verdicts; "" when none is withheld.
        control: loss of the control.
        unigram: loss of token frequencies, counted in the training tokens of the control's runs; null for a synthetic task.
        bigram: loss of the count model of order 2.
        trigram: loss of the count model of order 3.
        chance: loss of guessing by the frequency of answers; null for text.
        majority: accuracy of the most frequent answer.
        in_context: loss of guessing among the possible answers in the sample.
        control_accuracy: of the control on the answers.
        counted: counted targets of one replicate.
        not_trained: arms that do not beat the bigram in every replicate, or that equal the control at step 0, take as many
            steps, and end worse in every replicate.
    """

    passed: bool | None
    sentence: str
    reasons: tuple[str, ...] = ()
    change: str = ""
    control: float | None = None
    unigram: float | None = None
    bigram: float | None = None
    trigram: float | None = None
    chance: float | None = None
    majority: float | None = None
    in_context: float | None = None
    control_accuracy: float | None = None
    counted: int | None = None
    not_trained: tuple[str, ...] = ()


class PairingData(Config):
    """Verification that compared runs are pairs.

    Attributes:
        verified: whether all finished pairs are.
        sentence: summary.
        pairs: shared parameters and problems of each pair.
    """

    verified: bool
    sentence: str
    pairs: tuple[dict[str, Any], ...]


class RunData(Config):
    """One run.

    Attributes:
        arm: its arm.
        seed: its seed.
        role: of its arm.
        status: `finished`, `diverged`, `failed`, `partial` or `not started`.
        message: the outcome.
        reused_from: path of the equal run of another study, below the folder of studies; "" for a run of this study.
        loss: validation loss after the last step.
        curve: validation losses as (tokens read, loss).
        result: as recorded by the run.
        recipe: all settings.
        data: corpus and tokenizer.
        environment: as recorded by the run.
    """

    arm: str
    seed: int
    role: Role
    status: str
    message: str
    reused_from: str = ""
    loss: float | None
    curve: tuple[tuple[int, float], ...]
    result: dict[str, Any] | None
    recipe: dict[str, Any]
    data: dict[str, Any]
    environment: dict[str, Any]


class ReportData(Config):
    """The whole content of a report.

    Attributes:
        version: of the file format.
        made: time of writing, in UTC.
        question: of the study.
        answer: one short sentence.
        gate: whether the control was trained; null in old reports, whose verdicts are not reliable.
        findings: the answer in detail, with intervals.
        complete: whether every planned run has finished and all pairs are verified.
        design: of the study.
        command: that reproduces it.
        decision_rule: in words.
        charge: the kind of equal cost of the verdicts.
        arms: control, treatments and companions, in order.
        contrasts: treatments against companions or each other.
        curves: of the control, by kind of cost.
        tuning: of learning rates, if any.
        timing: of steps, once measured.
        pairing: verification of the pairs.
        spent: totals of all runs and trials: runs, tokens, training_flops, train_seconds.
        overturn: evidence that would change the verdicts.
        limits: of the evidence.
        runs: all, including rungs and trials.
    """

    version: Literal["twoaxis.report/2"] = VERSION
    made: str
    question: str
    answer: str
    gate: GateData | None = None
    findings: tuple[str, ...] = ()
    complete: bool
    design: dict[str, Any]
    command: str
    decision_rule: str
    charge: Charge
    arms: dict[str, ArmData]
    contrasts: tuple[ContrastData, ...] = ()
    curves: dict[Literal["flops", "seconds"], CurveData] = Field(default_factory=dict)
    tuning: TuningData | None = None
    timing: TimingData | None = None
    pairing: PairingData
    spent: dict[str, float]
    overturn: str
    limits: tuple[str, ...]
    runs: tuple[RunData, ...]

    @property
    def control(self) -> str:
        """The name of the control."""
        return next(name for name, arm in self.arms.items() if arm.control)

    @property
    def asked(self) -> tuple[ContrastData, ...]:
        """The contrasts between arms of the design; of a study of one kind of companion, those against the companions."""
        own = tuple(one for one in self.contrasts if self.arms[one.against].role != "companion")
        return own if own or len({one.why for one in self.contrasts}) > 1 else self.contrasts


def read_report(path: Path | str) -> ReportData:
    """Reads a `report.json`, given its path or its folder.

    Raises:
        StudyError: it is missing, or of another version.
    """
    path = Path(path)
    path = path / "report.json" if path.is_dir() else path
    try:
        return ReportData.from_data(json_value(path.read_bytes()))
    except (OSError, ValueError, ConfigError) as error:
        reason = getattr(error, "strerror", None) or error
        raise StudyError(
            f"{path}: cannot be read ({reason}); must be a report of {VERSION}; write it with `twoaxis report FOLDER`"
        ) from None
