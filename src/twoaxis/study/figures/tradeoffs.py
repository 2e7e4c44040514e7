"""Figures of loss against cost: Pareto fronts, and costs relative to the control."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import altair as alt

from twoaxis.display import numbers as words
from twoaxis.display.figures import (
    Figure,
    labels,
    own_color,
    padded,
    panel_title,
    row_axis,
    shared_rows,
    side_by_side,
    values,
)
from twoaxis.display.theme import CONTROL, INK, MUTED, NARROW
from twoaxis.study.figures.forest import label_width
from twoaxis.study.figures.labels import Frame, colors, place_labels
from twoaxis.study.report_data import ArmData, ReportData

HEIGHT, PHONE_HEIGHT = 330, 240


class Cost(NamedTuple):
    """A cost on the x axis.

    Attributes:
        title: of its axis.
        of: the cost of an arm.
        front: whether an arm is on the front.
        unit: of the axis.
        written: formats a cost.
    """

    title: str
    of: Callable[[ArmData], float | None]
    front: Callable[[ArmData], bool | None]
    unit: float
    written: Callable[[float], str]


COSTS = (
    Cost("seconds of training", lambda arm: arm.seconds, lambda arm: arm.front_seconds, 1.0, words.duration),
    Cost("peak memory, MiB", lambda arm: arm.peak_memory_bytes, lambda arm: arm.front_memory, 2.0**20, words.memory),
)


class Point(NamedTuple):
    """One arm."""

    arm: str
    x: float
    loss: float
    low: float
    high: float
    front: bool
    rank: int
    color: str
    description: str


def pareto(data: ReportData) -> Figure | None:
    """Loss against seconds and against memory."""
    panels = [(cost, points) for cost in COSTS if len(points := _points(data, cost)) > 1]
    if not panels:
        return None

    def draw(width: int) -> Any:
        each, height = (width, PHONE_HEIGHT) if width <= NARROW else ((width - 30 * (len(panels) - 1)) // len(panels), HEIGHT)
        return side_by_side([_plane(cost, points, each - 60, height) for cost, points in panels], width, 2)

    caption = (
        "Lower and further left is better. Step line: the front, the arms that no other beats in both; they have a ring. "
        "Point: mean loss; vertical line: own 95 % interval of its paired difference to the control. "
        "Companions are small and grey; a label without a clear place is left out, and the table of costs has every number."
    )
    description = " ".join(
        f"On the front of loss against {cost.title}: {', '.join(one.description for one in points if one.front) or 'no arm'}."
        for cost, points in panels
    )
    return Figure("pareto", "Loss against seconds and memory", caption, description, draw)


def costs(data: ReportData) -> Figure | None:
    """FLOPs, seconds and memory of every arm, as ratios to the control."""
    control = data.arms[data.control]
    measures: list[tuple[str, Callable[[ArmData], float | None], Callable[[str], Sequence[float]]]] = [
        (
            "FLOPs per token, by the ledger",
            lambda arm: _over(arm.training_flops_per_token, control.training_flops_per_token),
            lambda arm: (),
        ),
        ("seconds per step, measured", lambda arm: arm.step_seconds_ratio, lambda arm: _rounds(data, arm)),
        ("peak memory, measured", lambda arm: arm.peak_memory_ratio, lambda arm: ()),
    ]
    known = [measure for measure in measures if any(measure[1](arm) is not None for arm in data.arms.values())]
    if not known:
        return None
    order = [name for name, _ in sorted(data.arms.items(), key=lambda arm: _rank(arm[1]))]

    def draw(width: int) -> Any:
        return shared_rows([partial(_bars, data, order, *measure) for measure in known], width, label_width(order, width))

    caption = (
        f"As multiples of {data.control}; bars begin at zero, the line is at 1. FLOPs are counted from the declared costs, "
        "seconds and memory were measured. Small bars: each round of the timing, in which every arm had its turn."
    )
    description = "; ".join(
        f"{name}: "
        + ", ".join(f"{title} {words.ratio(value)}" for title, of, _ in known if (value := of(data.arms[name])) is not None)
        for name in order
    )
    return Figure("costs", f"What each arm costs, as a multiple of {data.control}", caption, description + ".", draw)


def _interval(data: ReportData, arm: ArmData) -> tuple[float, float]:
    """The interval of an arm's loss given the control's, without the spread common to all arms."""
    assert arm.mean_loss is not None
    found = arm.charged.get("tokens")
    if found is None or found.comparison is None or found.comparison.ci95 is None:
        return arm.mean_loss, arm.mean_loss
    low, high = found.comparison.ci95
    return arm.mean_loss - found.comparison.mean_difference + low, arm.mean_loss - found.comparison.mean_difference + high


def _rank(arm: ArmData) -> int:
    return ("control", "treatment", "companion").index(arm.role) if arm.role in ("control", "treatment", "companion") else 3


def _over(value: float | None, control: float | None) -> float | None:
    return value / control if value is not None and control else None


def _rounds(data: ReportData, name: str) -> list[float]:
    if data.timing is None:
        return []
    own, control = data.timing.seconds.get(name, ()), data.timing.seconds.get(data.control, ())
    return [one / other for one, other in zip(own, control, strict=False) if other > 0]


def _points(data: ReportData, cost: Cost) -> list[Point]:
    color, points = colors(data), []
    for name, arm in data.arms.items():
        x = cost.of(arm)
        if x is None or arm.mean_loss is None:
            continue
        description = f"{name}, {words.loss(arm.mean_loss)} nats per token, {cost.written(x)}"
        low, high = _interval(data, arm)
        points.append(
            Point(name, x / cost.unit, arm.mean_loss, low, high, bool(cost.front(arm)), _rank(arm), color[name], description)
        )
    return points


def _plane(cost: Cost, points: Sequence[Point], width: int, height: int) -> Any:
    xs = padded([point.x for point in points], 0.1)
    ys = padded([end for point in points for end in (point.loss, point.low, point.high)], 0.04)
    frame = Frame(xs, ys, width, height)
    important = sorted(points, key=lambda point: (not point.front, point.rank, point.loss))
    placed = place_labels([frame.pixel(point.x, point.loss) for point in important], [point.arm for point in important], frame)
    texts = [
        {"text": point.arm, "color": point.color} | dict(zip(("x", "loss"), frame.value(*at), strict=True))
        for point, at in zip(important, placed, strict=True)
        if at is not None
    ]
    x = alt.X("x:Q", title=cost.title, scale=alt.Scale(domain=list(xs), nice=False), axis=alt.Axis(tickCount=5, grid=False))
    loss: dict[str, Any] = {
        "title": "validation loss, nats per token",
        "scale": alt.Scale(domain=list(ys), nice=False),
        "axis": alt.Axis(tickCount=5, format=".2f"),
    }
    y = alt.Y("loss:Q", **loss)
    drawn = values([point._asdict() for point in points])
    front = values([point._asdict() for point in sorted(points, key=lambda point: point.x) if point.front])
    seeds = drawn.mark_rule(strokeWidth=1, opacity=0.45, clip=True, aria=False)
    rim, named = labels(texts, x, y)
    layers = [
        front.mark_line(interpolate="step-after", color=MUTED, strokeWidth=1.2, strokeDash=[5, 3], aria=False).encode(x=x, y=y),
        seeds.encode(x=x, y=alt.Y("low:Q", **loss), y2=alt.Y2("high"), color=own_color()),
        rim,
        front.mark_point(size=150, strokeWidth=1.2, color=INK, opacity=1, aria=False).encode(x=x, y=y),
        drawn.mark_point(filled=True, opacity=1).encode(
            x=x,
            y=y,
            color=own_color(),
            size=alt.condition("datum.rank == 2", alt.value(32), alt.value(70)),
            shape=alt.condition("datum.rank == 0", alt.value("square"), alt.value("circle")),
            description=alt.Description("description:N"),
        ),
        named,
    ]
    return alt.layer(*layers).properties(width=width, height=height)


def _bars(
    data: ReportData,
    order: Sequence[str],
    title: str,
    of: Callable[[ArmData], float | None],
    each: Callable[[str], Sequence[float]],
    width: int,
    labels: int,
) -> Any:
    color, inner = colors(data), width - labels - 8
    rows = [
        {
            "arm": name,
            "x": value,
            "text": words.ratio(value),
            "color": color[name],
            "description": f"{name}: {title} {words.ratio(value)}",
        }
        for name in order
        if (value := of(data.arms[name])) is not None
    ]
    ticks = [{"arm": name, "x": value} for name in order for value in each(name)]
    top = max([1.0, *(row["x"] for row in rows), *(tick["x"] for tick in ticks)])
    y = alt.Y("arm:N", title=None, sort=list(order), axis=row_axis(labels, width), scale=alt.Scale(domain=list(order)))
    # Room to the right of the longest bar, so that its label is not cut off.
    x = alt.X("x:Q", title=None, axis=None, scale=alt.Scale(domain=[0, top * inner / (inner - 46)], nice=False))
    bars = values(rows)
    return alt.layer(
        bars.mark_bar(height=9, opacity=0.85).encode(x=x, y=y, color=own_color(), description=alt.Description("description:N")),
        values(ticks).mark_tick(thickness=1, size=14, color=INK, opacity=0.55, aria=False).encode(x=x, y=y),
        values([{"x": 1.0}]).mark_rule(color=CONTROL, strokeWidth=0.8, strokeDash=[3, 2]).encode(x=x),
        bars.mark_text(align="right", fontSize=11, color=INK, aria=False).encode(
            x=alt.XValue(inner), y=y, text=alt.Text("text:N")
        ),
    ).properties(width=inner, height=alt.Step(19), title=panel_title(title, width, labels))
