"""The depth state along the stack as SVG, one line for each method; the page runs this module as it stands."""

from typing import Any

from twoaxis.planner.page.bars import line_at, opening, text_at
from twoaxis.planner.page.written import BYTES, amount, log2_of, place

Data = dict[str, Any]


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
            # One name for the largest state, too; of several as large the first has it.
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
    """The name of a method above the highest place of its line, at the right."""
    y = max(14, height_of(top_of(series), axes) - 8)
    return '<g class="series ' + series["tone"] + '">' + text_at(axes[1], y, "end", "name", series["name"]) + "</g>"


def height_of(value: float, axes: list[float]) -> float:
    """Where a value stands."""
    return axes[2] - (log2_of(max(1, value)) - axes[3]) * axes[4]


def top_of(series: Data) -> float:
    """The largest value of a method."""
    most = 0
    for value in series["values"]:
        most = max(most, value)
    return most
