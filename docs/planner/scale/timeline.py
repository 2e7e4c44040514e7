"""The timeline of a pipeline step: what each rank computes and sends, and when it waits."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import altair as alt

from twoaxis.display.figures import values
from twoaxis.display.theme import ARMS, BAND, INK, PAPER

ROW, SENT = 30, 7
"""Height of a row in CSS pixels, and the part of it at its bottom in which transfers stand."""

DIGIT = 6.5
"""Width of a digit of a microbatch number, in CSS pixels."""

LEFT = 60
"""Room for the names of the rows, in CSS pixels."""

ENTRY = 110
"""Room for one entry of the legend, in CSS pixels."""

UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


class Colors(NamedTuple):
    """The colours of a timeline; the numbers on the bars are written in `number`."""

    forward: str = ARMS[0]
    backward: str = ARMS[1]
    activations: str = "#5fa8d3"
    gradients: str = "#eda06b"
    idle: str = BAND
    number: str = PAPER
    text: str = INK


@dataclass(frozen=True)
class Timeline:
    """A timeline with its words, to be drawn in any colours.

    Attributes:
        title: what it shows.
        caption: how to read it, with the bubble and the exposed communication.
        alternative: what it shows in words and numbers, for those who cannot see it.
        result: what `formulas.schedules.simulate` has returned.
        colors: of its bars.
    """

    title: str
    caption: str
    alternative: str
    result: Mapping[str, Any]
    colors: Colors

    def draw(self, width: int) -> Any:
        """The chart for a width in CSS pixels, without a theme: its reader adds title, fonts and axis colours."""
        return _chart(self.result, width, self.colors)


def timeline(
    result: Mapping[str, Any], name: str, exposed_seconds: float, virtual: int = 1, colors: Colors | None = None
) -> Timeline:
    """The timeline of a simulated step.

    Args:
        result: what `formulas.schedules.simulate` has returned.
        name: of the schedule, for the title.
        exposed_seconds: what communication adds to the step.
        virtual: stages on each rank.
        colors: of the bars; None takes the default ones.
    """
    step, ranks = result["step_seconds"], len(result["idle_share"])
    microbatches = len({action["microbatch"] for action in result["actions"]})
    unit, word = _unit(step)
    numbers = (
        f"Step {step / unit:.3g} {word}; ranks idle {100 * result['bubble']:.1f} % of it on average; communication adds "
        f"{exposed_seconds / unit:.3g} {word}, {100 * exposed_seconds / step if step else 0:.1f} % of the step."
    )
    stages = " Later stages of a rank are paler." if virtual > 1 else ""
    caption = (
        f"One row for each pipeline rank; numbers, where they fit, are microbatches.{stages} "
        f"Thin bars below: what the rank sends. Grey: it waits. {numbers}"
    )
    shares = ", ".join(f"{100 * share:.1f} %" for share in result["idle_share"])
    told = f"Ranks: {ranks}; stages on each: {virtual}; microbatches: {microbatches}. {numbers} Idle by rank: {shares}."
    return Timeline(f"One step of {name}", caption, told, result, colors or Colors())


def _unit(seconds: float) -> tuple[float, str]:
    """The unit in which a time has one to three digits before the point."""
    return next((unit for unit in UNITS if seconds >= unit[0]), UNITS[-1])


def _chart(result: Mapping[str, Any], width: int, colors: Colors) -> Any:
    unit, word = _unit(result["step_seconds"])
    end, ranks = result["step_seconds"] / unit, len(result["idle_share"])
    bars, sent = _bars(result, unit, colors), _sent(result, unit, colors)
    x = alt.X("start:Q", title=f"time, {word}", scale=alt.Scale(domain=[0, end], nice=False), axis=alt.Axis(grid=False))
    labels = alt.Axis(
        values=[rank + 0.5 for rank in range(ranks)],
        labelExpr="'rank ' + format(datum.value - 0.5, 'd')",
        grid=False,
        ticks=False,
        domain=False,
        labelPadding=6,
        labelOverlap=False,
    )
    # The same in every layer, since layers merge their axes.
    rows: dict[str, Any] = {"title": None, "scale": alt.Scale(domain=[ranks, 0], nice=False), "axis": labels}
    places = {"x": x, "x2": "end:Q", "y": alt.Y("top:Q", **rows), "y2": "bottom:Q"}
    legend = alt.Legend(orient="top", direction="horizontal", columns=max(1, (width - LEFT) // ENTRY))
    fill = alt.Color("what:N", title=None, scale=_named(colors, sent), legend=legend)
    idle = [{"start": 0, "end": end, "top": rank + 0.06, "bottom": rank + 0.94, "what": "idle"} for rank in range(ranks)]
    shade = alt.Opacity("shade:Q", scale=None)
    layers = [values(idle).mark_rect().encode(**places, color=fill)]
    if bars:
        drawn = values(bars)
        # White below what is paler, or the grey of idle time would show through.
        layers.append(drawn.mark_rect(color=colors.number, stroke=colors.number, strokeWidth=0.5).encode(**places))
        layers.append(drawn.mark_rect(stroke=colors.number, strokeWidth=0.5).encode(**places, color=fill, opacity=shade))
    if sent:
        layers.append(values(sent).mark_rect().encode(**places, color=fill))
    room = (width - LEFT) / end if end else 0
    numbered = [row for row in bars if (row["end"] - row["start"]) * room >= DIGIT * len(row["number"]) + 2]
    if numbered:
        middle = values(numbered).mark_text(fontSize=10, baseline="middle", aria=False)
        at = {"x": alt.X("middle:Q"), "y": alt.Y("center:Q", **rows)}
        layers.append(middle.encode(**at, text="number:N", color=alt.Color("ink:N", scale=None, legend=None)))
    return alt.layer(*layers).properties(width=width - LEFT, height=ROW * ranks)


def _bars(result: Mapping[str, Any], unit: float, colors: Colors) -> list[dict[str, Any]]:
    """One row for each action that takes time, which leaves a strip below it for what its rank sends."""
    ranks, stages = len(result["idle_share"]), 1 + max((action["stage"] for action in result["actions"]), default=0)
    rows = []
    for action in result["actions"]:
        start, end = action["start"] / unit, action["end"] / unit
        if end <= start:
            continue
        turn, last = action["stage"] // ranks, max(stages // ranks - 1, 1)
        shade = 1 - 0.62 * turn / last
        top, bottom = action["rank"] + 0.06, action["rank"] + 0.94 - SENT / ROW
        rows.append(
            {
                "start": start,
                "end": end,
                "middle": (start + end) / 2,
                "top": top,
                "bottom": bottom,
                "center": (top + bottom) / 2,
                "what": action["kind"],
                "number": str(action["microbatch"]),
                "shade": shade,
                "ink": colors.number if shade > 0.8 else colors.text,
            }
        )
    return rows


def _sent(result: Mapping[str, Any], unit: float, colors: Colors) -> list[dict[str, Any]]:
    """One row for each transfer that takes time, in the row of its sender; activations above gradients."""
    rows = []
    for each in result["transfers"]:
        if each["end"] <= each["start"]:
            continue
        middle, half = each["source"] + 0.94 - SENT / ROW / 2, SENT / ROW / 2
        above = each["kind"] == "forward"
        rows.append(
            {
                "start": each["start"] / unit,
                "end": each["end"] / unit,
                "top": middle - half if above else middle,
                "bottom": middle if above else middle + half,
                "what": "activations sent" if above else "gradients sent",
            }
        )
    return rows


def _named(colors: Colors, sent: list[dict[str, Any]]) -> alt.Scale:
    names = {"forward": colors.forward, "backward": colors.backward, "idle": colors.idle}
    if sent:
        names |= {"activations sent": colors.activations, "gradients sent": colors.gradients}
    return alt.Scale(domain=list(names), range=list(names.values()))
