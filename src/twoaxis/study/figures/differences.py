"""Figures of paired differences: by the rule of the study, at equal tokens, FLOPs and seconds, and against companions."""

from collections.abc import Sequence
from typing import Any

import altair as alt

from twoaxis.display import numbers as words
from twoaxis.display.figures import Figure
from twoaxis.display.theme import NARROW
from twoaxis.study.figures.arms import colors
from twoaxis.study.figures.forest import Interval, Scale, domain, forest, label_width
from twoaxis.study.report_data import Charge, ComparisonData, ReportData

SHORT = "difference, nats per token"
"""Of an axis where there is no room for more."""

CHARGES: dict[Charge, str] = {"tokens": "equal tokens", "flops": "equal FLOPs", "seconds": "equal seconds"}


def differences(data: ReportData) -> Figure | None:
    """The paired difference of every arm by which it is judged."""
    rows = _rows(data, data.charge)
    if not any(row.mean is not None for row in rows):
        return None
    scale = _scale(rows, data, f"difference in validation loss to {data.control}, nats per token")

    def draw(width: int) -> Any:
        labels = label_width([row.label for row in rows], width)
        if width <= NARROW:
            return forest(rows, scale._replace(title=SHORT), width, labels)
        return forest(rows, scale, width, labels, texts=262)

    caption = (
        "Left of zero is better. "
        + _marks(data, data.charge)
        + _band_in_words(data)
        + " Companions are grey, below the arms that the study asks about; both groups are sorted by their mean."
    )
    return Figure("differences", f"Difference to {data.control} at {CHARGES[data.charge]}", caption, _told(rows), draw)


def charged(data: ReportData) -> Figure | None:
    """The paired difference of every arm at equal tokens, FLOPs and seconds."""
    order = [row.label for row in _rows(data, data.charge)]
    panels: dict[Charge, list[Interval]] = {}
    for charge in CHARGES:
        rows = sorted(_rows(data, charge), key=lambda row: order.index(row.label))
        if any(row.mean is not None for row in rows):
            panels[charge] = rows
    if len(panels) < 2:
        return None
    scale = _scale([row for rows in panels.values() for row in rows], data, SHORT)

    def draw(width: int) -> Any:
        labels = label_width(order, width)
        if width <= NARROW:
            return alt.vconcat(*(forest(rows, scale, width, labels, heading=CHARGES[at]) for at, rows in panels.items()))
        each = (width - labels - 22 * (len(panels) - 1)) // len(panels)
        drawn = [
            forest(rows, scale, each + (0 if at else labels), 0 if at else labels, heading=CHARGES[charge])
            for at, (charge, rows) in enumerate(panels.items())
        ]
        return alt.hconcat(*drawn)

    caption = (
        f"The same arms in the same order, given as much as {data.control} of one thing after the other; left of zero is "
        "better. " + _marks(data, data.charge) + _band_in_words(data)
    )
    told = " ".join(f"At {CHARGES[charge]}: {_told(rows)}" for charge, rows in panels.items())
    return Figure("charged", "Equal tokens, equal FLOPs, equal seconds", caption, told, draw)


def contrasts(data: ReportData) -> Figure | None:
    """Treatments against their companions."""
    color = colors(data)
    one_line, two_lines = (
        [
            _interval(f"{found.arm} {words.MINUS}{space}{found.against}", color[found.arm], found.comparison, found.no_verdict)
            for found in data.contrasts
        ]
        for space in (" ", "\n")
    )
    if not any(row.mean is not None for row in one_line):
        return None
    scale = _scale(one_line, data, "difference in validation loss, nats per token")

    def draw(width: int) -> Any:
        if width <= NARROW:
            labels = label_width([found.against for found in data.contrasts], width)
            return forest(two_lines, scale._replace(title=SHORT), width, labels, row_height=34)
        labels = min(int(6.3 * max(len(row.label) for row in one_line)) + 18, 330)
        return forest(one_line, scale, width, labels, texts=262)

    caption = (
        "Each arm minus one of its companions, in pairs; left of zero means that the arm is better than what was put in its "
        "place. " + _marks(data, data.charge) + _band_in_words(data)
    )
    return Figure("contrasts", "Against companions", caption, _told(one_line), draw)


def smallest_effect(data: ReportData) -> float | None:
    """The smallest difference that matters, in nats per token."""
    value = data.design.get("decision", {}).get("smallest_effect")
    return float(value) if isinstance(value, int | float) else None


def _rows(data: ReportData, charge: Charge) -> list[Interval]:
    color = colors(data)
    rows: list[tuple[bool, float, Interval]] = []
    for name, arm in data.arms.items():
        if arm.control or arm.role not in ("treatment", "companion"):
            continue
        found = arm.charged.get(charge)
        comparison = found.comparison if found else None
        why = arm.no_verdict or (found.unavailable if found else "") or "not compared"
        row = _interval(name, color[name], comparison, why)
        rows.append((arm.role == "companion", float("inf") if row.mean is None else row.mean, row))
    return [row for _, _, row in sorted(rows, key=lambda found: found[:2])]


def _interval(label: str, color: str, comparison: ComparisonData | None, why: str) -> Interval:
    if comparison is None:
        return Interval(label, color, None, None, None, verdict="no verdict", told=f"{label}: no verdict, {why}")
    own = comparison.ci95
    mean = (comparison.mean_difference, comparison.mean_difference)
    # Without a verdict there is no interval of one; reports of before have only their own, drawn as theirs was.
    thick = comparison.simultaneous or (own if comparison.verdict else None)
    low, high = thick or mean
    # Short, since it stands at the end of a row; the caption explains it.
    verdict = "suggestive" if comparison.suggestive else comparison.verdict or "no verdict"
    text = f"{words.signed(comparison.mean_difference)}  ({words.interval(*(thick or own or mean))})"
    told = f"{label}: {words.signed(comparison.mean_difference)}, {words.interval(*(thick or own or mean))}, {verdict}"
    thin = own if thick is not own else None
    each = comparison.paired_differences
    return Interval(label, color, comparison.mean_difference, low, high, each, text, verdict, told, thin)


def _scale(rows: Sequence[Interval], data: ReportData, title: str) -> Scale:
    effect = smallest_effect(data)
    ends = () if effect is None else (-effect, effect)
    return Scale(title, 0.0, None if effect is None else (-effect, effect), domain(rows, *ends))


def _band_in_words(data: ReportData) -> str:
    effect = smallest_effect(data)
    return "" if effect is None else f" Shaded: differences smaller than {effect:g} nats per token, which do not matter here."


def _marks(data: ReportData, charge: Charge) -> str:
    """What the marks of a row stand for."""
    families = {
        found.comparison.family
        for arm in data.arms.values()
        if (found := arm.charged.get(charge)) and found.comparison and found.comparison.family
    }
    start = "Point: mean of the paired differences; small bars: each replicate; "
    if not families:
        return f"{start}line: its own 95 % interval."
    return (
        f"{start}thick line: the interval of the verdict, simultaneous over {max(families)} comparisons; thin line below: its "
        "own 95 % interval. Suggestive: undecided, though its own interval excludes zero."
    )


def _told(rows: Sequence[Interval]) -> str:
    return "; ".join(row.told for row in rows) + "."
