"""Parts that charts are put together from: rows, labels, axes, panels."""

from collections.abc import Sequence
from typing import Any

import altair as alt

from twoaxis.figures.theme import INK, NARROW, PAPER


def values(rows: Sequence[dict[str, Any]]) -> Any:
    """Rows as the data of a chart."""
    # A tuple, since altair copies lists each time that charts are put together.
    return alt.Chart(alt.Data(values=tuple(rows)))


def own_color(name: str = "color") -> Any:
    """The colour that a row names itself."""
    return alt.Color(f"{name}:N", scale=None, legend=None)


def padded(found: Sequence[float], part: float) -> tuple[float, float]:
    """From the least to the greatest with a margin."""
    margin = part * (max(found) - min(found)) or 0.1 * abs(max(found)) or 1.0
    return min(found) - margin, max(found) + margin


def labels(rows: Sequence[dict[str, Any]], x: Any, y: Any) -> tuple[Any, Any]:
    """Labels whose left end and middle are at a place, below them a rim that keeps them legible where a line crosses."""
    drawn = values(rows).encode(x=x, y=y, text=alt.Text("text:N"))
    rim = drawn.mark_text(align="left", fontSize=11, color=PAPER, stroke=PAPER, strokeWidth=3.5, strokeJoin="round", aria=False)
    return rim, drawn.mark_text(align="left", fontSize=11, aria=False).encode(color=own_color())


def row_axis(labels: int, width: int) -> Any:
    """An axis that names rows in a given room at the left of a panel; without labels where that is 0.

    Names may have several lines.
    """
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
    """The title of a panel, which on a phone begins at the left of its labels."""
    return alt.TitleParams(text, fontSize=12, dx=-labels if width <= NARROW else 0)


def side_by_side(panels: Sequence[Any], width: int, columns: int) -> Any:
    """Panels in columns, or one below the other where it is narrow."""
    if len(panels) == 1:
        return panels[0]
    return alt.concat(*panels, columns=columns if width > NARROW else 1)
