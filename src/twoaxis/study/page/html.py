"""The few shapes of HTML that a report is made of, with every text escaped."""

import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Literal, NamedTuple

from twoaxis.display import numbers as words
from twoaxis.display.figures import Width
from twoaxis.study.figures import Figure


class Reason(str):
    """Why a cell holds no word or number, in a sentence."""


class Number(NamedTuple):
    """A cell with a number: how it is written, and its value, by which a reader may sort."""

    text: str
    value: float


class Markup(str):
    """Text that is HTML already."""


Cell = str | Number | Markup | Reason | None
"""A cell of a table; None is nothing to report."""


def number(value: float | None, written: object) -> Cell:
    """A cell with a number, or with nothing to report."""
    return None if value is None else Number(written(value), float(value))  # type: ignore[operator]


def table(
    caption: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[Cell]],
    text: Sequence[str] = (),
    long: Sequence[str] = (),
    groups: Sequence[tuple[str, int]] = (),
    shown: str = "visible",
) -> str:
    """A table that scrolls inside its box, whose first column names the rows.

    Args:
        caption: what it holds.
        columns: their names.
        rows: cells; the first of each is its name.
        text: the columns that hold a few words; the others hold numbers.
        long: those that hold sentences.
        groups: names above the columns with how many each spans.
        shown: `visible`, or `spoken` for a caption that only screen readers say because a heading says it already.
    """
    kinds = [
        "long" if column in long else "text" if at == 0 or column in text else "number" for at, column in enumerate(columns)
    ]
    head = "".join(f'<th scope="col" class="{kind}">{escape(column)}</th>' for kind, column in zip(kinds, columns, strict=True))
    above = "".join(f'<th scope="colgroup" colspan="{span}">{escape(name)}</th>' for name, span in groups)
    body = "".join(_row(row, kinds) for row in rows)
    hidden = ' class="spoken"' if shown == "spoken" else ""
    grouped = f'<tr class="groups">{above}</tr>' if above else ""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption, quote=True)}"><table>'
        f"<caption{hidden}><span>{escape(caption)}</span></caption><thead>{grouped}<tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _row(row: Sequence[Cell], kinds: Sequence[str]) -> str:
    cells = []
    for at, (cell, kind) in enumerate(zip(row, kinds, strict=True)):
        tag = 'th scope="row"' if at == 0 else "td"
        value = f' data-value="{cell.value:.12g}"' if isinstance(cell, Number) else ""
        inner = breakable(cell) if at == 0 and not isinstance(cell, Markup | Number | None) else _inner(cell)
        cells.append(f'<{tag} class="{kind}"{value}>{inner}</{tag.split()[0]}>')
    return f"<tr>{''.join(cells)}</tr>"


def _inner(cell: Cell) -> str:
    if cell is None:
        return f'<span class="missing">{words.MISSING}</span>'
    if isinstance(cell, Reason):
        return f'<span class="reason">{escape(cell)}</span>'
    return cell if isinstance(cell, Markup) else escape(cell.text if isinstance(cell, Number) else cell)


def section(name: str, title: str, *parts: str, lead: str = "") -> str:
    """A section with a heading that links lead to; nothing when it has no parts."""
    inner = "\n".join(part for part in parts if part)
    if not inner:
        return ""
    first = f'<p class="lead">{escape(lead)}</p>' if lead else ""
    heading = f'<h2 id="{name}-title">{escape(title)}</h2>'
    return f'<section id="{name}" aria-labelledby="{name}-title">{heading}{first}{inner}</section>'


def figure(drawn: Figure | None, heading: Literal["own", "none"] = "own") -> str:
    """A figure for wide and for narrow screens, with its words for those who cannot see it.

    Args:
        drawn: the figure; nothing for None.
        heading: its `own` title, or `none` where the section says it.
    """
    if drawn is None:
        return ""
    label = escape(f"{drawn.title}. {drawn.alternative}", quote=True)
    named = f'<svg role="img" aria-label="{label}"'
    widths: tuple[Width, ...] = ("wide", "narrow")
    plots = "".join(f'<div class="plot {width}">{drawn.inline(width).replace("<svg", named, 1)}</div>' for width in widths)
    title = f"<h3>{escape(drawn.title)}</h3>" if heading == "own" else ""
    return f'<figure id="figure-{drawn.name}">{title}{plots}<figcaption>{escape(drawn.caption)}</figcaption></figure>'


def details(summary: str, *parts: str, state: str = "closed", kind: str = "") -> str:
    """Parts that a reader may open."""
    opened = " open" if state == "open" else ""
    inner = "\n".join(part for part in parts if part)
    return f'<details class="{kind}"{opened}><summary>{escape(summary)}</summary>{inner}</details>' if inner else ""


def paragraph(text: str, kind: str = "") -> str:
    """A paragraph; nothing for no text."""
    attribute = f' class="{kind}"' if kind else ""
    return f"<p{attribute}>{escape(text)}</p>" if text else ""


def bullets(texts: Iterable[str]) -> str:
    """A list; nothing for no texts."""
    items = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f"<ul>{items}</ul>" if items else ""


def breakable(name: str) -> str:
    """The name of an arm, which may break where its parts meet."""
    return re.sub(r"([~@._-])", r"<wbr>\1", escape(name))


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """Names with their values."""
    inner = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in pairs)
    return f'<dl class="facts">{inner}</dl>'


def alternatives(label: str, parts: Iterable[tuple[str, str]]) -> str:
    """Parts of which a reader sees one at a time; without scripts, all of them one below the other."""
    panels = "".join(
        f'<div class="panel" data-title="{escape(title, quote=True)}">{inner}</div>' for title, inner in parts if inner
    )
    return f'<div class="alternatives" data-label="{escape(label, quote=True)}">{panels}</div>' if panels else ""
