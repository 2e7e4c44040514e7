"""The figure of one audit: sources that each sublayer reads, and loss changes under ablation."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import altair as alt

from twoaxis.audit.result import Ablation, Audit
from twoaxis.core.errors import ConfigError
from twoaxis.display import numbers as words
from twoaxis.display.figures import Figure, row_axis, values
from twoaxis.display.theme import CONTROL, HEAT, INK, MUTED, NARROW, PAPER, SIGNED, WIDE
from twoaxis.study.figures.forest import label_width
from twoaxis.study.report.text_tables import csv_tables
from twoaxis.study.report_data import ArmData, ReportData

ROW = 20
"""Pixels from sublayer to sublayer."""

LEAST_SHARE = 0.005
"""Smallest share that a heat map shows."""

REGIMES = {
    "near_0": ("near 0 (nothing is written)", 0.15),
    "between": ("between", 0.4),
    "near_1": ("near 1 (the target replaces it)", 0.7),
    "above_1": ("above 1 (beyond the target)", 1.0),
}
"""Regimes of the gates of delta writes, with the opacity of their bars."""

Panel = Callable[[int], Any]


def read_audit(arm: ArmData) -> Audit | None:
    """The audit of an arm; None without one, or of another version."""
    try:
        return Audit.from_data(arm.audit) if arm.audit else None
    except ConfigError:
        return None


def audit_name(name: str) -> str:
    """The name of the figure of an audit, valid as a file name everywhere."""
    return "audit-" + re.sub(r"[^\w.*-]+", "-", name)


def audits(data: ReportData) -> list[Figure]:
    """One figure for each arm that has an audit."""
    found = [(name, read_audit(arm)) for name, arm in data.arms.items()]
    drawn = [
        (data.replace(arms={name: data.arms[name]}), audit_figure(name, audit)) for name, audit in found if audit is not None
    ]
    return [replace(figure, csv=csv_tables(own)["ablations"]) for own, figure in drawn]


def audit_figure(name: str, audit: Audit) -> Figure:
    """The figure of one audit; its rows are sublayers in order of depth."""
    names = [audit.sublayer_name(index) for index in range(len(audit.sublayers) + 1)]
    panels = [
        panel for make in (_routing, _favourites, _sublayers, _gates, _streams) if (panel := make(audit, names)) is not None
    ]

    def draw(width: int) -> Any:
        labels = label_width(names, width)
        if width <= NARROW:
            return alt.vconcat(*(_with_rows(draw_panel(width - labels - 16), names, labels) for _, draw_panel in panels))
        weights = [weight for weight, _ in panels]
        room = width - labels - 22 * (len(panels) - 1)
        drawn = [
            _with_rows(draw_panel(int(room * weight / sum(weights))), names, labels if at == 0 else 0)
            for at, (weight, draw_panel) in enumerate(panels)
        ]
        return alt.hconcat(*drawn)

    return Figure(audit_name(name), f"Inside {name}", _caption(audit), _describe(audit, names), draw)


def _caption(audit: Audit) -> str:
    sentences = [
        f"Measured on {words.count(audit.tokens)} tokens of validation text in the run of the first seed, after {audit.step} "
        "steps. Rows are sublayers from the first to the last."
    ]
    if _reads(audit):
        sentences.append(
            "Heat map: the share of each source in what a sublayer reads, the stronger the colour the larger; framed: its "
            "favourite. A large share need not be a large effect, so the next panel removes sources."
        )
    sentences.append(
        "Bars: loss change in nats per token, with two standard errors; grey bars: a random change of the same size."
    )
    if audit.gates:
        regimes = ", ".join(meaning for meaning, _ in REGIMES.values())
        sentences.append(f"Gates, stronger colours for larger ones: parts of the tokens whose gate lies {regimes}.")
    return " ".join(sentences)


def _describe(audit: Audit, names: Sequence[str]) -> str:
    sentences = []
    for sublayer, row in audit.shares().items():
        favourite = max(row, key=lambda source: row[source])
        sentences.append(f"{names[sublayer]} reads {favourite} most, with a share of {words.percentage(row[favourite])}")
    for one in audit.ablations:
        if one.what == "sublayer" and one.replacement == "zero" and one.loss_change is not None:
            sentences.append(f"without {names[one.sublayer]} the loss changes by {words.signed(one.loss_change)}")
    return "; ".join(sentences) + "."


def _reads(audit: Audit) -> bool:
    return any(one.role == "read" for one in audit.routing)


def _with_rows(chart: Any, names: Sequence[str], labels: int) -> Any:
    """Adds the rows to a panel, named at the left where there is room."""
    y = alt.Y("row:N", title=None, sort=list(names), scale=alt.Scale(domain=list(names)), axis=row_axis(labels, WIDE))
    return alt.layer(*(layer.encode(y=y) for layer in chart["layers"])).properties(
        width=chart["width"], height=alt.Step(ROW), title=chart["title"]
    )


def _panel(layers: Sequence[Any], width: int, title: str) -> dict[str, Any]:
    return {"layers": layers, "width": width, "title": alt.TitleParams(title, fontSize=11.5, limit=width + 10)}


def _routing(audit: Audit, names: Sequence[str]) -> tuple[float, Panel] | None:
    shares = audit.shares()
    if not shares:
        return None
    sources = list(audit.source_names)
    cells = [
        {
            "row": names[sublayer],
            "source": source,
            "share": share,
            "description": f"{names[sublayer]} reads {words.percentage(share)} of {source}",
            "favourite": share == max(row.values()),
        }
        for sublayer, row in shares.items()
        for source, share in row.items()
        if share >= LEAST_SHARE
    ]

    def draw(width: int) -> Any:
        axis = alt.Axis(
            orient="bottom", labelAngle=-60, ticks=False, domain=False, labelLimit=90, labelOverlap=False, labelFontSize=10
        )
        x = alt.X("source:N", title="source", sort=sources, scale=alt.Scale(domain=sources, padding=0.04), axis=axis)
        opacity = alt.Opacity("share:Q", scale=alt.Scale(domain=[0, 1], range=[0.06, 1]), legend=None)
        grid = values(cells).encode(x=x, description=alt.Description("description:N"))
        frame = values([cell for cell in cells if cell["favourite"]]).encode(x=x)
        layers = [
            grid.mark_rect(color=HEAT).encode(opacity=opacity),
            frame.mark_rect(filled=False, stroke=INK, strokeWidth=1.4, aria=False),
        ]
        return _panel(layers, width, "share of each source in what is read")

    return max(1.6, min(3.0, len(sources) / 6)), draw


def _favourites(audit: Audit, names: Sequence[str]) -> tuple[float, Panel] | None:
    found = [one for one in audit.ablations if one.what == "source" and one.choice == "favourite"]
    return _changes(found, names, "loss change without the favourite")


def _sublayers(audit: Audit, names: Sequence[str]) -> tuple[float, Panel] | None:
    found = [one for one in audit.ablations if one.what == "sublayer" and one.replacement == "zero"]
    return _changes(found, names, "loss change without the sublayer")


def _changes(found: Sequence[Ablation], names: Sequence[str], title: str) -> tuple[float, Panel] | None:
    rows = []
    for one in found:
        if one.loss_change is not None:
            error, random = 2 * (one.standard_error or 0.0), one.control_loss_change
            description = f"{names[one.sublayer]} without {one.target}: {words.signed(one.loss_change)}"
            description += "" if random is None else f", a random change of the same size {words.signed(random)}"
            row = {
                "row": names[one.sublayer],
                "change": one.loss_change,
                "description": description,
                "random": random,
            }
            rows.append(row | {"low": one.loss_change - error, "high": one.loss_change + error})
    if not rows:
        return None

    def draw(width: int) -> Any:
        x = alt.X("change:Q", title="nats per token", axis=alt.Axis(tickCount=max(2, width // 70), labelExpr=SIGNED))
        drawn = values(rows)
        random = values([row for row in rows if row["random"] is not None])
        layers = [
            drawn.mark_bar(height=9, color=HEAT, opacity=0.85, yOffset=-3).encode(
                x=x, description=alt.Description("description:N")
            ),
            random.mark_bar(height=4, color=MUTED, opacity=0.7, yOffset=4, aria=False).encode(
                x=alt.X("random:Q", title="nats per token")
            ),
            drawn.mark_rule(color=INK, strokeWidth=1, yOffset=-3, aria=False).encode(x=alt.X("low:Q"), x2=alt.X2("high")),
            values([{"row": name, "zero": 0.0} for name in names])
            .mark_tick(color=CONTROL, size=ROW, thickness=1, aria=False)
            .encode(x=alt.X("zero:Q")),
        ]
        return _panel(layers, width, title)

    return 1.2, draw


def _gates(audit: Audit, names: Sequence[str]) -> tuple[float, Panel] | None:
    rows = []
    for one in audit.gates:
        begin = 0.0
        for key, (meaning, opacity) in REGIMES.items():
            part = getattr(one, key)
            description = f"{names[one.sublayer]}: {words.percentage(part)} of the gates {meaning}"
            rows.append(
                {"row": names[one.sublayer], "from": begin, "to": begin + part, "opacity": opacity, "description": description}
            )
            begin += part
    if not rows:
        return None

    def draw(width: int) -> Any:
        axis = alt.Axis(format="%", tickCount=3)
        x = alt.X("from:Q", title="of the tokens", scale=alt.Scale(domain=[0, 1]), axis=axis)
        opacity = alt.Opacity("opacity:Q", scale=None, legend=None)
        bars = values(rows).mark_bar(height=12, color=HEAT, stroke=PAPER, strokeWidth=1)
        return _panel(
            [bars.encode(x=x, x2=alt.X2("to"), opacity=opacity, description=alt.Description("description:N"))],
            width,
            "gates of the delta writes",
        )

    return 1.2, draw


def _streams(audit: Audit, names: Sequence[str]) -> tuple[float, Panel] | None:
    if audit.streams is None:
        return None
    # The row of a sublayer shows the state after it.
    rows = [
        {"row": names[index - 1], "x": spread, "description": f"spread of the streams after {names[index - 1]}: {spread:.3g}"}
        for index, spread in enumerate(audit.streams.spread)
        if index
    ]
    gains = [
        {
            "row": names[one.sublayer],
            "x": one.spectral,
            "description": f"composite gain up to {names[one.sublayer]}: {one.spectral:.3g}",
        }
        for one in audit.streams.gain
    ]

    def draw(width: int) -> Any:
        x = alt.X("x:Q", title="dot: spread; ring: composite gain", axis=alt.Axis(tickCount=max(2, width // 60)))
        layers = [
            values(rows)
            .mark_point(filled=True, color=HEAT, size=50, opacity=1)
            .encode(x=x, description=alt.Description("description:N")),
            values(gains).mark_point(color=INK, size=50).encode(x=x, description=alt.Description("description:N")),
        ]
        return _panel(layers, width, "streams")

    return 1.2, draw
