"""How every arm is called and drawn, and where labels go so that none covers another."""

import json
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from twoaxis.display.theme import ARMS, COMPANION, CONTROL
from twoaxis.study.report_data import ReportData


def readable(data: ReportData) -> ReportData:
    """The same report with the names of generated companions in words, except in the design.

    Example: `deep_delta~short_swa@flops` becomes `deep_delta: short swa, equal FLOPs`.
    """
    companions = sorted((name for name in data.arms if "~" in name), key=len, reverse=True)
    if not companions:
        return data
    text = json.dumps(data.replace(design={}).to_data())
    for name in companions:
        arm, _, rest = name.partition("~")
        kind, _, matched = rest.partition("@")
        equal = {"": "", "flops": ", equal FLOPs", "params": ", equal parameters"}.get(matched, f", equal {matched}")
        text = text.replace(name, f"{arm or 'every arm'}: {kind.replace('_', ' ')}{equal}")
    return ReportData.from_data(json.loads(text)).replace(design=data.design)


def colors(data: ReportData) -> dict[str, str]:
    """The colour of every arm: the control dark grey, companions grey, treatments in turn."""
    found, number = {}, 0
    for name, arm in data.arms.items():
        if arm.control:
            found[name] = CONTROL
        elif arm.role == "companion":
            found[name] = COMPANION
        else:
            found[name] = ARMS[number % len(ARMS)]
            number += 1
    return found


Stroke = Literal["thin", "broken", "full"]
"""The stroke of companions, of treatments whose colour is used a second time, and of all others."""


def stroke(data: ReportData, name: str) -> Stroke:
    """The stroke of an arm."""
    if data.arms[name].role == "companion":
        return "thin"
    treatments = [arm for arm, of in data.arms.items() if of.role == "treatment"]
    return "broken" if name in treatments[len(ARMS) :] else "full"


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Moves positions at least `gap` apart and within the ends, keeping their order and staying near.

    Example:
        >>> spread([10, 11, 50], gap=10, low=0, high=100)
        [5.5, 15.5, 50.0]
    """
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    gap = min(gap, (high - low) / max(len(order) - 1, 1))
    # Runs of labels that touch are moved as one, with their mean where it was.
    runs: list[tuple[float, int]] = []
    for index in order:
        centre, size = min(max(wanted[index], low), high), 1
        while runs and centre - runs[-1][0] < gap * (size + runs[-1][1]) / 2:
            other, n = runs.pop()
            centre, size = (other * n + centre * size) / (n + size), n + size
            half = gap * (size - 1) / 2
            centre = min(max(centre, low + half), high - half)
        runs.append((centre, size))
    placed = [centre + gap * (turn - (size - 1) / 2) for centre, size in runs for turn in range(size)]
    return [round(placed[order.index(index)], 2) for index in range(len(wanted))]


class Frame(NamedTuple):
    """The axes of a drawing and its size in pixels.

    Attributes:
        x: ends of the horizontal axis.
        y: ends of the vertical axis.
        width: in pixels.
        height: in pixels.
        kind: of the horizontal axis, `linear` or `log`.

    Example:
        >>> frame = Frame((1.0, 100.0), (0.0, 2.0), 200, 100, "log")
        >>> frame.pixel(10.0, 0.5), [round(value, 6) for value in frame.value(100.0, 75.0)]
        ((100.0, 75.0), [10.0, 0.5])
    """

    x: tuple[float, float]
    y: tuple[float, float]
    width: float
    height: float
    kind: Literal["linear", "log"] = "linear"

    def pixel(self, x: float, y: float) -> tuple[float, float]:
        """Converts a value to pixels."""
        low, high = map(self._scaled, self.x)
        across = (self._scaled(x) - low) / (high - low)
        return self.width * across, self.height * (self.y[1] - y) / (self.y[1] - self.y[0])

    def value(self, left: float, top: float) -> tuple[float, float]:
        """Converts pixels to a value."""
        low, high = map(self._scaled, self.x)
        across = low + (high - low) * left / self.width
        x = math.exp(across) if self.kind == "log" else across
        return x, self.y[1] - (self.y[1] - self.y[0]) * top / self.height

    def _scaled(self, x: float) -> float:
        return math.log(x) if self.kind == "log" else x


class LabelPosition(NamedTuple):
    """The left end of a label and the height of its middle, in pixels."""

    x: float
    y: float


OVERLAP = 4
"""Pixels between two points that a label cannot tell apart."""


def place_labels(
    points: Sequence[tuple[float, float]], texts: Sequence[str], frame: Frame, size: float = 11
) -> list[LabelPosition | None]:
    """Positions the label of each point nearest to it, covering neither a point nor an earlier label; None where impossible.

    Args:
        points: in pixels, the most important first and those without a label last.
        texts: the labels of the first.
        frame: the drawing that contains all labels.
        size: of the letters.
    """
    named = points[: len(texts)]
    taken = [(x - 4, y - 4, x + 4, y + 4) for x, y in points]
    found: list[LabelPosition | None] = []
    for (x, y), text in zip(named, texts, strict=True):
        length, half = 0.56 * size * len(text), 0.55 * size
        places = [
            LabelPosition(left, middle)
            for away in (8.0, 13.0, 20.0)
            for left, middle in (
                (x + away, y),
                (x - away - length, y),
                (x + 4, y - away - 2),
                (x + 4, y + away + 2),
                (x - length - 2, y - away - 2),
                (x - length - 2, y + away + 2),
                (x + away, y - 2 * away),
                (x + away, y + 2 * away),
            )
        ]
        boxes = {place: (place.x, place.y - half, place.x + length, place.y + half) for place in places}
        fit = (
            place
            for place, box in boxes.items()
            if _is_free(box, frame, taken) and _away(box, x, y) <= min(_away(box, *point) for point in named) + OVERLAP
        )
        found.append(next(fit, None))
        if (at := found[-1]) is not None:
            taken.append(boxes[at])
    return found


Box = tuple[float, float, float, float]
"""The left, top, right and bottom of a rectangle, in pixels."""


def _is_free(box: Box, frame: Frame, taken: Sequence[Box]) -> bool:
    left, top, right, bottom = box
    if left < 0 or right > frame.width or top < 0 or bottom > frame.height:
        return False
    return all(right < x0 or left > x1 or bottom < y0 or top > y1 for x0, y0, x1, y1 in taken)


def _away(box: Box, x: float, y: float) -> float:
    """The distance of a point from a rectangle."""
    left, top, right, bottom = box
    return math.hypot(max(left - x, 0, x - right), max(top - y, 0, y - bottom))
