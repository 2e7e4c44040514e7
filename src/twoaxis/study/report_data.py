"""The one data file of a report: `report.json`, from which the page, the figures and the tables are all made.

Losses and differences are nats per token; what is not known is null. `report.schema.json` beside a report describes it.
"""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from twoaxis.core.config import Config
from twoaxis.core.errors import ConfigError, StudyError
from twoaxis.core.text import json_value

VERSION = "twoaxis.report/2"
"""Of the form of the file; it changes when a field changes its meaning."""

Charge = Literal["tokens", "flops", "seconds"]
"""What two arms are given equally much of when their losses are compared."""

Role = Literal["control", "treatment", "companion", "rung", "trial"]
"""Why an arm is in a study: compared with (`control`), asked about (`treatment`), generated to rule out another explanation
(`companion`), the control at another budget (`rung`), or a try of a learning rate (`trial`)."""


Word = Literal["better", "worse", "undecided"]
"""A verdict; where there is none, it is null."""


class ComparisonData(Config):
    """One arm against another over all replicates.

    Attributes:
        paired_differences: arm minus the other by replicate, in the order of the seeds.
        mean_difference: their mean; below zero is better.
        sd_difference: their standard deviation with n - 1.
        ci95: its own Student interval of the mean, uncorrected; null when the replicates do not vary.
        bootstrap95: the bootstrap interval, to be read with its own.
        p: two-sided, before any correction.
        p_holm: after Holm's correction over its family.
        power: chance to find the smallest effect that matters with this n.
        replicates_needed: pairs that would find it with power 0.8.
        verdict: by the decision rule; null when none may be given.
        family: comparisons that are corrected together; 0 for one that no question of the study asks for, and in old reports.
        simultaneous: the interval of the verdict: all those of a family hold their means together; null in old reports, and
            when the replicates do not vary.
        suggestive: whether its own interval excludes zero and the verdict is undecided.
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
        """The verdict with `suggestive` where it applies; "" without a verdict."""
        return f"{self.verdict} (suggestive)" if self.suggestive else self.verdict or ""

    def withheld(self) -> "ComparisonData":
        """The same numbers without a verdict."""
        return self.replace(verdict=None, suggestive=False)


class ChargedData(Config):
    """What a comparison with the control comes to when both are given equally much of one thing.

    Attributes:
        cost: what a run of the arm takes, in tokens, FLOPs or seconds.
        cost_ratio: to the control's.
        comparison: null when it cannot be made without guessing.
        unavailable: why there is no comparison or no verdict, in words; "" when there is.
    """

    cost: float | None
    cost_ratio: float | None
    comparison: ComparisonData | None = None
    unavailable: str = ""


class SpeedupData(Config):
    """What the control would need for the loss of an arm, over what the arm took; above 1 the arm is the cheaper way.

    An end that lies outside the measured budgets of the control is null and worded in `sentence`, never extrapolated.

    Attributes:
        value: of the mean difference.
        low: lower end of the interval.
        high: upper end of the interval.
        bootstrap95: the interval of a bootstrap over seeds that fits the curve anew each time.
        sentence: the same in words.
    """

    value: float | None
    low: float | None
    high: float | None
    bootstrap95: tuple[float | None, float | None] | None = None
    sentence: str


class ChangeData(Config):
    """What the planner changed in an arm so that it matches another.

    Attributes:
        path: the keys of the recipe that were changed.
        before: their value before.
        after: and now.
        of: what was matched.
        to: the arm that was matched.
        wanted: the cost of that arm.
        got: the cost of this arm now.
    """

    path: str
    before: Any
    after: Any
    of: Literal["tokens", "flops", "params", "seconds"]
    to: str
    wanted: float
    got: float


class RatesData(Config):
    """How one group of parameters is optimised.

    Attributes:
        what: what its parameters declare themselves to be, such as `matrix` or `mixing`.
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
        role: why it is here.
        control: whether it is the control.
        why: one line on what it is for; "" when the design says nothing.
        to: the arm that it is a companion of; "" otherwise.
        changes: what the planner changed.
        replicates: that have finished.
        replicates_planned: that were decided.
        losses: validation loss of every finished run by seed.
        mean_loss: over all planned replicates; null while one is missing.
        accuracies: on the answers of a probe, by seed.
        steps: of every run.
        tokens: that every run reads.
        lr: learning rate.
        rates: learning rate and weight decay of every group of parameters.
        parameters: a count.
        training_flops_per_token: by the declared costs (the ledger), forward and backward.
        training_flops: of a whole run.
        step_seconds: median over interleaved segments after a warm-up, without telemetry.
        step_seconds_ratio: to the control, by the medians over the rounds.
        step_seconds_ratio_error: standard error of its logarithm, so of the ratio as a fraction.
        seconds: steps times step_seconds.
        predicted_memory_bytes: parameters, gradients, optimizer and saved activations, counted before the runs.
        peak_memory_bytes: measured, of the process or of the GPU where one was used; median over the replicates.
        peak_memory_ratio: to the control of the same seed.
        tokens_per_second: in the runs themselves, median over the replicates.
        tokens_per_second_ratio: to the control of the same seed.
        front_seconds: whether no other arm has both a lower mean loss and fewer seconds.
        front_memory: the same with memory.
        verdict: of the comparison that the design declared to decide; null for the control and while runs are missing.
        no_verdict: why there is none.
        sentence: what was found, in words.
        charged: by what both are given equally much of.
        speedup: effective speedup by FLOPs and by seconds.
        audit: what `twoaxis audit` found in the run of the first seed, as it wrote it.
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
    charged: dict[Charge, ChargedData] = Field(default_factory=dict)
    speedup: dict[Literal["flops", "seconds"], SpeedupData] = Field(default_factory=dict)
    audit: dict[str, Any] | None = None


class ContrastData(Config):
    """A treatment against one of its companions: whether what it is said to do is what it pays by.

    Attributes:
        arm: the treatment.
        against: its companion.
        why: what the companion is to rule out.
        matched: what the companion was given as much of as the treatment; "" when nothing was matched.
        comparison: null while runs are missing.
        no_verdict: why there is none.
        sentence: what was found, in words.
    """

    arm: str
    against: str
    why: str = ""
    matched: str = ""
    comparison: ComparisonData | None
    no_verdict: str = ""
    sentence: str


class PointData(Config):
    """One run of the control at one budget, its loss, and what the fitted curve leaves unexplained of it."""

    seed: int
    cost: float
    loss: float
    residual: float | None = None


class CurveData(Config):
    """How the control's loss falls with what is spent: L_s(C) = b_s + A (C / C_0)^-alpha.

    Attributes:
        points: the runs of the control at all of its budgets.
        amplitude: A; null without a fit, like the next two.
        exponent: alpha.
        residual_sd: standard deviation of what the fit leaves.
        line: the curve with the mean offset, as (cost, loss), over the measured range only.
        sentence: how good it is, or why there is none.
    """

    points: tuple[PointData, ...]
    amplitude: float | None = None
    exponent: float | None = None
    residual_sd: float | None = None
    line: tuple[tuple[float, float], ...] = ()
    sentence: str


class TuningData(Config):
    """What the trials of learning rates found and took.

    Attributes:
        seed: of all trials, which is none of the replicates.
        losses: by arm and learning rate; null for a trial that diverged.
        chosen: learning rate by arm.
        tokens: that all trials read.
        tokens_each: that one trial reads; null in old reports.
        at_edge: arms whose chosen rate is the least or the largest that was tried, so that a better one may lie outside.
    """

    seed: int
    losses: dict[str, dict[str, float | None]]
    chosen: dict[str, float]
    tokens: int
    tokens_each: int | None = None
    at_edge: tuple[str, ...] = ()


class TimingData(Config):
    """Seconds of a step, measured in rounds in which every arm has its turn.

    Attributes:
        warmup_steps: of every arm, which are not counted.
        steps_in_a_turn: steps timed together.
        seconds: of a step, by arm and round, before the first run.
        environment: where they were measured.
        seconds_after: the same after the last run; null until then.
        agree: whether both timings agree within their errors; null with one of them.
        sentence: the same in words.
    """

    warmup_steps: int
    steps_in_a_turn: int
    seconds: dict[str, tuple[float, ...]]
    environment: dict[str, Any]
    seconds_after: dict[str, tuple[float, ...]] | None = None
    agree: bool | None = None
    sentence: str = ""


class GateData(Config):
    """Whether the control was trained, without which no difference to it says anything about a method.

    Losses are means over the replicates that have finished, in nats per token, or per answer for a synthetic task.

    Attributes:
        passed: whether the control beats the bigram (a synthetic task: chance and majority) in every replicate; null while that
            is not known.
        sentence: the same in one line with the numbers.
        reasons: why verdicts are withheld, of the control and of single arms.
        change: what to change so that there are verdicts; "" when nothing is withheld.
        control: loss of the control.
        unigram: loss of token frequencies, counted in the training tokens of the control's runs; null for a synthetic task.
        bigram: loss of the count model of order 2.
        trigram: loss of the count model of order 3.
        chance: loss of guessing by how often each answer is right; null for text.
        majority: accuracy of the most frequent answer.
        in_context: loss of guessing among the possible answers that the sample shows.
        control_accuracy: of the control on the answers.
        counted: targets that were counted for one replicate.
        not_trained: arms that equal the control at step 0 and end worse in every replicate.
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
    """Whether the runs that were compared are pairs.

    Attributes:
        verified: every pair that has finished is one.
        sentence: the same in words.
        pairs: what each pair shares.
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
        message: what happened.
        reused_from: the run of another study that was the same, seen from the folder of the studies; "" for a run of this.
        loss: validation loss after the last step.
        curve: validation losses as (tokens read, loss).
        result: as the run wrote it.
        recipe: all of its settings.
        data: corpus and tokenizer.
        environment: where it was made.
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
    """Everything a report says.

    Attributes:
        version: of the form of the file.
        made: when, in UTC.
        question: what was asked.
        answer: what came out, in one short sentence.
        gate: whether the control was trained; null in old reports, whose verdicts are not to be relied on.
        findings: the same in more sentences, with intervals.
        complete: whether every planned run has finished and every pair is one.
        design: the study as it was decided.
        command: what reproduces it.
        decision_rule: in words.
        charge: what the verdicts are charged by.
        arms: control, treatments and companions, in order.
        contrasts: treatments against their companions.
        curves: of the control, by what is spent.
        tuning: of the learning rates, if the design asked for it.
        timing: of the steps, once it was measured.
        pairing: whether pairs are pairs.
        spent: what all runs and trials took together: runs, tokens, training_flops, train_seconds.
        overturn: what would change the verdicts.
        limits: what the evidence does not reach.
        runs: all of them, rungs and trials too.
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


def read_report(path: Path | str) -> ReportData:
    """Reads a `report.json`, or that of a study folder.

    Raises:
        StudyError: there is none, or it is not one of this version.
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
