"""Bars of all methods as SVG, sorted; the page runs this module as it stands, so a figure is the same with and without it.

A bar is {`method`, `name`, `value`, `text`, `tone`}, where the tone is a class of the style sheet.
"""

from typing import Any

from twoaxis.planner.page.rows import sorted_by
from twoaxis.planner.page.written import place

Data = dict[str, Any]

ROW = 19


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
