"""The costs of the arms, counted and measured, and learning rates."""

import statistics

from twoaxis.display import numbers as words
from twoaxis.display.html import Cell, Markup, Number, figure, joined, number, paragraph, table
from twoaxis.study.page.results import Figures
from twoaxis.study.report.text_tables import RATE_COLUMNS, rate_rows
from twoaxis.study.report_data import ReportData

COLUMNS = (
    "arm",
    "parameters",
    "FLOPs per token",
    "to control",
    "memory",
    "s per step",
    "to control ",
    "s of a run",
    "peak memory",
    "to control  ",
    "tokens per s",
    "to control   ",
)
"""Trailing blanks make names unique."""

GROUPS = (("", 1), ("by the ledger, before the runs", 4), ("measured, in turns", 3), ("measured, in the runs", 4))


def costs(data: ReportData, figures: Figures) -> str:
    """The section of counted and measured costs."""
    control = data.arms[data.control].training_flops_per_token
    rows: list[tuple[Cell, ...]] = []
    for name, arm in data.arms.items():
        flops = arm.training_flops_per_token
        over = flops / control if flops is not None and control else None
        rows.append(
            (
                name,
                number(arm.parameters, words.count),
                number(flops, words.count),
                number(over, words.ratio),
                number(arm.predicted_memory_bytes, words.memory),
                number(arm.step_seconds, lambda value: f"{value:.3g}"),
                number(arm.step_seconds_ratio, words.ratio),
                number(arm.seconds, lambda value: f"{value:.3g}"),
                number(arm.peak_memory_bytes, words.memory),
                number(arm.peak_memory_ratio, words.ratio),
                number(arm.tokens_per_second, lambda value: f"{value:,.0f}"),
                number(arm.tokens_per_second_ratio, words.ratio),
            )
        )
    caption = (
        "Costs by arm. Training FLOPs are counted forward and backward. The ledger's memory is that of parameters, gradients, "
        "optimizer and saved activations; the measured peak is that of the whole process, so only its ratio compares."
    )
    return joined(
        figure(figures.get("costs")),
        table(caption, COLUMNS, rows, groups=GROUPS),
        paragraph(_timing(data), "note"),
        _timings(data),
        _changes(data),
        _tuning(data),
        _rates(data),
    )


def _timing(data: ReportData) -> str:
    if data.timing is None:
        return ""
    rounds = max(map(len, data.timing.seconds.values()), default=0)
    twice = " before the runs, and as many after the last" if data.timing.seconds_after else ""
    checked = f" {data.timing.sentence[:1].upper()}{data.timing.sentence[1:]}." if data.timing.sentence else ""
    return (
        f"Seconds were measured without telemetry in {rounds} rounds{twice}, in each of which every arm had its turn of "
        f"{data.timing.steps_in_a_turn} steps after {data.timing.warmup_steps} steps of warm-up, so that a machine that drifts "
        f"hits all arms alike.{checked}"
    )


def _timings(data: ReportData) -> str:
    """Both timings of every arm, where there are two."""
    timing = data.timing
    if timing is None or timing.seconds_after is None:
        return ""
    rows: list[tuple[Cell, ...]] = []
    for name, seconds in timing.seconds.items():
        both = [statistics.median(seconds), statistics.median(timing.seconds_after.get(name, seconds))]
        rows.append(
            (name, *(number(value, lambda value: f"{value:.4g}") for value in both), number(both[1] / both[0], words.ratio))
        )
    caption = "Median seconds of a step before the runs and after the last"
    return table(caption, ("arm", "before", "after", "after over before"), rows)


def _rates(data: ReportData) -> str:
    rows: list[tuple[Cell, ...]] = [tuple(row) for row in rate_rows(data)]
    caption = (
        f"Optimiser groups: all of {data.control}, and those of other arms that are optimised otherwise or hold parameters of "
        "another kind."
    )
    return table(caption, RATE_COLUMNS, rows, text=(RATE_COLUMNS[1],)) if rows else ""


def _changes(data: ReportData) -> str:
    rows: list[tuple[Cell, ...]] = []
    for name, arm in data.arms.items():
        for change in arm.changes:
            before = "was not there" if change.before is None else setting(change.before)
            error = change.got / change.wanted - 1 if change.wanted else 0.0
            missed = Number(f"{words.MINUS if error < 0 else '+'}{abs(100 * error):.1f} %", error)
            costs = (number(change.wanted, words.count), number(change.got, words.count), missed)
            rows.append((name, change.path, before, setting(change.after), f"{_of(change.of)} of {change.to}", *costs))
    columns = ("arm", "setting", "before", "now", "to match", "wanted", "got", "missed by")
    text = ("setting", "before", "now", "to match")
    return table("What the planner changed so that arms match, before the first run", columns, rows, text=text) if rows else ""


def _of(cost: str) -> str:
    return {"flops": "FLOPs", "params": "parameters"}.get(cost, cost)


def _tuning(data: ReportData) -> str:
    tuning = data.tuning
    if tuning is None:
        return ""
    rows: list[tuple[Cell, ...]] = []
    for name, losses in tuning.losses.items():
        cells: list[Cell] = []
        for rate in tuning.rates:
            loss = losses.get(rate)
            if loss is None:
                cells.append("diverged" if rate in losses else None)
            elif tuning.is_chosen(name, rate):
                cells.append(Markup("<strong>{}</strong> ✓").format(words.loss(loss)))
            else:
                cells.append(Number(words.loss(loss), loss))
        rows.append((name, *cells))
    each = f"A trial reads {words.count(tuning.tokens_each)} tokens. " if tuning.tokens_each else ""
    edge = (
        f" At the end of its grid, so that a better rate may lie outside: {', '.join(tuning.at_edge)}."
        if tuning.at_edge
        else ""
    )
    caption = (
        f"Validation loss of one trial for each learning rate, with seed {tuning.seed}, which is none of the replicates; ✓ was "
        f"chosen. {each}All trials together read {words.count(tuning.tokens)} tokens.{edge}"
    )
    return table(caption, ("arm", *(f"lr {float(rate):g}" for rate in tuning.rates)), rows)


def setting(value: object) -> str:
    """Formats a setting without Python notation."""
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(setting, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {setting(inner)}" for key, inner in value.items()) + "}"
    return str(value)
