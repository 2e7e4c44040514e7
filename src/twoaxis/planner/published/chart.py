"""The figure of predicted against published overheads."""

from collections.abc import Sequence
from typing import Any

import altair as alt

from twoaxis.figures.figure import Figure
from twoaxis.figures.theme import ARMS, MUTED
from twoaxis.planner.published import Published, published

LEAST, MOST = 0.007, 2.0
"""Of both axes, as a share of the plain model."""

LEGEND = 240
"""Room beside the panel, in CSS pixels."""

SIDE = 420
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down")
TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)


def published_figure() -> Figure:
    """One mark for each overhead that a paper gives a number for."""
    points = [point for paper in published() for point in _points(paper)]
    below = sum(point["predicted"] < point["published"] for point in points)
    return Figure(
        "published",
        "Overheads: predicted against published",
        "One mark for each published time or memory, as a share of the same paper's plain model; both axes are logarithmic. On "
        "the "
        "broken line both are equal; below it more is published than predicted. Of Deep Delta Learning only CC+EC had a fused "
        "engine.",
        f"{len(points)} overheads, of which {below} are published larger than predicted; the tables of the page hold all of "
        f"them.",
        lambda width: _chart(published(), width),
    )


def _chart(papers: Sequence[Published], width: int) -> Any:
    shown = [paper for paper in papers if _points(paper)]
    names = [paper.method for paper in shown]
    points = [{"method": paper.method, **point} for paper in shown for point in _points(paper)]
    side = min(width - LEGEND, SIDE)
    scale = alt.Scale(type="log", domain=[LEAST, MOST], nice=False)
    axis = alt.Axis(format="%", values=list(TICKS))
    x = alt.X("published:Q", scale=scale, axis=axis, title="published overhead")
    y = alt.Y("predicted:Q", scale=scale, axis=axis, title="predicted overhead")
    legend = alt.Legend(orient="right", symbolSize=70)
    color = alt.Scale(domain=names, range=list(ARMS[: len(names)]))
    shape = alt.Scale(domain=names, range=list(SHAPES[: len(names)]))
    ends = [{"published": end, "predicted": end} for end in (LEAST, MOST)]
    equal = alt.Chart(alt.Data(values=ends)).mark_line(color=MUTED, strokeDash=[4, 3]).encode(x=x, y=y)
    marks = alt.Chart(alt.Data(values=points)).mark_point(filled=True, size=60, opacity=0.85)
    drawn = marks.encode(
        x=x,
        y=y,
        color=alt.Color("method:N", title=None, legend=legend, scale=color),
        shape=alt.Shape("method:N", title=None, legend=legend, scale=shape),
    )
    return alt.layer(equal, drawn).properties(width=side, height=side)


def _points(paper: Published) -> list[dict[str, float]]:
    return [{"published": row.published - 1, "predicted": max(row.predicted - 1, LEAST)} for row in paper.rows if row.drawn]
