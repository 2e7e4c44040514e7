"""Pages of HTML from templates, in which every text is escaped and which need nothing beside themselves.

A template is named by the package that it lies in and its file. `static/parts.html` holds what pages are made of.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from importlib.resources import files
from typing import Any, NamedTuple

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup, escape

from twoaxis.display import theme
from twoaxis.display.figures import Figure
from twoaxis.display.numbers import MISSING

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
"""What a browser may load for a page: nothing that is not in it."""


class Reason(str):
    """Why a cell holds no word or number, in a sentence."""


class Number(NamedTuple):
    """A cell with a number: how it is written, and its value, by which a reader may sort."""

    text: str
    value: float


Cell = str | Number | Markup | Reason | None
"""A cell of a table; None is nothing to report."""


def render(template: str, **values: Any) -> str:
    """A page.

    Args:
        template: package and file, such as "twoaxis.study.page/report.html".
        values: what it shows.
    """
    return _environment().get_template(template).render(values)


def number(value: float | None, written: Callable[[Any], str]) -> Cell:
    """A cell with a number, or with nothing to report."""
    return None if value is None else Number(written(value), float(value))


def table(
    caption: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[Cell]],
    text: Sequence[str] = (),
    long: Sequence[str] = (),
    groups: Sequence[tuple[str, int]] = (),
) -> Markup:
    """A table that scrolls inside its box, whose first column names the rows.

    Args:
        caption: what it holds.
        columns: their names.
        rows: cells; the first of each is its name.
        text: the columns that hold a few words; the others hold numbers.
        long: those that hold sentences.
        groups: names above the columns with how many each spans.
    """
    kinds = ["long" if name in long else "text" if at == 0 or name in text else "number" for at, name in enumerate(columns)]
    return _part("table", caption, list(zip(columns, kinds, strict=True)), list(rows), groups)


def figure(drawn: Figure | None, heading: str = "own") -> Markup:
    """A figure for wide and for narrow screens, with its words for those who cannot see it.

    Args:
        drawn: the figure; nothing for None.
        heading: its `own` title, or `none` where the section says it.
    """
    return Markup() if drawn is None else _part("figure", drawn, heading)


def section(name: str, title: str, *parts: str, lead: str = "") -> Markup:
    """A section with a heading that links lead to; nothing when it has no parts."""
    return _part("section", name, title, lead, parts)


def details(summary: str, *parts: str, state: str = "closed", kind: str = "") -> Markup:
    """Parts that a reader may open; nothing when there are none."""
    return _part("details", summary, parts, state, kind)


def alternatives(label: str, parts: Iterable[tuple[str, str]]) -> Markup:
    """Parts of which a reader sees one at a time; without scripts, all of them one below the other."""
    return _part("alternatives", label, list(parts))


def heading(text: str) -> Markup:
    """A heading inside a section."""
    return _part("heading", text)


def paragraph(text: str, kind: str = "") -> Markup:
    """A paragraph; nothing for no text."""
    return _part("paragraph", text, kind)


def bullets(texts: Iterable[str]) -> Markup:
    """A list; nothing for no texts."""
    return _part("bullets", list(texts))


def code(text: str) -> Markup:
    """Text as it stands, which a reader can scroll."""
    return Markup('<pre tabindex="0">{}</pre>').format(text)


def breakable(name: str) -> Markup:
    """The name of an arm, which may break where its parts meet."""
    return name if isinstance(name, Markup) else Markup(re.sub(r"([~@._-])", r"<wbr>\1", str(escape(name))))


def part(template: str, name: str, *values: Any) -> Markup:
    """What a macro of a template makes.

    Args:
        template: package and file.
        name: of the macro.
        values: its arguments.
    """
    return getattr(_environment().get_template(template).module, name)(*values)


def _part(name: str, *values: Any) -> Markup:
    return part("twoaxis.display/static/parts.html", name, *values)


@cache
def _environment() -> Environment:
    found = Environment(
        loader=FunctionLoader(_file), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    found.filters |= {"breakable": breakable, "data": _data, "json": partial(json.dumps, ensure_ascii=False)}
    found.tests["reason"] = lambda cell: isinstance(cell, Reason)
    found.globals |= {"file": lambda name: Markup(_file(name)), "POLICY": Markup(POLICY)}
    found.globals |= {"MISSING": MISSING, "COLORS": theme.PAGE_COLORS}
    return found


@cache
def _file(name: str) -> str:
    package, _, path = name.partition("/")
    return files(package).joinpath(path).read_text(encoding="utf-8")


def _data(value: Any) -> Markup:
    """JSON that may stand in a page: nothing in it ends the script."""
    return Markup(json.dumps(value, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c"))
