"""The figures of the scale page: overheads by case, what they are made of, boundaries, and where histories break even."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import altair as alt

from planner.scale.cases import CONTEXTS, SHAPES, Case, case
from planner.scale.compute import CONTROL, LIMIT, simulated_step
from planner.scale.timeline import timeline
from twoaxis.display.figures import Figure, own_color, row_axis, values
from twoaxis.display.theme import ARMS, BAND, COMPANION, GRID, INK, MUTED, PAPER
from twoaxis.display.theme import CONTROL as DARK

NAMES = 168
"""Room for the names of methods, in CSS pixels."""

ROW = 19
FULL = 0.5
"""The overhead from which a cell is as dark as any."""

PARTS = {
    "depth": ("depth operation", ARMS[0]),
    "sublayers": ("mixers and norms", COMPANION),
    "exposed": ("transfers that nothing hides", ARMS[1]),
    "idle": ("waiting for slower stages", "#e0b400"),
    "update": ("update of more weights", ARMS[3]),
}

WAYS = {"naive": ("naive", "#eda06b"), "cached": ("cached", ARMS[1]), "cached_own": ("cached, own too", DARK)}

Row = Mapping[str, Any]


def scale_figures(data: Mapping[str, Any]) -> list[Figure]:
    """All figures in the order of the page.

    Args:
        data: what `scale_data` makes.
    """
    rows = [row for row in data["rows"] if row["method"] != CONTROL]
    words = [(shape, tokens, f"{SHAPES[shape]}\n{CONTEXTS[tokens]}") for shape in SHAPES for tokens in CONTEXTS]
    short = [row for row in rows if row["tokens"] == min(CONTEXTS)]
    return [
        _heat("training", "What a training step takes longer", rows, words, lambda row: row["training"]["overhead"], _trains),
        _heat(
            "generation",
            "What a step of generation takes longer",
            rows,
            words,
            lambda row: row["serving"]["generation"],
            _serves,
        ),
        _heat("prefill", "What a prefill takes longer", rows, words, lambda row: row["serving"]["prefill"], _prefills),
        _parts(short),
        _boundaries(short, data["control_bytes"]),
        _break_even(data["by_layers"], data["by_stages"]),
        _step(case("dense-7b", min(CONTEXTS)), "AttnRes full"),
    ]


def _step(at: Case, name: str) -> Figure:
    """When every rank of a pipeline computes, sends and waits in one training step of a method."""
    step = simulated_step(at, name)
    drawn = timeline(step["simulation"], f"{name}, {at.name}", step["exposed_seconds"], at.layout.virtual)
    return Figure("scale-timeline", drawn.title, drawn.caption, drawn.alternative, drawn.draw)


def _trains(row: Row) -> bool:
    return row["training"]["fits"]


def _serves(row: Row) -> bool:
    return row["serving"]["free_bytes"] > 0


def _prefills(row: Row) -> bool:
    return row["serving"]["state_bytes"] <= row["serving"]["free_bytes"]


def _heat(
    name: str,
    title: str,
    rows: Sequence[Row],
    words: Sequence[tuple[str, int, str]],
    value: Callable[[Row], float],
    fits: Callable[[Row], bool],
) -> Figure:
    """Methods x cases: how much longer, with what does not fit into memory marked."""
    columns = {(shape, tokens): word for shape, tokens, word in words}
    found = [_cell(row, columns, value, fits) for row in rows]
    order = sorted({row["method"] for row in rows}, key=lambda method: -max(c["value"] for c in found if c["method"] == method))
    over = [cell for cell in found if cell["value"] > LIMIT]
    caption = (
        "In percent over the residual stream. Framed and orange: more than 5 %. A dagger: does not fit into the memory of a "
        "device, where the residual stream does. A dash: the method does not fit the shape."
    )
    told = f"{len(over)} of {sum(1 for cell in found if cell['text'] != '-')} cells are over 5 %: " + "; ".join(
        f"{cell['method']}, {cell['case'].replace(chr(10), ' ')}: {100 * cell['value']:.1f} %" for cell in over
    )
    return Figure(f"scale-{name}", title, caption, told, lambda width: _heat_chart(found, order, list(columns.values()), width))


def _cell(row: Row, columns: Mapping[Any, str], value: Callable[[Row], float], fits: Callable[[Row], bool]) -> dict[str, Any]:
    cell = {"method": row["method"], "case": columns[row["shape"], row["tokens"]]}
    if "refusal" in row:
        return cell | {"value": 0.0, "text": "-", "fill": PAPER, "shade": 1.0, "ink": MUTED, "edge": PAPER, "rim": 0.0}
    number = value(row)
    above = number > LIMIT
    shade = min(1.0, 0.25 + 0.75 * (number - LIMIT) / (FULL - LIMIT)) if above else 1.0
    return cell | {
        "value": number,
        "text": _percent(number) + ("" if fits(row) else " †"),
        "fill": ARMS[1] if above else BAND,
        "shade": shade,
        "ink": PAPER if above and shade > 0.75 else INK,
        "rim": 1.2 if above else 0.0,
    }


def _percent(part: float) -> str:
    return f"{100 * part:.0f}" if abs(part) >= 0.0995 else f"{max(100 * part, 0):.1f}"


def _heat_chart(cells: Sequence[dict[str, Any]], order: Sequence[str], columns: Sequence[str], width: int) -> Any:
    top = alt.Axis(
        orient="top",
        labelAngle=0,
        ticks=False,
        domain=False,
        labelExpr="split(datum.label, '\\n')",
        labelColor=INK,
        labelPadding=20,
    )
    x = alt.X("case:N", sort=columns, title=None, axis=top, scale=alt.Scale(paddingInner=0.04, paddingOuter=0))
    y = alt.Y("method:N", sort=order, title=None, axis=row_axis(NAMES, width), scale=alt.Scale(paddingInner=0.08))
    drawn = values(cells)
    shade = alt.Opacity("shade:Q", scale=None)
    boxes = drawn.mark_rect().encode(x=x, y=y, color=own_color("fill"), opacity=shade)
    frames = values([cell for cell in cells if cell["rim"]]).mark_rect(filled=False, stroke=ARMS[1], strokeWidth=1.2)
    texts = drawn.mark_text(fontSize=10.5, aria=False).encode(x=x, y=y, text="text:N", color=own_color("ink"))
    return alt.layer(boxes, frames.encode(x=x, y=y), texts).properties(width=width - NAMES - 20, height=ROW * len(order))


def _parts(rows: Sequence[Row]) -> Figure:
    """What the overheads over the limit are made of, one panel for each shape."""
    shown = [row for row in rows if "refusal" not in row and row["training"]["overhead"] > LIMIT]
    names = sorted(
        {row["method"] for row in shown}, key=lambda n: -max(r["training"]["overhead"] for r in shown if r["method"] == n)
    )
    data = [
        {"method": row["method"], "shape": row["shape"], "part": word, "percent": 100 * row["training"][part], "order": order}
        for row in shown
        for order, (part, (word, _)) in enumerate(PARTS.items())
        if abs(row["training"][part]) >= 0.0005
    ]
    color = alt.Color(
        "part:N",
        title=None,
        scale=alt.Scale(domain=[w for w, _ in PARTS.values()], range=[c for _, c in PARTS.values()]),
        legend=alt.Legend(orient="top", direction="horizontal", columns=5, labelLimit=220, labelColor=INK),
    )

    def draw(width: int) -> Any:
        panel = (width - NAMES - 60) // len(SHAPES)
        panels = []
        for index, (shape, word) in enumerate(SHAPES.items()):
            axis = row_axis(0 if index else NAMES, width)
            y = alt.Y("method:N", sort=names, title=None, axis=axis, scale=alt.Scale(domain=names))
            x = alt.X("percent:Q", title="percent of the step", axis=alt.Axis(tickCount=5))
            own = values([row for row in data if row["shape"] == shape])
            bars = own.mark_bar().encode(x=x, y=y, color=color, order="order:Q")
            panels.append(alt.layer(bars, _rule("x")).properties(width=panel, height=ROW * len(names), title=_title(word)))
        return alt.hconcat(*panels)

    told = "; ".join(
        f"{row['method']} at {SHAPES[row['shape']]}: "
        + ", ".join(f"{PARTS[part][0]} {100 * row['training'][part]:.1f} %" for part in PARTS)
        for row in shown
    )
    caption = (
        "Methods over 5 % in training at 8k tokens with caching across stages. Depth operation and mixers with the idle time "
        "that they bring along in proportion. The vertical line is 5 %."
    )
    return Figure("scale-parts", "What the overhead is made of", caption, told, draw)


def _rule(way: str) -> Any:
    at = {way: alt.datum(100 * LIMIT)}
    return values([{}]).mark_rule(color=INK, strokeDash=[4, 3], strokeWidth=1).encode(**at)


def _title(text: str) -> Any:
    return alt.TitleParams(text, fontSize=12, anchor="start", frame="group")


def _boundaries(rows: Sequence[Row], control: Mapping[str, int]) -> Figure:
    """What a token sends over the worst boundary, in hidden states."""
    data = [
        {
            "method": row["method"],
            "shape": row["shape"],
            "way": word,
            "states": row["forwarding"][way]["boundary_bytes"] / control[row["shape"]],
        }
        for row in rows
        if "refusal" not in row
        for way, (word, _) in WAYS.items()
    ]
    shown = {point["method"] for point in data if point["states"] > 1.001}
    data = [point for point in data if point["method"] in shown]
    names = sorted(shown, key=lambda name: -max(point["states"] for point in data if point["method"] == name))
    color = alt.Color(
        "way:N",
        title=None,
        scale=alt.Scale(domain=[w for w, _ in WAYS.values()], range=[c for _, c in WAYS.values()]),
        legend=alt.Legend(orient="top", direction="horizontal", labelColor=INK),
    )

    def draw(width: int) -> Any:
        panel = (width - NAMES - 60) // len(SHAPES)
        panels = []
        for index, (shape, word) in enumerate(SHAPES.items()):
            own = values([point for point in data if point["shape"] == shape])
            y = alt.Y(
                "method:N", sort=names, title=None, axis=row_axis(0 if index else NAMES, width), scale=alt.Scale(domain=names)
            )
            x = alt.X(
                "states:Q",
                title="hidden states per token",
                scale=alt.Scale(type="log", domain=[1, 200]),
                axis=alt.Axis(values=[1, 2, 4, 8, 16, 32, 64, 128]),
            )
            lines = own.mark_line(color=GRID, strokeWidth=3).encode(x=x, y=y, detail="method:N")
            points = own.mark_point(filled=True, size=55, opacity=1).encode(x=x, y=y, color=color)
            panels.append(alt.layer(lines, points).properties(width=panel, height=ROW * len(names), title=_title(word)))
        return alt.hconcat(*panels)

    told = "; ".join(f"{p['method']} at {SHAPES[p['shape']]}, {p['way']}: {p['states']:.1f}" for p in data)
    caption = (
        "Tensors as wide as the stream that one token sends over the stage boundary that carries most, each way; the residual "
        "stream sends 1. Methods that send 1 too are left out."
    )
    return Figure("scale-boundaries", "The state at the worst stage boundary", caption, told, draw)


def _break_even(by_layers: Sequence[Row], by_stages: Sequence[Row]) -> Figure:
    """Overheads of histories by the number of layers, and by virtual stages for two ways of forwarding."""
    names = list(dict.fromkeys(row["method"] for row in by_layers))
    ends = {row["method"]: row["overhead"] for row in by_layers}
    names = sorted(names, key=lambda name: -ends[name])
    palette = (*ARMS, DARK, "#7a9e00", "#d07aa8", "#4aa5c4")
    colors = dict(zip(names, palette, strict=False))
    y = alt.Y(
        "percent:Q",
        title="overhead of a training step, %",
        scale=alt.Scale(type="log", domain=[0.1, 100], clamp=True),
        axis=alt.Axis(values=[0.1, 0.5, 1, 5, 10, 50, 100]),
    )
    color = alt.Color(
        "method:N",
        title=None,
        scale=alt.Scale(domain=names, range=list(colors.values())),
        legend=alt.Legend(labelColor=INK, labelLimit=180),
    )
    layers = [{"method": r["method"], "at": r["layers"], "percent": 100 * r["overhead"]} for r in by_layers]
    stages = [
        {"method": r["method"], "at": r["virtual"], "percent": 100 * r["overhead"], "way": WAYS[r["forwarding"]][0]}
        for r in by_stages
        if r["forwarding"] in ("naive", "cached")
    ]

    def draw(width: int) -> Any:
        panel = (width - 290) // 2
        deep = alt.X(
            "at:Q",
            title="layers, D = 4096",
            scale=alt.Scale(type="log", base=2, domain=[8, 64]),
            axis=alt.Axis(values=sorted({p["at"] for p in layers})),
        )
        cut = alt.X(
            "at:Q",
            title="virtual stages on each of 4 ranks, 32 layers",
            scale=alt.Scale(type="log", base=2),
            axis=alt.Axis(values=sorted({p["at"] for p in stages})),
        )
        dash = alt.StrokeDash(
            "way:N",
            title=None,
            scale=alt.Scale(domain=["cached", "naive"], range=[[1, 0], [4, 3]]),
            legend=alt.Legend(labelColor=INK, symbolStrokeColor=INK),
        )
        left = values(layers).mark_line(point=alt.OverlayMarkDef(size=25)).encode(x=deep, y=y, color=color)
        right = values(stages).mark_line().encode(x=cut, y=y, color=color, strokeDash=dash)
        panels = [
            alt.layer(left, _rule("y")).properties(
                width=panel, height=320, title=_title("By depth, two virtual stages, cached")
            ),
            alt.layer(right, _rule("y")).properties(width=panel, height=320, title=_title("By virtual stages")),
        ]
        return alt.hconcat(*panels)

    told = "; ".join(f"{p['method']}, {p['at']} layers: {p['percent']:.1f} %" for p in layers)
    told += "; " + "; ".join(f"{p['method']}, {p['at']} virtual stages, {p['way']}: {p['percent']:.1f} %" for p in stages)
    caption = "The 7B shape at 8k tokens on 64 GPUs. The dashed horizontal line is 5 %."
    return Figure("scale-break-even", "Where histories break even", caption, told, draw)
