"""The figures of a study, as specifications that render to SVG and PNG without a browser or the network."""

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import altair as alt
import vl_convert

from twoaxis.study import words
from twoaxis.study.analysis import Analysis, ArmSummary

PALETTE = ("#4d4d4d", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c510a")
"""The control is grey; the others are the colours of Okabe and Ito, which the colour-blind tell apart."""

WIDTH = 480
"""Of the drawing of the differences, without what stands beside it."""

PNG_SCALE = 2.0
"""Pixels per unit of the drawing."""


class Figure(NamedTuple):
    """One figure.

    Attributes:
        name: of its file.
        title: what it shows.
        caption: how to read it.
        chart: its specification.
    """

    name: str
    title: str
    caption: str
    chart: Any

    def svg(self) -> str:
        """The figure for a page: ids are its own, so that several figures may stand in one page."""
        svg = vl_convert.vegalite_to_svg(json.dumps(self.chart.to_dict()))
        svg = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", svg)
        svg = re.sub(r'\bid="', f'id="{self.name}-', svg)
        return re.sub(r"url\(#", f"url(#{self.name}-", svg)

    def png(self) -> bytes:
        """The figure as a picture."""
        return vl_convert.vegalite_to_png(json.dumps(self.chart.to_dict()), scale=PNG_SCALE)


def study_figures(analysis: Analysis) -> list[Figure]:
    """The figures for which there are results yet."""
    made = [loss_curves(analysis), differences(analysis), costs(analysis)]
    return [figure for figure in made if figure is not None]


def loss_curves(analysis: Analysis) -> Figure | None:
    """Validation loss against tokens, and its difference to the control at the same tokens."""
    curves = {run.place: dict(run.curve) for run in analysis.runs if run.curve}
    if not curves:
        return None
    control = {place.seed: curve for place, curve in curves.items() if place.arm == analysis.study.control}
    losses, paired = [], []
    for place, curve in curves.items():
        for tokens, loss in curve.items():
            row = {"arm": place.arm, "seed": str(place.seed), "tokens": tokens}
            losses.append(row | {"value": loss})
            if place.arm != analysis.study.control and tokens in control.get(place.seed, {}):
                paired.append(row | {"value": loss - control[place.seed][tokens]})
    left = _lines(analysis, losses, "validation loss, nats per token")
    panels = [left]
    if paired:
        zero = alt.Chart(alt.Data(values=[{"value": 0}])).mark_rule(color=PALETTE[0]).encode(y="value:Q")
        right = _lines(analysis, paired, f"difference to {analysis.study.control}, nats per token", _late_range(paired))
        panels.append(zero + right)
    caption = (
        "Thick: mean over replicates; thin: each replicate. Left: validation loss. "
        f"Right: the same minus the loss of {analysis.study.control} with the same seed, in the "
        "range of the second half of training; below zero is better."
    )
    return Figure("curves", "Validation loss along training", caption, _styled(alt.hconcat(*panels, spacing=28)))


def differences(analysis: Analysis) -> Figure | None:
    """The paired difference of every arm with its interval."""
    arms = [arm for arm in analysis.treatments if arm.comparison is not None]
    if not arms:
        return None
    effect = analysis.study.decision.smallest_effect
    means = [_interval_row(arm) for arm in arms]
    points = [
        {"arm": arm.name, "difference": difference}
        for arm in arms
        if arm.comparison is not None
        for difference in arm.comparison.test.differences
    ]
    title = f"difference in validation loss to {analysis.study.control}, nats per token (left of zero is better)"
    x = alt.X("difference:Q", title=title, scale=alt.Scale(zero=True, nice=True), axis=alt.Axis(tickCount=6))
    y = alt.Y("arm:N", title=None, sort=[arm.name for arm in arms], axis=alt.Axis(ticks=False, domain=False, labelPadding=8))
    color = _color(analysis, legend=False)
    band = (
        alt.Chart(alt.Data(values=[{"low": -effect, "high": effect}])).mark_rect(color="#e8e8e8").encode(x="low:Q", x2="high:Q")
    )
    zero = alt.Chart(alt.Data(values=[{"zero": 0}])).mark_rule(color=PALETTE[0]).encode(x="zero:Q")
    data = alt.Chart(alt.Data(values=means))
    line = data.mark_rule(strokeWidth=2.5).encode(x=alt.X("low:Q", title=title), x2="high:Q", y=y, color=color)
    mean = data.mark_point(filled=True, size=90, opacity=1).encode(x=x, y=y, color=color)
    each = alt.Chart(alt.Data(values=points)).mark_tick(thickness=1.5, size=14, opacity=0.8).encode(x=x, y=y, color=color)
    # Beside the drawing, where no line crosses it.
    label = data.mark_text(align="left", fontSize=12).encode(x=alt.value(WIDTH + 12), y=y, text="words:N", color=color)
    chart = (band + zero + line + each + mean + label).properties(width=WIDTH, height=alt.Step(44))
    caption = (
        "Point: mean of the paired differences; line: 95 % Student interval; small bars: each replicate. Grey band: "
        f"differences smaller than {effect:g} nats per token, the smallest that matters in this study."
    )
    return Figure("differences", f"Difference to {analysis.study.control}", caption, _styled(chart))


def costs(analysis: Analysis) -> Figure | None:
    """Parameters, FLOPs, speed and memory of every arm."""
    arms = [arm for arm in analysis.arms if arm.parameters is not None]
    if not arms:
        return None
    measures: list[tuple[str, Callable[[ArmSummary], float | None], Callable[[float], str]]] = [
        ("parameters", lambda arm: arm.parameters, words.count),
        ("training FLOPs per token", lambda arm: arm.training_flops_per_token, words.count),
        ("tokens per second, to control", lambda arm: arm.tokens_per_second_ratio, words.ratio),
        ("peak memory, to control", lambda arm: arm.peak_memory_ratio, words.ratio),
    ]
    panels = [_bars(analysis, arms, *measure, labels=number == 0) for number, measure in enumerate(measures)]
    caption = (
        "Bars begin at zero. Parameters and FLOPs are counts from the declared costs; training FLOPs are three times those "
        "of a forward pass. Speed and memory were measured: the median over replicates of the ratio to the control of the same "
        "seed."
    )
    return Figure("costs", "What each arm costs", caption, _styled(alt.hconcat(*panels, spacing=18)))


def _late_range(rows: list[dict[str, Any]]) -> list[float]:
    """The range of the values in the second half of training, and zero: early differences are large and say little."""
    last = max(row["tokens"] for row in rows)
    values = [0.0, *(row["value"] for row in rows if 2 * row["tokens"] >= last)]
    margin = 0.15 * (max(values) - min(values)) or 0.01
    return [min(values) - margin, max(values) + margin]


def _lines(analysis: Analysis, rows: list[dict[str, Any]], title: str, domain: list[float] | None = None) -> Any:
    x = alt.X("tokens:Q", title="tokens read", axis=alt.Axis(format="~s", tickCount=5), scale=alt.Scale(nice=False))
    scale = alt.Scale(zero=False) if domain is None else alt.Scale(domain=domain)
    base = alt.Chart(alt.Data(values=rows)).encode(x=x, color=_color(analysis))
    each = base.mark_line(strokeWidth=1, opacity=0.45, clip=True).encode(
        y=alt.Y("value:Q", title=title, scale=scale), detail="seed:N"
    )
    mean = base.mark_line(strokeWidth=2.5, clip=True).encode(y=alt.Y("mean(value):Q", title=title, scale=scale))
    return (each + mean).properties(width=350, height=280)


def _bars(
    analysis: Analysis,
    arms: list[ArmSummary],
    title: str,
    of: Callable[[ArmSummary], float | None],
    written: Callable[[float], str],
    labels: bool,
) -> Any:
    known = [(arm.name, value) for arm in arms if (value := of(arm)) is not None]
    rows = [{"arm": name, "value": value, "words": written(value)} for name, value in known]
    top = max((value for _, value in known), default=1.0)
    axis = alt.Axis(labels=labels, ticks=False, domain=False, labelPadding=6)
    y = alt.Y("arm:N", title=None, sort=[arm.name for arm in arms], axis=axis)
    # Room to the right of the longest bar, so that its label is not cut off.
    x = alt.X("value:Q", title=None, axis=None, scale=alt.Scale(domain=[0, 1.5 * top]))
    base = alt.Chart(alt.Data(values=rows)).encode(x=x, y=y)
    bars = base.mark_bar(height=16).encode(color=_color(analysis, legend=False))
    label = base.mark_text(align="left", dx=5, fontSize=12).encode(text="words:N")
    heading = alt.TitleParams(title, anchor="start", fontSize=12, fontWeight="normal")
    return (bars + label).properties(width=168, height=alt.Step(30), title=heading)


def _interval_row(arm: ArmSummary) -> dict[str, Any]:
    assert arm.comparison is not None
    test = arm.comparison.test
    text = f"{words.signed(test.mean)}  ({words.interval(test.low, test.high)})  {arm.comparison.verdict}"
    return {"arm": arm.name, "difference": test.mean, "low": test.low, "high": test.high, "words": text}


def _color(analysis: Analysis, legend: bool = True) -> Any:
    names = [analysis.study.control, *analysis.study.treatments]
    colors = [PALETTE[0], *(PALETTE[1 + number % (len(PALETTE) - 1)] for number in range(len(names) - 1))]
    place = (
        alt.Legend(title=None, orient="top", symbolStrokeWidth=3, symbolOpacity=1, labelFontSize=13, labelLimit=400)
        if legend
        else None
    )
    return alt.Color("arm:N", scale=alt.Scale(domain=names, range=colors), legend=place)


def _styled(chart: Any) -> Any:
    return (
        chart.configure(background="white", font="sans-serif", padding=8)
        .configure_view(stroke=None)
        .configure_axis(labelFontSize=12, titleFontSize=12, titleFontWeight="normal", gridColor="#eeeeee", labelLimit=240)
    )
