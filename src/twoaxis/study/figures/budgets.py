"""Figures of the control at several budgets: its fitted curve with residuals, and effective speedups."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import altair as alt

from twoaxis.display import numbers as words
from twoaxis.display.figures import Figure, labels, own_color, padded, shared_rows, side_by_side, values
from twoaxis.display.theme import CONTROL, INK, NARROW, SIGNED
from twoaxis.study.figures.forest import Interval, Scale, forest, label_width
from twoaxis.study.figures.labels import Frame, colors, place_labels
from twoaxis.study.report_data import UNITS, ArmData, CurveData, ReportData, SpeedupData

By = Literal["flops", "seconds"]

BY: tuple[By, ...] = ("flops", "seconds")

FIT_HEIGHT = 260


def speedup(data: ReportData) -> Figure | None:
    """Effective speedup by FLOPs and by seconds."""
    names = [name for name, arm in data.arms.items() if arm.speedup]
    if not names:
        return None
    names.sort(key=lambda name: (data.arms[name].role == "companion", -_known(data.arms[name])))
    color = colors(data)
    panels: dict[By, list[Interval]] = {
        by: [_row(name, color[name], data.arms[name].speedup.get(by)) for name in names]
        for by in BY
        if any(by in data.arms[name].speedup for name in names)
    }
    found = [1.0, *(end for rows in panels.values() for row in rows for end in row[2:5] if end is not None)]
    scale = Scale("effective speedup", 1.0, None, (min(found) / 1.08, max(found) * 1.08), "log")

    def draw(width: int) -> Any:
        drawn = [partial(forest, rows, scale, heading=f"by {UNITS[by]}") for by, rows in panels.items()]
        return shared_rows(drawn, width, label_width(names, width))

    caption = (
        f"Cost at which {data.control} reaches the loss of an arm, over the cost of the arm; right of 1 the arm is cheaper. "
        "Line: 95 % interval; an arrow: its end lies outside the measured budgets of the control, and nothing is extrapolated."
    )
    description = " ".join(f"By {UNITS[by]}: {'; '.join(row.description for row in rows)}." for by, rows in panels.items())
    return Figure("speedup", "Effective speedup", caption, description, draw)


def control_curve(data: ReportData) -> Figure | None:
    """The loss of the control over cost, with its fit and residuals."""
    panels: list[tuple[By, CurveData]] = [(by, curve) for by, curve in data.curves.items() if len(curve.points) > 1]
    if not panels:
        return None

    def draw(width: int) -> Any:
        each = (width if width <= NARROW else (width - 30 * (len(panels) - 1)) // len(panels)) - 62
        return side_by_side([_fit(data, by, curve, each) for by, curve in panels], width, 2)

    caption = (
        f"Rings: runs of {data.control} at several budgets, with the fitted curve; coloured: the mean of each arm at its cost. "
        "An arm below the curve is the cheaper way to its loss. Beneath: residuals of the fit, without the offset of each seed."
    )
    description = " ".join(f"By {UNITS[by]} of training: {curve.sentence}" for by, curve in panels)
    return Figure("control-curve", f"What {data.control} needs for a loss", caption, description, draw)


def _known(arm: ArmData) -> float:
    """The sort key of a row: the speedup or its bound, or a known end of its interval."""
    found = next(iter(arm.speedup.values()))
    bound = found.beyond and found.beyond[1]
    return next((end for end in (found.value, bound, found.low, found.high) if end is not None), 0.0)


def _row(name: str, color: str, found: SpeedupData | None) -> Interval:
    if found is None:
        return Interval(name, color, text="not known", description=f"{name}: not known")
    if found.value is None:
        # One known end is still a bound.
        return Interval(name, color, None, found.low, found.high, text=found.outside, description=f"{name}: {found.sentence}")
    ends = [words.ratio(end) if end is not None else "outside the measured budgets" for end in (found.low, found.high)]
    description = f"{name}: {words.ratio(found.value)}, {ends[0]} to {ends[1]}"
    return Interval(name, color, found.value, found.low, found.high, description=description)


def _fit(data: ReportData, by: By, curve: CurveData, width: int) -> Any:
    arms, points = _arms(data, by), _runs(data, by, curve)
    costs = [row["cost"] for row in [*points, *arms]]
    y_range = padded([row["loss"] for row in [*points, *arms]], 0.05)
    frame = Frame((min(costs) / 1.05, max(costs) * 1.05), y_range, width, FIT_HEIGHT, "log")
    scale = alt.Scale(type="log", domain=list(frame.x), nice=False)
    axis = alt.Axis(format="~s", values=_ticks(costs), grid=False)
    left = [point for point in points if point["residual"] is not None]
    hidden = alt.Axis(labels=False, ticks=False, grid=False) if left else axis
    title = f"{UNITS[by]} of training"
    x = alt.X("cost:Q", title=None if left else title, scale=scale, axis=hidden)
    ticks = alt.Axis(tickCount=5, format=".2f")
    y = alt.Y("loss:Q", title="validation loss, nats per token", scale=alt.Scale(domain=list(y_range), nice=False), axis=ticks)
    line = values([{"cost": cost, "loss": loss} for cost, loss in curve.line])
    places = [frame.pixel(row["cost"], row["loss"]) for row in [*arms, *points]]
    placed = place_labels(places, [row["arm"] for row in arms], frame)
    texts = [
        {"text": row["arm"], "color": row["color"]} | dict(zip(("cost", "loss"), frame.value(*at), strict=True))
        for row, at in zip(arms, placed, strict=True)
        if at is not None
    ]
    rim, named = labels(texts, x, y)
    top = alt.layer(
        line.mark_line(color=CONTROL, strokeWidth=1.6, aria=False).encode(x=x, y=y),
        rim,
        values(points)
        .mark_point(size=24, color=CONTROL, opacity=0.9)
        .encode(x=x, y=y, description=alt.Description("description:N")),
        values(arms)
        .mark_point(filled=True, size=60, opacity=1)
        .encode(x=x, y=y, color=own_color(), description=alt.Description("description:N")),
        named,
    ).properties(width=width, height=FIT_HEIGHT)
    if not left:
        return top
    reach = 1.15 * max(abs(point["residual"]) for point in left) or 1e-3
    below = alt.X("cost:Q", title=title, scale=scale, axis=axis)
    ends = alt.Scale(domain=[-reach, reach], nice=False)
    rest = alt.Y("residual:Q", title="residual", scale=ends, axis=alt.Axis(tickCount=3, labelExpr=SIGNED))
    bottom = alt.layer(
        values([{"residual": 0.0}]).mark_rule(color=INK, strokeWidth=0.8).encode(y=rest),
        values(left).mark_point(size=24, color=CONTROL, opacity=0.9, aria=False).encode(x=below, y=rest),
    ).properties(width=width, height=70)
    return alt.vconcat(top, bottom, spacing=10)


def _arms(data: ReportData, by: By) -> list[dict[str, Any]]:
    """The treatments at their costs."""
    color, found = colors(data), []
    for name, arm in data.arms.items():
        cost = arm.training_flops if by == "flops" else arm.seconds
        if arm.role == "treatment" and cost is not None and arm.mean_loss is not None:
            description = f"{name}: {words.loss(arm.mean_loss)} nats per token, {written(by, cost)}"
            found.append({"arm": name, "cost": cost, "loss": arm.mean_loss, "color": color[name], "description": description})
    return found


def _runs(data: ReportData, by: By, curve: CurveData) -> list[dict[str, Any]]:
    """The runs of the control."""
    return [
        {
            "cost": point.cost,
            "loss": point.loss,
            "residual": point.residual,
            "description": f"{data.control}, seed {point.seed}: {words.loss(point.loss)} nats per token, "
            f"{written(by, point.cost)}",
        }
        for point in curve.points
    ]


def written(by: By, cost: float) -> str:
    """Formats a cost with its unit."""
    return f"{words.count(cost)} FLOPs" if by == "flops" else words.duration(cost)


def _ticks(costs: Sequence[float]) -> list[float]:
    """A few round values between the least and the greatest cost."""
    low, high = min(costs), max(costs)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [step * 10.0**decade for decade in decades for step in (1, 1.5, 2, 3, 5, 7) if low <= step * 10.0**decade <= high]
    return found[:: max(1, -(-len(found) // 5))]
