"""Bars and points of methods, lines of depth states and the timeline of a step as SVG, alike in Python and in a browser.

A bar is {`method`, `name`, `value`, `text`, `tone`}, where the tone is a class of the style sheet.
"""

from typing import Any

from twoaxis.planner.formulas.written import BYTES, SECONDS, amount, log2_of, percent, place

Data = dict[str, Any]

ROW = 19
RANK = 28


def bars(given: list[Data], chosen: int, limit: float, limit_text: str, label: str, width: int) -> str:
    """Horizontal bars.

    Args:
        given: the bars from top to bottom.
        chosen: the method that stands out.
        limit: a value with a line of its own, unless it is far above; 0 for none.
        limit_text: what it is.
        label: the figure in words.
        width: in CSS pixels.
    """
    names = 172
    left = names
    right = width - 58
    least = 0
    most = 0
    for bar in given:
        least = min(least, bar["value"])
        most = max(most, bar["value"])
    # A limit far above all bars would make them alike.
    limit = limit if limit < 2 * most else 0
    most = max(most, limit)
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
    for bar in given:
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


def points(given: list[Data], chosen: int, limit: float, limit_text: str, label: str, width: int) -> str:
    """A point for each method: its overhead across, its memory upwards, and a shaded area above the limit.

    Args:
        given: {`method`, `name`, `x`, `y`, `tip`, `tone`} of each method, the most important first.
        chosen: the method that stands out.
        limit: of the memory.
        limit_text: what it is.
        label: the figure in words.
        width: in CSS pixels.
    """
    height = 340
    left = 62
    right = width - 16
    top = 22
    bottom = height - 42
    low = given[0]["y"]
    high = given[0]["y"]
    least = 0
    most = 0.01
    for point in given:
        low = min(low, point["y"])
        high = max(high, point["y"])
        least = min(least, point["x"])
        most = max(most, point["x"])
    # A limit far above all methods would press them together.
    high = max(high, limit) if limit < 2 * high else high
    margin = 0.06 * max(high - low, 0.02 * high)
    axes = [
        left + 8,
        (right - left - 16) / (most - least),
        least,
        bottom,
        (bottom - top) / (high - low + 2 * margin),
        low - margin,
    ]
    drawn = opening(width, height, label)
    edge = max(top, bottom - (limit - axes[5]) * axes[4])
    if edge > top:
        drawn = drawn + box_at(left, top, right - left, edge - top, "beyond") + line_at(left, edge, right, edge, "limit")
    drawn = drawn + text_at(right, 14, "end", "limit", ("shaded: over " if edge > top else "the limit is above: ") + limit_text)
    step = nice_step(high - low + 2 * margin, 4)
    for index in range(int(axes[5] / step) + 1, int((high + margin) / step) + 1):
        y = bottom - (index * step - axes[5]) * axes[4]
        drawn = (
            drawn + line_at(left, y, right, y, "grid") + text_at(left - 7, y + 4, "end", "tick", amount(index * step, BYTES))
        )
    step = nice_step(most - least, 3 if width > 400 else 2)
    for index in range(0 - int(0 - least / step), int(most / step) + 1):
        x = axes[0] + (index * step - least) * axes[1]
        drawn = (
            drawn + line_at(x, bottom, x, bottom + 4, "axis") + text_at(x, bottom + 17, "middle", "tick", percent(index * step))
        )
    drawn = drawn + line_at(left, bottom, right, bottom, "axis")
    drawn = drawn + text_at((left + right) / 2, height - 4, "middle", "tick", "seconds of a training step beyond the control")
    return drawn + all_points(given, chosen, axes, right) + "</svg>"


def all_points(given: list[Data], chosen: int, axes: list[float], right: float) -> str:
    """The points and their names, the chosen method in front."""
    front = ""
    taken = []
    for point in given:
        x = axes[0] + (point["x"] - axes[2]) * axes[1]
        taken.append([x - 4, axes[3] - (point["y"] - axes[5]) * axes[4], x + 4])
    for point in given:
        if point["method"] == chosen:
            front = one_point(point, " chosen", axes, right, taken)
    for point in given:
        if point["method"] != chosen:
            front = one_point(point, "", axes, right, taken) + front
    return front


def one_point(point: Data, state: str, axes: list[float], right: float, taken: list) -> str:
    """A point, with its name where that covers none of those already written."""
    x = axes[0] + (point["x"] - axes[2]) * axes[1]
    y = axes[3] - (point["y"] - axes[5]) * axes[4]
    tone = point["tone"] + state
    drawn = '<g class="point ' + tone + '" data-method="' + str(point["method"]) + '" data-tip="' + point["tip"] + '">'
    drawn = drawn + '<circle cx="' + place(x) + '" cy="' + place(y) + '" r="' + ("4.5" if state == "" else "6.5") + '"/>'
    length = 6.6 * len(point["name"])
    start = x + 9 if x + 9 + length < right else x - 9 - length
    covered = 1 if start < axes[0] else 0
    for box in taken:
        if abs(box[1] - y) < (8 if box[2] - box[0] < 9 else 13) and start < box[2] and box[0] < start + length:
            covered = covered + 1
    if covered == 0 or state != "":
        taken.append([start, y, start + length])
        drawn = drawn + text_at(start, y + 4, "start", "name", point["name"])
    return drawn + "</g>"


def nice_step(span: float, parts: int) -> float:
    """A step of 1, 2 or 5 times a power of ten that divides a span into at least so many parts.

    Example:
        >>> nice_step(100, 4), nice_step(0.9, 4), nice_step(70, 5)
        (20.0, 0.2, 10.0)
    """
    step = 1.0
    while step * parts > span:
        step = step / 10
    while step * 10 * parts <= span:
        step = step * 10
    if step * 5 * parts <= span:
        return step * 5
    return step * 2 if step * 2 * parts <= span else step


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
