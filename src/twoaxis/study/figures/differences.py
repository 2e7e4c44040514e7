"""Figures of paired differences: by the rule of the study, at equal tokens, FLOPs and seconds, and against companions."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import altair as alt

from twoaxis.display import numbers as words
from twoaxis.display.figures import Figure, shared_rows
from twoaxis.display.theme import NARROW
from twoaxis.study.figures.forest import ROW, Interval, Scale, domain, forest, label_width
from twoaxis.study.figures.labels import colors
from twoaxis.study.report_data import UNITS, Charge, ComparisonData, ContrastData, ReportData

DENSE = 17
"""Pixels from row to row where many rows have to fit a screen."""

SHORT = "difference, nats per token"
"""Title of a short axis."""


def differences(data: ReportData) -> Figure | None:
    """Every verdict: differences of the arms to the control, and between arms as the design asks."""
    rows = _rows(data, data.charge)
    asked = {space: _contrast_rows(data, data.asked, space) for space in (" ", "\n")}
    every = [*rows, *asked[" "]]
    if not any(row.mean is not None for row in every):
        return None
    scale = _scale(every, data, "difference in validation loss, nats per token")

    def draw(width: int) -> Any:
        wide = width > NARROW
        between = asked[" " if wide else "\n"]
        title, texts, row = scale.title if wide else SHORT, 262 if wide else 0, ROW if len(every) <= 10 else DENSE
        longest = [line for row in (*rows, *between) for line in row.label.split("\n")]
        labels = min(int(6.3 * max(map(len, longest))) + 18, 330) if wide else label_width(longest, width)
        if not between:
            return forest(rows, scale._replace(title=title), width, labels, texts, row_height=row)
        above = forest(rows, scale._replace(title=""), width, labels, texts, f"minus {data.control}", row)
        heading, height = "arm minus arm, as the study asks", row if wide else 34
        below = forest(between, scale._replace(title=title), width, labels, texts, heading, height)
        return alt.vconcat(above, below, spacing=8) if any(row.mean is not None for row in rows) else below

    caption = "Left of zero is better. " + _marks(data, data.charge) + _band_in_words(data)
    if any(row.verdict in ("better", "worse") and 0.0 in (row.low, row.high) for row in every):
        caption += " A bar that ends at zero excludes it: Holm's correction rejects zero there, Bonferroni's would not."
    title = f"Difference to {data.control} at equal {UNITS[data.charge]}"
    return Figure("differences", title, caption, _describe(every), draw)


def equal_cost(data: ReportData) -> Figure | None:
    """Paired differences of the arms at equal tokens, FLOPs and seconds."""
    order = [row.label for row in _rows(data, data.charge)]
    panels: dict[Charge, list[Interval]] = {}
    for charge in UNITS:
        rows = sorted((row._replace(each=()) for row in _rows(data, charge)), key=lambda row: order.index(row.label))
        if any(row.mean is not None for row in rows):
            panels[charge] = rows
    if len(panels) < 2:
        return None
    scale = _scale([row for rows in panels.values() for row in rows], data, SHORT)

    def draw(width: int) -> Any:
        phone, drawn = width <= NARROW, []
        for charge, rows in panels.items():
            # One below the other, the panels need the numbers of their scale once.
            shown = scale._replace(title="") if phone and charge != [*panels][-1] else scale
            height = DENSE if phone else ROW
            drawn.append(partial(forest, rows, shown, heading=f"equal {UNITS[charge]}", row_height=height))
        return shared_rows(drawn, width, label_width(order, width))

    caption = (
        f"The same arms in the same order, given as much as {data.control} of one thing after the other; left of zero is "
        "better. " + _marks(data, data.charge, "") + _band_in_words(data)
    )
    description = " ".join(f"At equal {UNITS[charge]}: {_describe(rows)}" for charge, rows in panels.items())
    return Figure("charged", "Equal tokens, equal FLOPs, equal seconds", caption, description, draw)


def contrasts(data: ReportData) -> Figure | None:
    """Differences of arms to the companions that rule out other explanations."""
    found = [one for one in data.contrasts if one not in data.asked]
    one_line, two_lines = (_contrast_rows(data, found, space) for space in (" ", "\n"))
    if not any(row.mean is not None for row in one_line):
        return None
    scale = _scale(one_line, data, "difference in validation loss, nats per token")

    def draw(width: int) -> Any:
        if width <= NARROW:
            labels = label_width([one.against for one in found], width)
            return forest(two_lines, scale._replace(title=SHORT), width, labels, row_height=34)
        labels = min(int(6.3 * max(len(row.label) for row in one_line)) + 18, 330)
        return forest(one_line, scale, width, labels, texts=262)

    caption = (
        "Each arm minus one of its companions, in pairs; left of zero the arm is better. "
        + _marks(data, data.charge)
        + _band_in_words(data)
    )
    return Figure("contrasts", "Against companions", caption, _describe(one_line), draw)


def smallest_effect(data: ReportData) -> float | None:
    """The smallest difference that matters, in nats per token."""
    value = data.design.get("decision", {}).get("smallest_effect")
    return float(value) if isinstance(value, int | float) else None


def _contrast_rows(data: ReportData, found: Sequence[ContrastData], space: str) -> list[Interval]:
    color = colors(data)
    return [
        _interval(f"{one.arm} {words.MINUS}{space}{one.against}", color[one.arm], one.comparison, one.no_verdict)
        for one in found
    ]


def _rows(data: ReportData, charge: Charge) -> list[Interval]:
    """The treatments, sorted by their mean."""
    color = colors(data)
    rows: list[tuple[float, Interval]] = []
    for name, arm in data.arms.items():
        if arm.role != "treatment":
            continue
        found = arm.charged.get(charge)
        comparison = found.comparison if found else None
        why = arm.no_verdict or (found.unavailable if found else "") or "not compared"
        row = _interval(name, color[name], comparison, why)
        rows.append((float("inf") if row.mean is None else row.mean, row))
    return [row for _, row in sorted(rows, key=lambda found: found[0])]


def _interval(label: str, color: str, comparison: ComparisonData | None, why: str) -> Interval:
    if comparison is None:
        return Interval(label, color, text=why, verdict="no verdict", description=f"{label}: no verdict, {why}")
    own = comparison.ci95
    mean = (comparison.mean_difference, comparison.mean_difference)
    # Old reports have only the uncorrected interval.
    thick = comparison.simultaneous or (own if comparison.verdict else None)
    low, high = thick or mean
    # Short, at the end of a row; the caption explains it.
    verdict = "suggestive" if comparison.suggestive else comparison.verdict or "no verdict"
    text = f"{words.signed(comparison.mean_difference)}  ({words.interval(*(thick or own or mean))})"
    thin = own if thick is not own else None
    inner = f", own 95 % interval {words.interval(*thin)}" if thin else ""
    description = (
        f"{label.replace(chr(10), ' ')}: {words.signed(comparison.mean_difference)}, {words.interval(*(thick or own or mean))}"
        f"{inner}, {verdict}"
    )
    each = comparison.paired_differences
    return Interval(label, color, comparison.mean_difference, low, high, each, text, verdict, description, thin)


def _scale(rows: Sequence[Interval], data: ReportData, title: str) -> Scale:
    effect = smallest_effect(data)
    ends = () if effect is None else (-effect, effect)
    return Scale(title, 0.0, None if effect is None else (-effect, effect), domain(rows, *ends))


def _band_in_words(data: ReportData) -> str:
    effect = smallest_effect(data)
    return "" if effect is None else f" Shaded: differences smaller than {effect:g} nats per token, which do not matter here."


def _marks(data: ReportData, charge: Charge, each: str = "small bars: each replicate; ") -> str:
    """Explains the marks of a row."""
    families = {
        found.comparison.family
        for arm in data.arms.values()
        if (found := arm.charged.get(charge)) and found.comparison and found.comparison.family
    }
    start = f"Point: mean of the paired differences; {each}"
    if not families:
        return f"{start}line: its own 95 % interval."
    return (
        f"{start}wide bar: the interval of the verdict, simultaneous over {max(families)} comparisons; line inside: its own "
        "95 % interval. Suggestive: undecided, though its own interval excludes zero."
    )


def _describe(rows: Sequence[Interval]) -> str:
    return "; ".join(row.description for row in rows) + "."
