"""Forest plots: rows of means with intervals on one scale, for differences, contrasts and speedups."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import altair as alt

from twoaxis.display.figures import own_color, panel_title, row_axis, values
from twoaxis.display.theme import BAND, CONTROL, INK, MUTED, NARROW

ROW = 21
"""Pixels from row to row."""


VERDICT = 64
"""Pixels of the longest verdict."""


class Interval(NamedTuple):
    """One row.

    Attributes:
        label: at the left.
        color: of its marks.
        mean: its point; None draws `text` instead.
        low: lower end; None if unknown.
        high: upper end.
        each: the replicates.
        text: at the right.
        verdict: at the far right.
        description: in words, for a pointer or a screen reader.
        own: ends of a line inside the bar, the uncorrected interval; None for none.
    """

    label: str
    color: str
    mean: float | None = None
    low: float | None = None
    high: float | None = None
    each: tuple[float, ...] = ()
    text: str = ""
    verdict: str = ""
    description: str = ""
    own: tuple[float, float] | None = None


class Scale(NamedTuple):
    """The scale of the rows.

    Attributes:
        title: of the axis; "" leaves its numbers out, where another panel below has them.
        zero: value of no difference.
        band: ends of negligible differences; None for none.
        domain: shown range.
        kind: `linear` or `log`.
    """

    title: str
    zero: float
    band: tuple[float, float] | None
    domain: tuple[float, float]
    kind: Literal["linear", "log"] = "linear"


def domain(rows: Sequence[Interval], *more: float) -> tuple[float, float]:
    """The range of all ends, limited to 4 times the largest replicate."""
    found = [
        0.0,
        *more,
        *(mean for row in rows if (mean := row.mean) is not None),
        *(each for row in rows for each in row.each),
    ]
    reach = 4 * max(max(map(abs, found)), 1e-9)
    ends = [end for row in rows for end in (row.low, row.high, *(row.own or ()))]
    found += [min(max(end, -reach), reach) for end in ends if end is not None]
    low, high = min(found), max(found)
    margin = 0.04 * (high - low) or 1e-3
    return low - margin, high + margin


def forest(
    rows: Sequence[Interval], scale: Scale, width: int, labels: int, texts: int = 0, heading: str = "", row_height: int = ROW
) -> Any:
    """Draws the chart.

    Args:
        rows: from top to bottom.
        scale: of the rows.
        width: total, in pixels.
        labels: width of the labels at the left; 0 omits them.
        texts: width of the words at the right.
        heading: above it.
        row_height: from row to row; labels may have several lines.
    """
    order = [row.label for row in rows]
    inner = width - labels - texts - 14
    y = alt.Y("label:N", title=None, sort=order, axis=row_axis(labels, width), scale=alt.Scale(domain=order))
    scaled = alt.Scale(type=scale.kind, domain=list(scale.domain), nice=False)
    ticks: dict[str, Any] = {"format": "~g"} if scale.kind == "log" else {}
    axis = alt.Axis(tickCount=max(3, inner // 58), labels=bool(scale.title), ticks=bool(scale.title), **ticks)
    x = alt.X("x:Q", title=scale.title or None, scale=scaled, axis=axis)
    layers = [*_ground(rows, scale, x, y), *_intervals(rows, scale, x, y), *_words(rows, inner, texts, y)]
    chart = alt.layer(*layers).properties(width=inner, height=alt.Step(row_height))
    return chart.properties(title=panel_title(heading, width, labels)) if heading else chart


def _ground(rows: Sequence[Interval], scale: Scale, x: Any, y: Any) -> Iterator[Any]:
    """Band, zero line, and an invisible mark per row."""
    if scale.band:
        yield values([{"x": scale.band[0], "end": scale.band[1]}]).mark_rect(color=BAND).encode(x=x, x2=alt.X2("end"))
    yield values([{"x": scale.zero}]).mark_rule(color=CONTROL, strokeWidth=1).encode(x=x)
    # Reserves rows without a result.
    places = values([{"label": row.label, "x": scale.zero} for row in rows])
    yield places.mark_point(opacity=0, color=INK, aria=False).encode(x=x, y=y)


def _intervals(rows: Sequence[Interval], scale: Scale, x: Any, y: Any) -> Iterator[Any]:
    """Replicates, intervals and means."""
    each = values([{"label": row.label, "x": value, "color": row.color} for row in rows for value in row.each])
    ticks = each.mark_tick(thickness=1.2, size=10, opacity=0.7, aria=False, clip=True)
    yield ticks.encode(x=x, y=y, color=own_color())
    data = [row._asdict() | _ends(row, scale) for row in rows if _is_known(row)]
    plain: dict[str, Any] = {"y": y, "color": own_color()}
    # Marks inside a bar let a pointer through to it.
    said = plain | {"description": alt.Description("description:N")}
    low, high = scale.domain
    double = [row for row in data if row["own"]]
    wide, bare = ([row | {"x": row["from"]} for row in data if bool(row["own"]) == own] for own in (True, False))
    thin = [row | {"x": max(row["own"][0], low), "to": min(row["own"][1], high)} for row in double]
    for lines, width, opacity, encoded in ((wide, 9, 0.28, said), (thin, 2, 1.0, plain), (bare, 2, 1.0, said)):
        mark = values(lines).mark_rule(strokeWidth=width, opacity=opacity, clip=True, aria=encoded is said)
        yield mark.encode(x=x, x2=alt.X2("to"), **encoded)
    for cut, end, shape in (("cut_low", "from", "triangle-left"), ("cut_high", "to", "triangle-right")):
        # Ends that lie outside what is shown.
        arrows = values([row | {"x": row[end]} for row in data if row[cut]])
        yield arrows.mark_point(shape=shape, filled=True, size=40, opacity=1, aria=False).encode(x=x, y=y, color=own_color())
    for own, encoded in ((True, plain), (False, said)):
        means = values([row | {"x": row["mean"]} for row in data if row["mean"] is not None and bool(row["own"]) == own])
        yield means.mark_point(filled=True, size=62, opacity=1, aria=encoded is said).encode(x=x, **encoded)


def _words(rows: Sequence[Interval], inner: int, texts: int, y: Any) -> Iterator[Any]:
    """Words at the right where there is room, else in rows without a result."""
    if not texts:
        missing = values([row._asdict() | {"missing": row.verdict or row.text} for row in rows if not _is_known(row)])
        text = missing.mark_text(fontSize=10.5, color=MUTED, fontStyle="italic")
        yield text.encode(x=alt.XValue(inner / 2), y=y, text=alt.Text("missing:N"))
        return
    for field, align, at in (("text", "left", inner + 12), ("verdict", "right", inner + texts)):
        drawn = values([row._asdict() for row in rows if getattr(row, field)]).mark_text(
            align=align, fontSize=11, color=INK, limit=texts - 12 - (VERDICT if field == "text" else 0)
        )
        yield drawn.encode(x=alt.XValue(at), y=y, text=alt.Text(f"{field}:N"))


def label_width(labels: Sequence[str], width: int) -> int:
    """Width of the longest label, limited to a part of the total."""
    return int(min(6.3 * max(map(len, labels), default=0) + 18, 0.48 * width if width <= NARROW else 240))


def _is_known(row: Interval) -> bool:
    return any(value is not None for value in (row.mean, row.low, row.high))


def _ends(row: Interval, scale: Scale) -> dict[str, Any]:
    low, high = scale.domain
    start, stop = low if row.low is None else row.low, high if row.high is None else row.high
    return {"from": max(start, low), "to": min(stop, high), "cut_low": start <= low, "cut_high": stop >= high}
