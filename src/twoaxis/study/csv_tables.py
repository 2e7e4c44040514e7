"""The tables of a report as CSV, with all digits, for other programs; what is not known is an empty cell."""

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from twoaxis.study.report_data import ComparisonData, ReportData

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


def tables(data: ReportData) -> dict[str, str]:
    """CSV text by name; a table without rows is left out."""
    made: dict[str, tuple[Sequence[str], Callable[[ReportData], Rows]]] = {
        "arms": (ARMS, _arms),
        "losses": (("arm", "seed", "loss"), _losses),
        "charged": (("arm", "charge", "cost", "cost_ratio", *COMPARED, "unavailable"), _charged),
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


def _charged(data: ReportData) -> Rows:
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
