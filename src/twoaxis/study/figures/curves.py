"""Figures along training: the loss with its spread over seeds, and the paired difference of each arm."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import altair as alt

from twoaxis.display import numbers as words
from twoaxis.display.figures import Figure, own_color, values
from twoaxis.display.theme import GRID, INK, NARROW, PAPER, SIGNED
from twoaxis.study.figures.labels import Frame, Stroke, colors, spread, stroke
from twoaxis.study.report_data import ReportData

STROKES: dict[Stroke, dict[str, Any]] = {
    "thin": {"strokeWidth": 1.1, "strokeDash": [4, 2]},
    "broken": {"strokeWidth": 2, "strokeDash": [7, 3]},
    "full": {"strokeWidth": 2},
}
"""Styles of lines, in drawing order."""


class Line(NamedTuple):
    """Mean, minimum and maximum of an arm over its seeds, by tokens read."""

    arm: str
    points: tuple[tuple[int, float, float, float], ...]

    @property
    def last(self) -> float:
        """The mean at the end."""
        return self.points[-1][1]


def losses(data: ReportData) -> Figure | None:
    """Validation loss against tokens."""
    lines = _lines(data, _curves(data))
    if not lines:
        return None

    def draw(width: int) -> Any:
        height = max(360, 13 * len(lines)) if width > NARROW else 260
        labelled = [line for line in lines if width > NARROW or data.arms[line.arm].role != "companion"]
        return _labelled(data, lines, labelled, width, height, _late(lines, 0.25))

    strokes = {stroke(data, line.arm) for line in lines}
    caption = (
        f"Line: {_line(data)}; shaded: their range{', for all but companions' if 'thin' in strokes else ''}. "
        f"{'Dashed grey: companions, labelled where there is room. ' if 'thin' in strokes else ''}"
        f"{'Dashed: arms whose colour another arm has too. ' if 'broken' in strokes else ''}"
        "The first quarter of training may leave the frame."
    )
    description = (
        "At the end: " + "; ".join(f"{line.arm} {words.loss(line.last)}" for line in _sorted(lines)) + " nats per token."
    )
    return Figure("losses", "Validation loss along training", caption, description, draw)


def paired(data: ReportData) -> Figure | None:
    """The difference to the control of the same seed against tokens, one panel for each arm."""
    curves = _curves(data)
    control = curves.get(data.control, {})
    differences = {
        arm: {seed: {at: loss - control[seed][at] for at, loss in curve.items() if at in control[seed]}
              for seed, curve in by_seed.items() if seed in control}
        for arm, by_seed in curves.items() if arm != data.control
    }  # fmt: skip
    lines = _sorted(_lines(data, differences))
    if not lines:
        return None
    order = [line for role in ("treatment", "companion") for line in lines if data.arms[line.arm].role == role]

    def draw(width: int) -> Any:
        columns = 2 if width <= NARROW else min((4, 5, 6), key=lambda count: (-len(order) % count, -count))
        each, y_range = (width - 40) // columns - 14, _late(order, 0.5)
        last = len(order) - columns
        panels = [_panel(data, line, each, y_range, at % columns == 0, at >= last) for at, line in enumerate(order)]
        return alt.concat(*panels, columns=columns, spacing=12)

    caption = (
        f"Loss of each arm minus that of {data.control} with the same seed, at the same tokens; below the line is better. "
        f"Line: {_line(data)}; shaded: from the least to the greatest. All panels share one scale, that of the second half of "
        "training, and are sorted by the difference at the end, companions last."
    )
    description = "At the end: " + "; ".join(f"{line.arm} {words.signed(line.last)}" for line in order) + " nats per token."
    return Figure("paired", f"Difference to {data.control} along training", caption, description, draw)


Curves = Mapping[str, Mapping[int, Mapping[int, float]]]
"""Losses by arm, seed and tokens."""


def _curves(data: ReportData) -> dict[str, dict[int, dict[int, float]]]:
    """The curves of the seeds that every arm with a curve has, since arms over different seeds cannot be compared."""
    found: dict[str, dict[int, dict[int, float]]] = {}
    for run in data.runs:
        if run.arm in data.arms and run.curve and run.loss is not None:
            found.setdefault(run.arm, {})[run.seed] = dict(run.curve)
    shared = set[int].intersection(*map(set, found.values())) if found else set()
    return {arm: {seed: by_seed[seed] for seed in sorted(shared)} for arm, by_seed in found.items()}


def _line(data: ReportData) -> str:
    """What a line is: a mean over all seeds, or over those with curves."""
    shown = sorted({seed for by_seed in _curves(data).values() for seed in by_seed})
    n = max(arm.replicates for arm in data.arms.values())
    if len(shown) == n:
        return "mean over seeds"
    some = f"mean over the {len(shown)}" if len(shown) > 1 else f"seed {shown[0]}, the only one"
    return f"{some} of {n} seeds whose curves are kept for every arm"


def _lines(data: ReportData, curves: Curves) -> list[Line]:
    lines = []
    for arm in data.arms:
        by_seed = curves.get(arm, {})
        places = sorted(set.intersection(*(set(curve) for curve in by_seed.values()))) if by_seed else []
        points = []
        for at in places:
            found = [curve[at] for curve in by_seed.values()]
            points.append((at, statistics.fmean(found), min(found), max(found)))
        if points:
            lines.append(Line(arm, tuple(points)))
    return lines


def _sorted(lines: Sequence[Line]) -> list[Line]:
    return sorted(lines, key=lambda line: line.last)


def _late(lines: Sequence[Line], begin: float) -> tuple[float, float]:
    """The range of values after a fraction of training; early values are large."""
    last = max(point[0] for line in lines for point in line.points)
    found = [end for line in lines for at, _, low, high in line.points if at >= begin * last for end in (low, high)]
    margin = 0.06 * (max(found) - min(found)) or 0.01
    return min(found) - margin, max(found) + margin


def _table(line: Line, color: str) -> list[dict[str, Any]]:
    common = {"arm": line.arm, "color": color, "description": _at(line.arm, line.last, "the end")}
    return [
        common | {"x": at, "y": mean, "low": low, "high": high, "here": _at(line.arm, mean, f"{words.count(at)} tokens")}
        for at, mean, low, high in line.points
    ]


def _at(arm: str, value: float, place: str) -> str:
    return f"{arm}: {words.loss(value).replace('-', words.MINUS)} at {place}"


def _labelled(
    data: ReportData, lines: Sequence[Line], labelled: Sequence[Line], width: int, height: int, y_range: tuple[float, float]
) -> Any:
    size = 11 if width > NARROW else 9.5
    color, room = colors(data), int(0.6 * size * max(len(line.arm) for line in labelled)) + 22
    inner = width - room - 58
    axis = alt.Axis(format="~s", tickCount=max(3, inner // 110), grid=False)
    x = alt.X("x:Q", title="tokens read", axis=axis, scale=alt.Scale(nice=False))
    y: dict[str, Any] = {
        "title": "validation loss, nats per token",
        "scale": alt.Scale(domain=list(y_range), nice=False),
        "axis": alt.Axis(tickCount=6, format=".2f"),
    }
    rows = {line.arm: _table(line, color[line.arm]) for line in lines}
    bands = values([row for arm, table in rows.items() if data.arms[arm].role != "companion" for row in table])
    band = bands.mark_area(opacity=0.1, clip=True, aria=False)
    layers = [band.encode(x=x, y=alt.Y("low:Q", **y), y2=alt.Y2("high"), color=own_color(), detail=alt.Detail("arm:N"))]
    for kind, mark in STROKES.items():
        drawn = values([row for arm, table in rows.items() if stroke(data, arm) == kind for row in table])
        mean = drawn.mark_line(clip=True, **mark)
        layers.append(
            mean.encode(
                x=x,
                y=alt.Y("y:Q", **y),
                color=own_color(),
                detail=alt.Detail("arm:N"),
                description=alt.Description("description:N"),
            )
        )
    # What a pointer finds along the lines, but for those that cross in a crowd.
    found = [row for line in labelled for row in rows[line.arm] if y_range[0] <= row["y"] <= y_range[1]]
    seen = values([row for row in found if data.arms[row["arm"]].role != "companion" and width > NARROW])
    places = seen.mark_point(shape="square", filled=True, size=90, opacity=0, color=PAPER).encode(x=x, y=alt.Y("y:Q", **y))
    layers.append(places.encode(description=alt.Description("here:N")))
    frame = Frame((0.0, 1.0), y_range, inner, height)
    wanted = [frame.pixel(0.0, line.last)[1] for line in labelled]
    ends = [
        {"arm": line.arm, "color": color[line.arm], "last": line.last, "y": frame.value(0.0, at)[1]}
        for line, at in zip(labelled, spread(wanted, 12.5, 4, height - 4), strict=True)
    ]
    end = values(ends).encode(color=own_color())
    leader = end.mark_rule(opacity=0.6, strokeWidth=0.8, aria=False)
    layers.append(leader.encode(x=alt.XValue(inner + 1), x2=alt.X2Value(inner + 13), y=alt.Y("last:Q", **y), y2=alt.Y2("y")))
    text = end.mark_text(align="left", fontSize=size, aria=False)
    layers.append(text.encode(x=alt.XValue(inner + 16), y=alt.Y("y:Q", **y), text=alt.Text("arm:N")))
    return alt.layer(*layers).properties(width=inner, height=height)


def _panel(data: ReportData, line: Line, width: int, y_range: tuple[float, float], first: bool, last: bool) -> Any:
    color = colors(data)[line.arm]
    drawn = values(_table(line, color))
    low, high = min(y_range[0], 0.0), max(y_range[1], 0.0)
    room: dict[str, Any] = {"minExtent": 34 if first else 0, "maxExtent": 34}
    axis = alt.Axis(tickCount=3, labelExpr=SIGNED, labels=first, ticks=False, domain=False, **room)
    y: dict[str, Any] = {"title": None, "scale": alt.Scale(domain=[low, high], nice=False), "axis": axis}
    tokens = alt.Axis(format="~s", tickCount=2, grid=False, labels=last, ticks=last)
    x = alt.X("x:Q", title=None, axis=tokens, scale=alt.Scale(nice=False))
    title = alt.TitleParams(line.arm, fontSize=11, fontWeight="normal", color=color, limit=width, offset=4)
    band = drawn.mark_area(opacity=0.18, clip=True, aria=False, color=color)
    # Away from the line.
    top = line.last < (low + high) / 2
    end = values([{"text": words.signed(line.last)}]).mark_text(
        align="right", baseline="top" if top else "bottom", fontSize=11, color=INK, aria=False
    )
    return alt.layer(
        values([{"y": 0.0}]).mark_rule(color=INK, strokeWidth=0.8).encode(y=alt.Y("y:Q", **y)),
        band.encode(x=x, y=alt.Y("low:Q", **y), y2=alt.Y2("high")),
        drawn.mark_line(strokeWidth=1.8, clip=True, color=color).encode(
            x=x, y=alt.Y("y:Q", **y), description=alt.Description("description:N")
        ),
        end.encode(x=alt.XValue(width - 2), y=alt.YValue(3 if top else 81), text=alt.Text("text:N")),
    ).properties(width=width, height=84, title=title, view=alt.ViewConfig(stroke=GRID))
