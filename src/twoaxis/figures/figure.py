"""A figure with its words, and how one specification becomes SVG, page and PNG."""

import json
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import vl_convert
from altair.utils.schemapi import debug_mode

from twoaxis.figures.theme import NARROW, PNG_SCALE, STYLE, WIDE

Width = Literal["wide", "narrow"]


@dataclass(frozen=True)
class Figure:
    """One figure, drawn anew for each width.

    Attributes:
        name: of its files.
        title: what it shows.
        caption: how to read it.
        alternative: what it shows in words and numbers, for those who cannot see it.
        draw: its specification for a width in CSS pixels.
    """

    name: str
    title: str
    caption: str
    alternative: str
    draw: Callable[[int], Any]

    def svg(self) -> str:
        """The figure as a file that stands alone, with its title and a white ground."""
        return _renumbered(vl_convert.vegalite_to_svg(self._alone), self.name)

    def png(self) -> bytes:
        """The same as a picture."""
        return vl_convert.vegalite_to_png(self._alone, scale=PNG_SCALE)

    def inline(self, width: Width) -> str:
        """The figure as a part of a page, which gives it a heading, its font and its colours."""
        svg = vl_convert.vegalite_to_svg(json.dumps(self.wide if width == "wide" else self.narrow))
        return _compact(_renumbered(svg, f"{self.name}-{width}"))

    @cached_property
    def wide(self) -> dict[str, Any]:
        """The specification for screens and paper, with the look of all figures."""
        return self._spec(WIDE)

    @cached_property
    def narrow(self) -> dict[str, Any]:
        """The same for phones."""
        return self._spec(NARROW)

    def _spec(self, width: int) -> dict[str, Any]:
        # Checking every part of a chart when it is made takes longer than all the rest; tests check the whole.
        with debug_mode(False):
            return {**self.draw(width).to_dict(validate=False), "config": STYLE, "padding": 4}

    @cached_property
    def _alone(self) -> str:
        title = {"text": self.title, "subtitle": textwrap.wrap(self.caption, 150), "frame": "bounds", "offset": 14}
        return json.dumps({**self.wide, "title": title, "padding": 16})


_WORDLESS = re.compile(
    r' (?:font-family|aria-roledescription|pointer-events|stroke-miterlimit|xmlns(?::\w+)?|version|class)="[^"]*"'
)
_EMPTY = re.compile(r'<path(?: aria-hidden="true")? d=""(?: display="none")?/>|<path aria-hidden="true" d="M0,0h0v0h0Z"/>')
_ROLES = re.compile(r' role="graphics-(?:object|symbol)"(?: aria-label="[XY]-axis[^"]*")?')
_PLACES = re.compile(r' (?:d|transform|x2|y2)="[^"]*"')
_DIGITS = re.compile(r"(\.\d\d)\d+")
_IDS = re.compile(r'\bid="([^"]*)"')
_REFERENCES = re.compile(r"url\(#([^)]+)\)")
_OPAQUE = re.compile(r' opacity="1"')


def _compact(svg: str) -> str:
    """The drawing without what a page says once for all."""
    for pattern in (_WORDLESS, _ROLES, _EMPTY, _OPAQUE):
        svg = pattern.sub("", svg)
    return _PLACES.sub(lambda found: _DIGITS.sub(r"\1", found[0]), svg)


def _renumbered(svg: str, prefix: str) -> str:
    """The drawing with ids of its own that do not depend on what was drawn before."""
    numbers = {name: f"{prefix}-{number}" for number, name in enumerate(dict.fromkeys(_IDS.findall(svg)))}
    svg = _IDS.sub(lambda found: f'id="{numbers[found[1]]}"', svg)
    return _REFERENCES.sub(lambda found: f"url(#{numbers[found[1]]})", svg)
