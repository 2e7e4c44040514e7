"""The tables of a study as rows of text, for terminals and pages: its result by arm, its runs, and its plan."""

import statistics
from collections.abc import Callable, Sequence

from twoaxis.study import words
from twoaxis.study.analysis import Analysis, ArmSummary, peak_memory
from twoaxis.study.folder import RunRecord
from twoaxis.study.plan import StudyPlan

Rows = Sequence[Sequence[str]]

RESULT_COLUMNS = (
    "arm",
    "validation loss, nats/token",
    "difference",
    "95 % interval",
    "verdict",
    "parameters",
    "training FLOPs/token",
    "tokens/s to control",
    "peak memory to control",
)
"""The difference is the mean over replicates of arm minus control, in nats per token; below zero is better."""

RUN_COLUMNS = ("arm", "seed", "outcome", "validation loss, nats/token", "tokens", "tokens/s", "training time, s", "peak memory")

ACCURACY_COLUMNS = ("arm", "validation accuracy", "of the replicates")
"""The mean over the replicates, and each of them in the order of the seeds."""

PLAN_COLUMNS = ("arm", "parameters", "training FLOPs/token", "runs", "tokens")

MISSING = "—"
"""Stands where there is nothing to report."""


def result_rows(analysis: Analysis) -> list[list[str]]:
    """One row per arm."""
    return [_result_row(analysis, arm) for arm in analysis.arms]


def accuracy_rows(analysis: Analysis) -> list[list[str]]:
    """One row per arm with finished runs, for a corpus that asks for answers; else none."""
    return [
        [arm.name, words.percentage(statistics.fmean(values)), ", ".join(map(words.percentage, values))]
        for arm in analysis.arms
        if (values := list(arm.accuracies.values()))
    ]


def run_rows(analysis: Analysis) -> list[list[str]]:
    """One row per run, in the order they were made."""
    return [_run_row(run) for run in analysis.runs]


def plan_rows(plan: StudyPlan) -> list[list[str]]:
    """One row per arm."""
    runs, tokens = str(len(plan.seeds)), words.count(len(plan.seeds) * plan.tokens_per_run)
    return [
        [arm.name, words.count(arm.parameters), words.count(arm.training_flops_per_token), runs, tokens] for arm in plan.arms
    ]


def plan_title(plan: StudyPlan) -> str:
    """What all runs of a study come to."""
    return (
        f"{plan.runs} runs of {plan.steps} steps and {words.count(plan.tokens_per_run)} tokens, "
        f"{words.count(plan.flops)} FLOPs of training in all"
    )


def _result_row(analysis: Analysis, arm: ArmSummary) -> list[str]:
    control = arm.name == analysis.study.control
    comparison = arm.comparison
    if control:
        verdict = "control" if arm.complete else f"control, {len(arm.losses)} of {arm.planned} replicates"
        difference = interval = MISSING
    elif comparison is None:
        verdict, difference, interval = f"{arm.no_verdict}: no verdict", MISSING, MISSING
    else:
        verdict, difference = comparison.verdict, words.signed(comparison.test.mean)
        interval = words.interval(comparison.test.low, comparison.test.high) if comparison.test.varies else "no variation"
    return [
        arm.name,
        _or_missing(arm.mean_loss, words.loss),
        difference,
        interval,
        verdict,
        _or_missing(arm.parameters, words.count),
        _or_missing(arm.training_flops_per_token, words.count),
        _or_missing(arm.tokens_per_second_ratio, words.ratio),
        _or_missing(arm.peak_memory_ratio, words.ratio),
    ]


def _run_row(run: RunRecord) -> list[str]:
    result = run.result
    outcome = run.status if run.status in ("finished", "not started") else f"{run.status}: {run.message}"
    return [
        run.place.arm,
        str(run.place.seed),
        outcome,
        _or_missing(run.loss, words.loss),
        _or_missing(result and result.tokens, words.count),
        _or_missing(result and result.tokens_per_second, lambda value: f"{value:,.0f}"),
        _or_missing(result and result.train_seconds, lambda value: f"{value:.0f}"),
        _or_missing(result and peak_memory(result), words.memory),
    ]


def _or_missing(value: float | None, written: Callable[[float], str]) -> str:
    return MISSING if value is None else written(value)
