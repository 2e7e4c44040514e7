"""The tables of a study, as rows of text for terminals and as CSV: results, costs, contrasts, tuning, and the plan."""

import csv
import io
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from twoaxis.display import numbers as words
from twoaxis.study.planning.study_plan import PlannedArm, StudyPlan
from twoaxis.study.report_data import ArmData, Charge, ComparisonData, ReportData

RESULT_COLUMNS = (
    "arm",
    "validation loss, nats/token",
    "difference",
    "simultaneous interval",
    "own 95 % interval",
    "verdict",
)
"""The difference is the mean over replicates of arm minus control, at the equal cost of the verdicts, in nats per token; below
zero is better. The simultaneous interval is that of the verdict, which names the size of its family."""

COST_COLUMNS = (
    "arm",
    "at equal FLOPs",
    "at equal seconds",
    "parameters",
    "training FLOPs/token",
    "seconds to control",
    "peak memory to control",
)
"""Differences at equal FLOPs and seconds with their verdicts, and the costs of an arm."""

CONTRAST_COLUMNS = ("arm", "against", "matched by", "difference", "simultaneous interval", "own 95 % interval", "verdict")

RATE_COLUMNS = ("arm", "parameters of", "learning rate", "weight decay", "tensors", "count")
"""One row per arm and group of parameters; groups optimised as in the control are left out."""

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
    """One row per arm with finished runs, for a corpus with answers; else none."""
    return [
        [name, words.percentage(statistics.fmean(values)), ", ".join(map(words.percentage, values))]
        for name, arm in data.arms.items()
        if (values := list(arm.accuracies.values()))
    ]


def verdict_cell(comparison: ComparisonData | None, no_verdict: str) -> str:
    """The verdict with the size of its family, or the reason for having none."""
    if comparison is None or comparison.verdict is None:
        return f"{no_verdict}: no verdict"
    return f"{comparison.remark}, family of {comparison.family}" if comparison.family else comparison.remark


def tuning_table(data: ReportData) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of the trials of learning rates: losses, with the chosen one marked; empty without trials."""
    tuning = data.tuning
    if tuning is None:
        return [], []
    rows = []
    for name, losses in tuning.losses.items():
        where = "at the end of its grid" if name in tuning.at_edge else "inside its grid"
        trials = [_trial(losses, rate, tuning.is_chosen(name, rate)) for rate in tuning.rates]
        open_ = not tuning.chosen and any(rate not in losses or losses[rate] is not None for rate in tuning.rates)
        rows.append([name, *trials, where if name in tuning.chosen else "not chosen yet" if open_ else "none trained"])
    return ["arm", *(f"lr {rate}" for rate in tuning.rates), "chosen rate"], rows


def _trial(losses: Mapping[str, float | None], rate: str, chosen: bool) -> str:
    if rate not in losses:
        return words.MISSING
    loss = losses[rate]
    return "diverged" if loss is None else f"{words.loss(loss)}{' ✓' if chosen else ''}"


def rate_rows(data: ReportData) -> list[list[str]]:
    """Optimizer settings of every group of the control, and of groups in which an arm differs."""
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
    """The totals of all runs of a study."""
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
    """The formatted value, or the mark of a missing one."""
    return words.MISSING if value is None else written(value)


COMPARED = (
    "difference",
    "sd",
    "ci95_low",
    "ci95_high",
    "simultaneous_low",
    "simultaneous_high",
    "family",
    "bootstrap95_low",
    "bootstrap95_high",
    "p",
    "p_holm",
    "power",
    "replicates_needed",
    "verdict",
)

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

CHANGES = ("path", "before", "after", "of", "to", "wanted", "got")
POINTS = ("seed", "cost", "loss", "residual")
RUNS = ("arm", "seed", "role", "status", "message", "reused_from", "loss")
ABLATIONS = ("what", "sublayer", "target", "choice", "replacement", "loss_change", "standard_error", "control_loss_change")
SPEEDUP = ("arm", "by", "speedup", "ci95_low", "ci95_high", "bootstrap95_low", "bootstrap95_high", "sentence")


def csv_tables(data: ReportData) -> dict[str, str]:
    """CSV text by name; "" for a table without rows."""
    arms = data.arms.items()
    tuning, rounds = data.tuning, data.timing.seconds if data.timing else {}
    made: dict[str, tuple[Sequence[str], list[Sequence[Any]]]] = {
        "arms": (ARMS, [(name, *_fields(arm, ARMS[1:])) for name, arm in arms]),
        "losses": (("arm", "seed", "loss"), [(name, *one) for name, arm in arms for one in arm.losses.items()]),
        "charged": (
            ("arm", "charge", "cost", "cost_ratio", *COMPARED, "unavailable"),
            [
                (name, charge, one.cost, one.cost_ratio, *_compared(one.comparison), one.unavailable)
                for name, arm in arms
                for charge, one in arm.charged.items()
            ],
        ),
        "contrasts": (
            ("arm", "against", "matched", *COMPARED, "no_verdict"),
            [(one.arm, one.against, one.matched, *_compared(one.comparison), one.no_verdict) for one in data.contrasts],
        ),
        "speedup": (
            SPEEDUP,
            [
                (name, by, one.value, one.low, one.high, *(one.bootstrap95 or (None, None)), one.sentence)
                for name, arm in arms
                for by, one in arm.speedup.items()
            ],
        ),
        "control_curve": (
            ("by", *POINTS),
            [(by, *_fields(point, POINTS)) for by, curve in data.curves.items() for point in curve.points],
        ),
        "curves": (("arm", "seed", "tokens", "loss"), [(run.arm, run.seed, *at) for run in data.runs for at in run.curve]),
        "changes": (("arm", *CHANGES), [(name, *_fields(one, CHANGES)) for name, arm in arms for one in arm.changes]),
        "timing": (
            ("arm", "round", "step_seconds"),
            [(name, turn, seconds) for name, times in rounds.items() for turn, seconds in enumerate(times)],
        ),
        "tuning": (
            ("arm", "lr", "loss", "chosen"),
            []
            if tuning is None
            else [
                (name, lr, loss, tuning.is_chosen(name, lr))
                for name, trials in tuning.losses.items()
                for lr, loss in trials.items()
            ],
        ),
        "ablations": (
            ("arm", *ABLATIONS),
            [(name, *map(one.get, ABLATIONS)) for name, arm in arms for one in (arm.audit or {}).get("ablations", ())],
        ),
        "runs": (RUNS, [_fields(run, RUNS) for run in data.runs]),
    }
    return {name: _csv(columns, rows) if rows else "" for name, (columns, rows) in made.items()}


def _fields(one: Any, names: Sequence[str]) -> tuple[Any, ...]:
    return tuple(getattr(one, name) for name in names)


def _compared(found: ComparisonData | None) -> Sequence[Any]:
    if found is None:
        return (None,) * len(COMPARED)
    own, wide, bootstrap = (pair or (None, None) for pair in (found.ci95, found.simultaneous, found.bootstrap95))
    return (
        found.mean_difference,
        found.sd_difference,
        *own,
        *wide,
        found.family,
        *bootstrap,
        found.p,
        found.p_holm,
        found.power,
        found.replicates_needed,
        found.verdict,
    )


def _csv(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([str(cell).lower() if isinstance(cell, bool) else cell for cell in row] for row in rows)
    return file.getvalue()
