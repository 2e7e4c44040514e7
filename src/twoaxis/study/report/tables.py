"""The tables of a study as rows of text for terminals: its results by arm, its contrasts, and its plan."""

import csv
import io
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from twoaxis.display import numbers as words
from twoaxis.study.planning.plan import PlannedArm, StudyPlan
from twoaxis.study.report_data import ArmData, Charge, ComparisonData, ReportData

RESULT_COLUMNS = (
    "arm",
    "validation loss, nats/token",
    "difference",
    "simultaneous interval",
    "own 95 % interval",
    "verdict",
)
"""The difference is the mean over replicates of arm minus control by the charge that decides, in nats per token; below zero
is better. The simultaneous interval is that of the verdict; the size of its family stands with the verdict."""

COST_COLUMNS = (
    "arm",
    "at equal FLOPs",
    "at equal seconds",
    "parameters",
    "training FLOPs/token",
    "seconds to control",
    "peak memory to control",
)
"""Differences at equal FLOPs and seconds with their verdicts, and what an arm costs."""

CONTRAST_COLUMNS = ("arm", "against", "matched by", "difference", "simultaneous interval", "own 95 % interval", "verdict")

RATE_COLUMNS = ("arm", "parameters of", "learning rate", "weight decay", "tensors", "count")
"""One row per arm and group of parameters; groups of an arm that are optimised as those of the control are left out."""

ACCURACY_COLUMNS = ("arm", "validation accuracy", "of the replicates")
"""The mean over the replicates, and each of them in the order of the seeds."""

PLAN_COLUMNS = (
    "arm",
    "role",
    "parameters",
    "training FLOPs/token",
    "steps",
    "runs",
    "tokens",
    "FLOPs",
    "hours",
    "memory",
    "what was changed",
)
"""Tokens, FLOPs and hours are those of all runs of an arm; memory is training state and saved activations of one."""


def result_rows(data: ReportData) -> list[list[str]]:
    """One row per arm."""
    return [_result_row(data, name, arm) for name, arm in data.arms.items()]


def cost_rows(data: ReportData) -> list[list[str]]:
    """One row per arm."""
    return [
        [
            name,
            _difference_at(arm, "flops"),
            _difference_at(arm, "seconds"),
            or_missing(arm.parameters, words.count),
            or_missing(arm.training_flops_per_token, words.count),
            or_missing(arm.step_seconds_ratio, words.ratio),
            or_missing(arm.peak_memory_ratio, words.ratio),
        ]
        for name, arm in data.arms.items()
    ]


def contrast_rows(data: ReportData) -> list[list[str]]:
    """One row per treatment and companion."""
    return [
        [
            one.arm,
            one.against,
            one.matched or words.MISSING,
            *_difference(one.comparison),
            verdict_cell(one.comparison, one.no_verdict),
        ]
        for one in data.contrasts
    ]


def accuracy_rows(data: ReportData) -> list[list[str]]:
    """One row per arm with finished runs, for a corpus that asks for answers; else none."""
    return [
        [name, words.percentage(statistics.fmean(values)), ", ".join(map(words.percentage, values))]
        for name, arm in data.arms.items()
        if (values := list(arm.accuracies.values()))
    ]


def verdict_cell(comparison: ComparisonData | None, no_verdict: str) -> str:
    """The verdict with the size of its family, or why there is none."""
    if comparison is None or comparison.verdict is None:
        return f"{no_verdict}: no verdict"
    return f"{comparison.remark}, family of {comparison.family}" if comparison.family else comparison.remark


def tuning_table(data: ReportData) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of the trials of learning rates: the loss of each, the chosen one marked; no rows without trials."""
    tuning = data.tuning
    if tuning is None:
        return [], []
    rates = sorted({rate for losses in tuning.losses.values() for rate in losses}, key=float)
    rows = []
    for name, losses in tuning.losses.items():
        chosen = f"{tuning.chosen[name]:g}" if name in tuning.chosen else ""
        rows.append([name, *(_trial(losses, rate, rate == chosen) for rate in rates)])
        rows[-1].append("at the end of its grid" if name in tuning.at_edge else "inside its grid" if chosen else "none trained")
    return ["arm", *(f"lr {rate}" for rate in rates), "chosen rate"], rows


def _trial(losses: Mapping[str, float | None], rate: str, chosen: bool) -> str:
    if rate not in losses:
        return words.MISSING
    loss = losses[rate]
    return "diverged" if loss is None else f"{words.loss(loss)}{' ✓' if chosen else ''}"


def rate_rows(data: ReportData) -> list[list[str]]:
    """Learning rate and weight decay of every group of the control, and of the groups in which an arm differs from it."""
    usual = {(one.what, one.lr, one.weight_decay) for one in data.arms[data.control].rates}
    return [
        [name, one.what, f"{one.lr:g}", f"{one.weight_decay:g}", str(one.tensors), words.count(one.parameters)]
        for name, arm in sorted(data.arms.items(), key=lambda item: not item[1].control)
        for one in arm.rates
        if arm.control or (one.what, one.lr, one.weight_decay) not in usual
    ]


def plan_rows(plan: StudyPlan) -> list[list[str]]:
    """One row per arm."""
    return [_plan_row(plan, arm) for arm in plan.arms]


def plan_title(plan: StudyPlan) -> str:
    """What all runs of a study come to."""
    hours = "" if plan.seconds is None else f", {_hours(plan.seconds)} of training steps one run after another"
    return f"{plan.runs} runs, {words.count(plan.tokens)} tokens, {words.count(plan.flops)} FLOPs of training in all{hours}"


def _plan_row(plan: StudyPlan, arm: PlannedArm) -> list[str]:
    runs = len(arm.seeds)
    changed = "; ".join(
        f"{change.path} {'' if change.before is None else f'{change.before} -> '}{change.after} ({change.of} of {change.to}: "
        f"{change.got / change.wanted:.3f})"
        for change in arm.changes
    )
    return [
        arm.name,
        arm.role,
        words.count(arm.parameters),
        words.count(arm.training_flops_per_token),
        str(arm.steps),
        str(runs),
        words.count(runs * arm.tokens),
        words.count(runs * arm.flops),
        or_missing(plan.seconds_of(arm), lambda seconds: _hours(runs * seconds)),
        or_missing(plan.memory_bytes(arm), words.memory),
        changed or words.MISSING,
    ]


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.2f} h"


def _result_row(data: ReportData, name: str, arm: ArmData) -> list[str]:
    decisive = arm.charged.get(data.charge)
    if arm.control:
        verdict = (
            "control" if arm.mean_loss is not None else f"control, {arm.replicates} of {arm.replicates_planned} replicates"
        )
    else:
        verdict = verdict_cell(decisive.comparison if decisive else None, arm.no_verdict)
    return [
        name,
        or_missing(arm.mean_loss, words.loss),
        *_difference(decisive.comparison if decisive else None),
        verdict,
    ]


def _difference_at(arm: ArmData, charge: Charge) -> str:
    found = arm.charged.get(charge)
    if found is None or found.comparison is None:
        return words.MISSING
    return f"{words.signed(found.comparison.mean_difference)} {found.comparison.remark or 'no verdict'}"


def _difference(comparison: ComparisonData | None) -> list[str]:
    if comparison is None:
        return [words.MISSING] * 3
    own = "no variation" if comparison.ci95 is None else words.interval(*comparison.ci95)
    simultaneous = words.MISSING if comparison.simultaneous is None else words.interval(*comparison.simultaneous)
    return [words.signed(comparison.mean_difference), simultaneous, own]


def or_missing(value: float | None, written: Callable[[float], str]) -> str:
    """The value as it is written, or what stands where there is none."""
    return words.MISSING if value is None else written(value)


COMPARED = (
    "difference",
    "sd",
    "ci95_low",
    "ci95_high",
    "bootstrap95_low",
    "bootstrap95_high",
    "p",
    "p_holm",
    "power",
    "replicates_needed",
    "verdict",
)

Rows = Iterator[Sequence[Any]]


def csv_tables(data: ReportData) -> dict[str, str]:
    """CSV text by name; a table without rows is left out."""
    made: dict[str, tuple[Sequence[str], Callable[[ReportData], Rows]]] = {
        "arms": (ARMS, _arms),
        "losses": (("arm", "seed", "loss"), _losses),
        "charged": (("arm", "charge", "cost", "cost_ratio", *COMPARED, "unavailable"), _equal_cost),
        "contrasts": (("arm", "against", "matched", *COMPARED, "no_verdict"), _contrasts),
        "speedup": (SPEEDUP, _speedup),
        "control_curve": (("by", "seed", "cost", "loss", "residual"), _control_curve),
        "curves": (("arm", "seed", "tokens", "loss"), _curves),
        "changes": (("arm", "path", "before", "after", "of", "to", "wanted", "got"), _changes),
        "timing": (("arm", "round", "step_seconds"), _timing),
        "tuning": (("arm", "lr", "loss", "chosen"), _tuning),
        "runs": (("arm", "seed", "role", "status", "message", "reused_from", "loss"), _runs),
    }
    found = {name: (columns, list(of(data))) for name, (columns, of) in made.items()}
    return {name: _csv(columns, rows) for name, (columns, rows) in found.items() if rows}


ARMS = (
    "arm",
    "role",
    "to",
    "replicates",
    "replicates_planned",
    "mean_loss",
    "steps",
    "tokens",
    "lr",
    "parameters",
    "training_flops_per_token",
    "training_flops",
    "step_seconds",
    "step_seconds_ratio",
    "seconds",
    "predicted_memory_bytes",
    "peak_memory_bytes",
    "peak_memory_ratio",
    "tokens_per_second",
    "tokens_per_second_ratio",
    "front_seconds",
    "front_memory",
    "verdict",
    "no_verdict",
    "why",
)
"""Fields of an arm, by their names in the data."""

SPEEDUP = ("arm", "by", "speedup", "ci95_low", "ci95_high", "bootstrap95_low", "bootstrap95_high", "sentence")


def _arms(data: ReportData) -> Rows:
    for name, arm in data.arms.items():
        yield name, *(getattr(arm, field) for field in ARMS[1:])


def _losses(data: ReportData) -> Rows:
    for name, arm in data.arms.items():
        for seed, loss in arm.losses.items():
            yield name, seed, loss


def _equal_cost(data: ReportData) -> Rows:
    for name, arm in data.arms.items():
        for charge, found in arm.charged.items():
            yield name, charge, found.cost, found.cost_ratio, *_compared(found.comparison), found.unavailable


def _contrasts(data: ReportData) -> Rows:
    for found in data.contrasts:
        yield found.arm, found.against, found.matched, *_compared(found.comparison), found.no_verdict


def _speedup(data: ReportData) -> Rows:
    for name, arm in data.arms.items():
        for by, found in arm.speedup.items():
            yield name, by, found.value, found.low, found.high, *(found.bootstrap95 or (None, None)), found.sentence


def _control_curve(data: ReportData) -> Rows:
    for by, curve in data.curves.items():
        for point in curve.points:
            yield by, point.seed, point.cost, point.loss, point.residual


def _curves(data: ReportData) -> Rows:
    for run in data.runs:
        for tokens, loss in run.curve:
            yield run.arm, run.seed, tokens, loss


def _changes(data: ReportData) -> Rows:
    for name, arm in data.arms.items():
        for change in arm.changes:
            yield name, change.path, change.before, change.after, change.of, change.to, change.wanted, change.got


def _timing(data: ReportData) -> Rows:
    for name, rounds in data.timing.seconds.items() if data.timing else ():
        for turn, seconds in enumerate(rounds):
            yield name, turn, seconds


def _tuning(data: ReportData) -> Rows:
    for name, losses in data.tuning.losses.items() if data.tuning else ():
        for rate, loss in losses.items():
            yield name, rate, loss, data.tuning is not None and data.tuning.chosen.get(name) == float(rate)


def _runs(data: ReportData) -> Rows:
    for run in data.runs:
        yield run.arm, run.seed, run.role, run.status, run.message, run.reused_from, run.loss


def _compared(found: ComparisonData | None) -> Sequence[Any]:
    if found is None:
        return (None,) * len(COMPARED)
    ends = [end for pair in (found.ci95, found.bootstrap95) for end in pair or (None, None)]
    return (
        found.mean_difference,
        found.sd_difference,
        *ends,
        found.p,
        found.p_holm,
        found.power,
        found.replicates_needed,
        found.verdict,
    )


def _csv(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_plain(cell) for cell in row] for row in rows)
    return file.getvalue()


def _plain(cell: Any) -> Any:
    return {True: "true", False: "false"}[cell] if isinstance(cell, bool) else cell
