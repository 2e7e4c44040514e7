"""Figures with captions, rendered to SVG, PNG and pages from one specification; and helpers to build charts."""

import json
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import altair as alt
import vl_convert
from altair.utils.schemapi import debug_mode

from twoaxis.display.theme import INK, NARROW, PAPER, PNG_SCALE, STYLE, WIDE

Width = Literal["wide", "narrow"]


@dataclass(frozen=True)
class Figure:
    """One figure, drawn separately for each width.

    Attributes:
        name: of its files.
        title: a heading.
        caption: explains how to read it.
        alternative: its content in words and numbers, for readers who cannot see it.
        draw: makes the specification for a width in CSS pixels.
        csv: its numbers, for readers of a page; or a link to a figure with the same; "" for none.
    """

    name: str
    title: str
    caption: str
    alternative: str
    draw: Callable[[int], Any]
    csv: str = ""

    def svg(self) -> str:
        """The figure as a self-contained file, with its title and a white background."""
        return self._drawn

    def png(self) -> bytes:
        """The self-contained figure as a PNG image."""
        return vl_convert.svg_to_png(self._drawn, scale=PNG_SCALE)

    def inline(self, width: Width) -> str:
        """The figure as part of a page, which provides heading, font and colours."""
        svg = vl_convert.vegalite_to_svg(json.dumps(self.wide if width == "wide" else self.narrow))
        return _compact(_renumbered(svg, f"{self.name}-{width}"))

    @cached_property
    def wide(self) -> dict[str, Any]:
        """The specification for screens and paper, with the common style."""
        return self._spec(WIDE)

    @cached_property
    def narrow(self) -> dict[str, Any]:
        """The specification for phones."""
        return self._spec(NARROW)

    def _spec(self, width: int) -> dict[str, Any]:
        # Validation of every part dominates the time; tests validate the whole.
        with debug_mode(False):
            return {**self.draw(width).to_dict(validate=False), "config": STYLE, "padding": 4}

    @cached_property
    def _drawn(self) -> str:
        title = {"text": self.title, "subtitle": textwrap.wrap(self.caption, 150), "frame": "bounds", "offset": 14}
        svg = vl_convert.vegalite_to_svg(json.dumps({**self.wide, "title": title, "padding": 16}))
        return _renumbered(svg, self.name)


_WORDLESS = re.compile(
    r' (?:font-family|aria-roledescription|pointer-events|stroke-miterlimit|xmlns(?::\w+)?|version|class)="[^"]*"'
)
_EMPTY = re.compile(
    r'<path(?: aria-hidden="true")? d=""(?: display="none")?/>|<path aria-hidden="true" d="M0,0h[\d.]+v[\d.]+h-?[\d.]+Z"/>'
)
_ROLES = re.compile(r' role="graphics-(?:object|symbol)"(?: aria-label="[XY]-axis[^"]*")?')
_PLACES = re.compile(r' (?:d|transform|x2|y2)="[^"]*"')
_DIGITS = re.compile(r"(\.\d)\d+")
_ROUND = r"M([\d.]+),0A\4,\4,0,1,1,-\4,0A\4,\4,0,1,1,\4,0"
_CIRCLE = re.compile(rf'<path((?: aria-label="[^"]*")?) transform="translate\(([\d.]+),([\d.]+)\)" d="{_ROUND}"')
_NO_STROKE = re.compile(r'( fill="[^"]*") stroke-width="2"')
_ALIKE = re.compile(r'<path d="[^"]*"([^>]*)/>(?:<path d="[^"]*"\1/>)+')
_DRAWN = re.compile(r' d="([^"]*)"')
_IDS = re.compile(r'\bid="([^"]*)"')
_REFERENCES = re.compile(r"url\(#([^)]+)\)")
_USUAL = re.compile(
    r' (?:opacity="1"|stroke-width="1"|font-weight="normal"|font-size="11px"|[xy]2="0"|transform="translate\(0,0\)")'
)


def _compact(svg: str) -> str:
    """Removes attributes that a page sets once or that are usual, empty elements, and digits of coordinates; merges paths."""
    svg = _PLACES.sub(lambda found: _DIGITS.sub(r"\1", found[0]), svg)
    for pattern in (_WORDLESS, _ROLES, _EMPTY, _USUAL):
        svg = pattern.sub("", svg)
    svg = _CIRCLE.sub(r'<circle\1 cx="\2" cy="\3" r="\4"', _NO_STROKE.sub(r"\1", svg))
    while "<g></g>" in svg:
        svg = svg.replace("<g></g>", "")
    # Neighbours of one style without a label are one path.
    return _ALIKE.sub(lambda found: f'<path d="{"".join(_DRAWN.findall(found[0]))}"{found[1]}/>', svg)


def _renumbered(svg: str, prefix: str) -> str:
    """Makes ids unique and independent of earlier drawings."""
    numbers = {name: f"{prefix}-{number}" for number, name in enumerate(dict.fromkeys(_IDS.findall(svg)))}
    svg = _IDS.sub(lambda found: f'id="{numbers[found[1]]}"', svg)
    return _REFERENCES.sub(lambda found: f"url(#{numbers[found[1]]})", svg)


def values(rows: Sequence[dict[str, Any]]) -> Any:
    """Rows as the data of a chart."""
    # A tuple, since altair copies lists whenever charts are combined.
    return alt.Chart(alt.Data(values=tuple(rows)))


def own_color(name: str = "color") -> Any:
    """The colour given in a field of each row."""
    return alt.Color(f"{name}:N", scale=None, legend=None)


def padded(found: Sequence[float], part: float) -> tuple[float, float]:
    """The range of values with a margin."""
    margin = part * (max(found) - min(found)) or 0.1 * abs(max(found)) or 1.0
    return min(found) - margin, max(found) + margin


def labels(rows: Sequence[dict[str, Any]], x: Any, y: Any) -> tuple[Any, Any]:
    """Left-aligned labels at points, with a rim below that keeps them legible over lines."""
    drawn = values(rows).encode(x=x, y=y, text=alt.Text("text:N"))
    rim = drawn.mark_text(align="left", fontSize=11, color=PAPER, stroke=PAPER, strokeWidth=3.5, strokeJoin="round", aria=False)
    return rim, drawn.mark_text(align="left", fontSize=11, aria=False).encode(color=own_color())


def row_axis(labels: int, width: int) -> Any:
    """An axis with row names of one or several lines, of a width in pixels; 0 omits them."""
    return alt.Axis(
        ticks=False,
        domain=False,
        labels=bool(labels),
        labelPadding=8,
        minExtent=labels,
        maxExtent=max(labels, 1),
        labelLimit=max(labels - 10, 1),
        labelColor=INK,
        labelFontSize=11 if width > NARROW else 10,
        labelExpr="split(datum.label, '\\n')",
    )


def panel_title(text: str, width: int, labels: int) -> Any:
    """The title of a panel, which on a phone starts at the left of its labels."""
    return alt.TitleParams(text, fontSize=12, dx=-labels if width <= NARROW else 0)


def side_by_side(panels: Sequence[Any], width: int, columns: int) -> Any:
    """Panels in columns; one below the other on a narrow screen."""
    if len(panels) == 1:
        return panels[0]
    return alt.concat(*panels, columns=columns if width > NARROW else 1)


def shared_rows(panels: Sequence[Callable[[int, int], Any]], width: int, labels: int) -> Any:
    """Panels with the same rows, labelled in the first only; on a narrow screen one below the other, all labelled.

    Args:
        panels: each draws itself, given its width and the room for its labels.
        width: total, in pixels.
        labels: room for the labels.
    """
    if width <= NARROW:
        return alt.vconcat(*(panel(width, labels) for panel in panels), spacing=10)
    each = (width - labels - STYLE["concat"]["spacing"] * (len(panels) - 1)) // len(panels)
    return alt.hconcat(*(panel(each if at else each + labels, 0 if at else labels) for at, panel in enumerate(panels)))
