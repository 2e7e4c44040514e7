"""Bars of methods, lines of depth states and the timeline of a step as SVG, the same in Python and in a browser.

A bar is {`method`, `name`, `value`, `text`, `tone`}, where the tone is a class of the style sheet.
"""

from typing import Any

from twoaxis.planner.formulas.rows import sorted_by
from twoaxis.planner.formulas.written import BYTES, SECONDS, amount, log2_of, place

Data = dict[str, Any]

ROW = 19
RANK = 28


def bars(given: list[Data], chosen: int, limit: float, limit_text: str, label: str, width: int) -> str:
    """Horizontal bars from the smallest to the largest.

    Args:
        given: the bars.
        chosen: the method that stands out.
        limit: a value with a line of its own; 0 for none.
        limit_text: what it is.
        label: the figure in words.
        width: in CSS pixels.
    """
    names = 172
    left = names
    right = width - 58
    least = 0
    most = limit
    for bar in given:
        least = min(least, bar["value"])
        most = max(most, bar["value"])
    scale = (right - left) / (most - least) if most > least else 0
    zero = left - least * scale
    top = 18 if limit > 0 else 2
    height = top + ROW * len(given) + 4
    drawn = opening(width, height, label)
    if limit > 0:
        x = zero + limit * scale
        drawn = drawn + text_at(x, 11, "end" if x > width / 2 else "start", "limit", limit_text)
        drawn = drawn + line_at(x, top - 3, x, height - 2, "limit")
    drawn = drawn + line_at(zero, top, zero, height - 2, "axis")
    y = top
    for bar in sorted_by(given, "value"):
        tone = bar["tone"] + (" chosen" if bar["method"] == chosen else "")
        start = min(zero, zero + bar["value"] * scale)
        length = max(1, abs(bar["value"]) * scale)
        drawn = drawn + '<g class="bar ' + tone + '" data-method="' + str(bar["method"]) + '">'
        drawn = drawn + '<rect class="reach" x="0" y="' + place(y) + '" width="' + str(width) + '" height="' + str(ROW) + '"/>'
        drawn = drawn + text_at(names - 8, y + 13.5, "end", "name", bar["name"])
        drawn = drawn + box_at(start, y + 3, length, ROW - 6, "fill")
        drawn = drawn + text_at(max(zero, start + length) + 5, y + 13.5, "start", "value", bar["text"]) + "</g>"
        y = y + ROW
    return drawn + "</svg>"


def opening(width: float, height: float, label: str) -> str:
    """The start of a figure."""
    size = place(width) + " " + place(height)
    at = 'width="' + place(width) + '" height="' + place(height) + '"'
    return '<svg viewBox="0 0 ' + size + '" ' + at + ' role="img" aria-label="' + label + '">'


def text_at(x: float, y: float, anchor: str, style: str, text: str) -> str:
    """Words in a figure."""
    at = '<text x="' + place(x) + '" y="' + place(y) + '" text-anchor="' + anchor + '" class="' + style + '">'
    return at + text + "</text>"


def line_at(x: float, y: float, to_x: float, to_y: float, style: str) -> str:
    """A straight line."""
    ends = 'x1="' + place(x) + '" y1="' + place(y) + '" x2="' + place(to_x) + '" y2="' + place(to_y) + '"'
    return "<line " + ends + ' class="' + style + '"/>'


def box_at(x: float, y: float, width: float, height: float, style: str) -> str:
    """A rectangle."""
    corner = 'x="' + place(x) + '" y="' + place(y) + '"'
    size = 'width="' + place(width) + '" height="' + place(height) + '"'
    return "<rect " + corner + " " + size + ' class="' + style + '"/>'


def lines(given: list[Data], chosen: int, label: str, width: int) -> str:
    """Bytes per token at every boundary, on a logarithmic axis, the chosen method in front.

    Args:
        given: {`method`, `name`, `values`, `tone`} of each method.
        chosen: the one that stands out.
        label: the figure in words.
        width: in CSS pixels.
    """
    height = 300
    left = 62
    right = width - 12
    top = 24
    bottom = height - 34
    least = max(1, given[0]["values"][0])
    most = least
    for series in given:
        for value in series["values"]:
            least = min(least, max(1, value))
            most = max(most, value)
    low = log2_of(least) - 0.3
    scale = (bottom - top) / (log2_of(most) + 0.3 - low)
    steps = len(given[0]["values"]) - 1
    drawn = opening(width, height, label)
    decade = 1
    while decade <= most * 1.2:
        for digit in [1, 2, 5] if most < 20 * least else [1, 3]:
            y = bottom - (log2_of(digit * decade) - low) * scale
            if y <= bottom and y >= top:
                drawn = drawn + line_at(left, y, right, y, "grid")
                drawn = drawn + text_at(left - 7, y + 4, "end", "tick", amount(digit * decade, BYTES))
        decade = decade * 10
    every = max(1, (steps + 7) // 8)
    for boundary in range(steps + 1):
        if boundary % every == 0:
            x = left + boundary / steps * (right - left)
            drawn = drawn + text_at(x, bottom + 16, "middle", "tick", str(boundary))
    drawn = drawn + text_at((left + right) / 2, height - 3, "middle", "tick", "depth, in sublayers of the control")
    axes = [left, right, bottom, low, scale]
    front = ""
    named = False
    for series in given:
        if series["method"] == chosen:
            front = front + one_line(series, " chosen", axes) + name_at(series, axes)
        else:
            drawn = drawn + one_line(series, "", axes)
            # The first line with the largest state is named too.
            if not named and top_of(series) == most:
                front = name_at(series, axes) + front
                named = True
    drawn = drawn + front
    return drawn + "</svg>"


def one_line(series: Data, state: str, axes: list[float]) -> str:
    """One method: the stack is as long as the figure is wide, whatever its sublayers."""
    values = series["values"]
    path = ""
    for index in range(len(values)):
        x = axes[0] + index / (len(values) - 1) * (axes[1] - axes[0])
        path = path + ("M" if index == 0 else "L") + place(x) + " " + place(height_of(values[index], axes))
    tone = series["tone"] + state
    drawn = '<g class="series ' + tone + '" data-method="' + str(series["method"]) + '" data-tip="' + series["name"] + '">'
    return drawn + '<path d="' + path + '" class="reach"/><path d="' + path + '" class="stroke"/></g>'


def name_at(series: Data, axes: list[float]) -> str:
    """The name of a method above its line, at the right."""
    y = max(14, height_of(top_of(series), axes) - 8)
    return '<g class="series ' + series["tone"] + '">' + text_at(axes[1], y, "end", "name", series["name"]) + "</g>"


def height_of(value: float, axes: list[float]) -> float:
    """The y coordinate of a value."""
    return axes[2] - (log2_of(max(1, value)) - axes[3]) * axes[4]


def top_of(series: Data) -> float:
    """The largest value of a method."""
    most = 0
    for value in series["values"]:
        most = max(most, value)
    return most


def steps(result: Data, stages: int, microbatches: int, label: str, width: int) -> str:
    """One row for each rank: forward and backward passes, later stages paler, and its messages below.

    Args:
        result: what `formulas.schedules.simulate` has returned.
        stages: on each rank.
        microbatches: of the step; the figure states it if fewer are simulated.
        label: the figure in words.
        width: in CSS pixels.
    """
    ranks = len(result["idle_share"])
    left = 52
    right = width - 14
    height = RANK * ranks + 26
    scale = (right - left) / result["step_seconds"]
    drawn = opening(width, height, label)
    for rank in range(ranks):
        drawn = drawn + text_at(left - 8, RANK * rank + 15, "end", "tick", "rank " + str(rank))
        drawn = drawn + box_at(left, RANK * rank + 2, right - left, RANK - 5, "idle")
    for turn in range(stages):
        for kind in ["forward", "backward"]:
            path = ""
            for action in result["actions"]:
                if action["kind"] == kind and action["stage"] // ranks == turn:
                    path = path + outline(action, left, RANK * action["rank"] + 2, scale, RANK - 10, 0.4)
            shade = " paler" if 2 * turn >= stages and stages > 1 else ""
            drawn = drawn + '<path d="' + path + '" class="' + kind + shade + '"/>'
    for kind in ["forward", "backward"]:
        path = ""
        for sent in result["transfers"]:
            if sent["kind"] == kind:
                below = RANK * sent["source"] + RANK - 8 + (0 if kind == "forward" else 2.5)
                path = path + outline(sent, left, below, scale, 2.5, 0)
        drawn = drawn + '<path d="' + path + '" class="sent ' + kind + '"/>'
    drawn = drawn + numbers(result, left, scale)
    bottom = RANK * ranks + 2
    drawn = drawn + line_at(left, bottom, right, bottom, "axis")
    drawn = drawn + text_at(left, bottom + 16, "start", "tick", "0")
    shown = 0
    for action in result["actions"]:
        shown = max(shown, action["microbatch"] + 1)
    middle = amount(result["step_seconds"] / 2, SECONDS)
    if shown < microbatches:
        middle = str(shown) + " of the " + str(microbatches) + " microbatches"
    drawn = drawn + text_at((left + right) / 2, bottom + 16, "middle", "tick", middle)
    return drawn + text_at(right, bottom + 16, "end", "tick", amount(result["step_seconds"], SECONDS)) + "</svg>"


def outline(action: Data, left: float, top: float, scale: float, height: float, gap: float) -> str:
    """One rectangle of a path."""
    length = (action["end"] - action["start"]) * scale
    # Bars too short for a gap have none.
    length = length - gap if length > 3 * gap else length
    across = "h" + place(length) + "v" + place(height) + "h" + place(0 - length) + "z"
    return "M" + place(left + action["start"] * scale) + " " + place(top) + across


def numbers(result: Data, left: float, scale: float) -> str:
    """The microbatches, where they fit."""
    drawn = ""
    for action in result["actions"]:
        word = str(action["microbatch"])
        if (action["end"] - action["start"]) * scale >= 7 * len(word) + 3:
            middle = left + (action["start"] + action["end"]) / 2 * scale
            drawn = drawn + text_at(middle, RANK * action["rank"] + 15, "middle", "number", word)
    return drawn
