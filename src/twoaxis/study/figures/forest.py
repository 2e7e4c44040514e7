"""Rows of means with their intervals on one scale: differences, contrasts and speedups are drawn this way."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import altair as alt

from twoaxis.study.figures.base import BAND, CONTROL, INK, MUTED, NARROW, own_color, panel_title, values

ROW = 21
"""Pixels from row to row."""


class Interval(NamedTuple):
    """One row.

    Attributes:
        label: at the left.
        color: of its marks.
        mean: its point; None draws `text` in its place.
        low: lower end; None where it is not known.
        high: upper end.
        each: the replicates.
        text: at the right.
        verdict: at the far right.
        told: what a reader is told who points at it.
    """

    label: str
    color: str
    mean: float | None
    low: float | None
    high: float | None
    each: tuple[float, ...] = ()
    text: str = ""
    verdict: str = ""
    told: str = ""


class Scale(NamedTuple):
    """What the rows are drawn against.

    Attributes:
        title: of the axis.
        zero: where nothing differs.
        band: ends of what would not matter; None for none.
        domain: what is shown.
        kind: `linear` or `log`.
    """

    title: str
    zero: float
    band: tuple[float, float] | None
    domain: tuple[float, float]
    kind: Literal["linear", "log"] = "linear"


def domain(rows: Sequence[Interval], *more: float) -> tuple[float, float]:
    """From the least to the greatest end, but not further than 4 times as far as any replicate lies."""
    found = [
        0.0,
        *more,
        *(mean for row in rows if (mean := row.mean) is not None),
        *(each for row in rows for each in row.each),
    ]
    reach = 4 * max(max(map(abs, found)), 1e-9)
    found += [min(max(end, -reach), reach) for row in rows for end in (row.low, row.high) if end is not None]
    low, high = min(found), max(found)
    margin = 0.04 * (high - low) or 1e-3
    return low - margin, high + margin


def forest(
    rows: Sequence[Interval], scale: Scale, width: int, labels: int, texts: int = 0, heading: str = "", row_height: int = ROW
) -> Any:
    """The chart.

    Args:
        rows: from top to bottom.
        scale: what they are drawn against.
        width: of everything, in pixels.
        labels: of it, for the labels at the left; 0 leaves them out.
        texts: of it, for the words at the right.
        heading: above it.
        row_height: from row to row; labels may have several lines.
    """
    order = [row.label for row in rows]
    inner = width - labels - texts - 14
    axis = alt.Axis(
        ticks=False,
        domain=False,
        labels=bool(labels),
        labelPadding=8,
        minExtent=labels,
        maxExtent=max(labels, 1),
        labelLimit=max(labels - 10, 1),
        labelColor=INK,
        labelFontSize=11 if width > NARROW else 10,
        labelExpr="split(datum.label, '\\n')",
    )
    y = alt.Y("label:N", title=None, sort=order, axis=axis, scale=alt.Scale(domain=order))
    scaled = alt.Scale(type=scale.kind, domain=list(scale.domain), nice=False)
    ticks: dict[str, Any] = {"format": "~g"} if scale.kind == "log" else {}
    x = alt.X("x:Q", title=scale.title, scale=scaled, axis=alt.Axis(tickCount=max(3, inner // 58), **ticks))
    data = [row._asdict() | _ends(row, scale) for row in rows if _is_known(row)]
    layers = [
        *(
            [values([{"x": scale.band[0], "end": scale.band[1]}]).mark_rect(color=BAND).encode(x=x, x2=alt.X2("end"))]
            if scale.band
            else []
        ),
        values([{"x": scale.zero}]).mark_rule(color=CONTROL, strokeWidth=1).encode(x=x),
        # Keeps every row in its place, also one without a result.
        values([{"label": row.label, "x": scale.zero} for row in rows])
        .mark_point(opacity=0, color=INK, aria=False)
        .encode(x=x, y=y),
        values([{"label": row.label, "x": each, "color": row.color} for row in rows for each in row.each])
        .mark_tick(thickness=1.2, size=10, opacity=0.7, aria=False, clip=True)
        .encode(x=x, y=y, color=own_color()),
        values([row | {"x": row["from"]} for row in data])
        .mark_rule(strokeWidth=2, clip=True)
        .encode(x=x, x2=alt.X2("to"), y=y, color=own_color(), description=alt.Description("told:N")),
        *_arrows(data, x, y),
        values([row | {"x": row["mean"]} for row in data if row["mean"] is not None])
        .mark_point(filled=True, size=62, opacity=1)
        .encode(x=x, y=y, color=own_color(), description=alt.Description("told:N")),
        values([row._asdict() | {"missing": row.text or row.verdict} for row in rows if not (_is_known(row) or texts)])
        .mark_text(fontSize=10.5, color=MUTED, fontStyle="italic")
        .encode(x=alt.XValue(inner / 2), y=y, text=alt.Text("missing:N")),
        values([row._asdict() for row in rows if row.text] if texts else [])
        .mark_text(align="left", fontSize=11, color=INK)
        .encode(x=alt.XValue(inner + 12), y=y, text=alt.Text("text:N")),
        values([row._asdict() for row in rows if row.verdict] if texts else [])
        .mark_text(align="right", fontSize=11, color=INK)
        .encode(x=alt.XValue(inner + texts), y=y, text=alt.Text("verdict:N")),
    ]
    chart = alt.layer(*layers).properties(width=inner, height=alt.Step(row_height))
    return chart.properties(title=panel_title(heading, width, labels)) if heading else chart


def label_width(labels: Sequence[str], width: int) -> int:
    """Room for the longest label, but at most 40 % of the width."""
    return int(min(6.3 * max(map(len, labels), default=0) + 18, 0.48 * width if width <= NARROW else 240))


def _is_known(row: Interval) -> bool:
    return not row.mean is row.low is row.high is None


def _ends(row: Interval, scale: Scale) -> dict[str, Any]:
    low, high = scale.domain
    start, stop = low if row.low is None else row.low, high if row.high is None else row.high
    return {"from": max(start, low), "to": min(stop, high), "cut_low": start <= low, "cut_high": stop >= high}


def _arrows(data: Sequence[dict[str, Any]], x: Any, y: Any) -> list[Any]:
    """Ends of intervals that lie outside what is shown."""
    return [
        values([row | {"x": row[end]} for row in data if row[cut]])
        .mark_point(shape=shape, filled=True, size=40, opacity=1, aria=False)
        .encode(x=x, y=y, color=own_color())
        for cut, end, shape in (("cut_low", "from", "triangle-left"), ("cut_high", "to", "triangle-right"))
    ]
