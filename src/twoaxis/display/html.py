"""Self-contained HTML pages from templates, with every text escaped.

A template is named by its package and file. `static/parts.html` contains the components of pages.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from importlib.resources import files
from typing import Any, NamedTuple
from urllib.parse import quote

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup, escape

from twoaxis.display import theme
from twoaxis.display.figures import Figure
from twoaxis.display.numbers import MINUS, MISSING

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
"""The content security policy of a page: nothing is loaded."""


SHORT = 12
"""Letters of a name that fits the narrowest column."""


class Reason(str):
    """A cell with the reason for having no value, in a sentence."""


class Number(NamedTuple):
    """A cell with a number: formatted, and as a value for sorting."""

    text: str
    value: float


Cell = str | Number | Markup | Reason | None
"""A cell of a table; None is a missing value."""


def render(template: str, **values: Any) -> str:
    """Renders a page.

    Args:
        template: package and file, such as "twoaxis.study.page/report.html".
        values: variables of the template.
    """
    return _environment().get_template(template).render(values)


def number(value: float | None, written: Callable[[Any], str]) -> Cell:
    """A cell with a number, or a missing value."""
    return None if value is None else Number(written(value), float(value))


def table(
    caption: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[Cell]],
    text: Sequence[str] = (),
    long: Sequence[str] = (),
    groups: Sequence[tuple[str, int]] = (),
) -> Markup:
    """A scrollable table, whose first column names the rows.

    Args:
        caption: above the table.
        columns: names.
        rows: of cells; the first is the name of the row.
        text: columns with a few words; others have numbers.
        long: columns with sentences.
        groups: names above the columns, with the number of columns of each.
    """
    kinds = ["long" if name in long else "text" if at == 0 or name in text else "number" for at, name in enumerate(columns)]
    return _part("table", caption, list(zip(columns, kinds, strict=True)), list(rows), groups)


def figure(drawn: Figure | None, heading: str = "own") -> Markup:
    """A figure for wide and narrow screens with its text alternative; nothing for None.

    Args:
        drawn: the figure.
        heading: its `own` title, or `none`.
    """
    return Markup() if drawn is None else _part("figure", drawn, heading)


def joined(*parts: str) -> Markup:
    """Parts one below the other, without empty ones."""
    return _part("joined", parts)


def section(name: str, title: str, *parts: str) -> Markup:
    """A section with a linkable heading; nothing without parts."""
    return _part("section", name, title, parts)


def details(summary: str, *parts: str, state: str = "closed", kind: str = "", name: str = "") -> Markup:
    """Parts that a reader may open, linkable by name; nothing without parts."""
    return _part("details", summary, parts, state, kind, name)


def alternatives(label: str, parts: Iterable[tuple[str, str]]) -> Markup:
    """Parts shown one at a time; without scripts, all of them one below the other."""
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
    """Preformatted, scrollable text."""
    return Markup('<pre tabindex="0">{}</pre>').format(text)


def breakable(name: str) -> Markup:
    """The name of an arm; a long one with line breaks allowed at punctuation."""
    text = escape(name)
    return text if isinstance(name, Markup) or len(name) <= SHORT else Markup(re.sub(r"([~@._-])", r"<wbr>\1", str(text)))


def part(template: str, name: str, *values: Any) -> Markup:
    """Calls a macro of a template (package and file) with positional values."""
    return getattr(_environment().get_template(template).module, name)(*values)


def _part(name: str, *values: Any) -> Markup:
    return part("twoaxis.display/static/parts.html", name, *values)


@cache
def _environment() -> Environment:
    found = Environment(
        loader=FunctionLoader(_file), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    found.filters |= {"breakable": breakable, "data": _data, "json": partial(json.dumps, ensure_ascii=False)}
    found.filters["quoted"] = partial(quote, safe=" ,;:/()=*~@")
    found.tests["reason"] = lambda cell: isinstance(cell, Reason)
    found.tests["legible"] = lambda cell: bool(re.fullmatch(rf"[+{MINUS}]?[\d,]+(\.\d+)?", cell.text))
    found.globals |= {"file": lambda name: Markup(_file(name)), "POLICY": Markup(POLICY)}
    found.globals |= {"MISSING": MISSING, "COLORS": theme.PAGE_COLORS}
    return found


@cache
def _file(name: str) -> str:
    package, _, path = name.partition("/")
    return files(package).joinpath(path).read_text(encoding="utf-8")


def _data(value: Any) -> Markup:
    """JSON for a script element, with `<` escaped so that it cannot end the script."""
    return Markup(json.dumps(value, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c"))
