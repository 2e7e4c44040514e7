"""Widths, colours and style of all figures."""

from typing import Any

WIDE, NARROW = 940, 324
"""The widths of every figure in CSS pixels: for screens and paper, and for phones."""

INK, MUTED, GRID, BAND, PAPER = "#1b1f24", "#5c6470", "#e3e6ea", "#eceff3", "#ffffff"
"""Colours of text, secondary text, grid lines, areas behind the data, and background; a page maps them to its own."""

CONTROL, COMPANION = "#3d434b", "#6b7280"

ARMS = ("#0067a5", "#c04a00", "#007a5a", "#a8327f", "#856300", "#5b4bb0", "#00788f")
"""Distinct also for the colour-blind, with a contrast to white of at least 4.5 to 1."""

HEAT = "#00568a"
"""Colour of heat maps; opacity encodes the value."""

FONT = "Liberation Sans, Arial, Helvetica, sans-serif"
PNG_SCALE = 2.0

SIGNED = "datum.value == 0 ? '0' : format(datum.value, '+~f')"
"""Label expression of axes with signed differences."""

STYLE: dict[str, Any] = {
    "background": PAPER,
    "font": FONT,
    "view": {"stroke": None},
    "title": {
        "color": INK,
        "fontSize": 15,
        "anchor": "start",
        "frame": "group",
        "subtitleColor": MUTED,
        "subtitleFontSize": 11,
    },
    "axis": {
        "labelFontSize": 11,
        "labelColor": MUTED,
        "titleFontSize": 11,
        "titleColor": MUTED,
        "titleFontWeight": "normal",
        "gridColor": GRID,
        "domainColor": GRID,
        "tickColor": GRID,
        "labelLimit": 200,
    },
    "concat": {"spacing": 22},
}
"""The style of all figures; titles inside a figure set their own size."""

PAGE_COLORS = {
    **{PAPER: "card", INK: "ink", MUTED: "muted", GRID: "line", BAND: "band"},
    **{CONTROL: "control", COMPANION: "companion", HEAT: "heat"},
    **{color: f"arm-{number}" for number, color in enumerate(ARMS, 1)},
}
"""The variable of static/theme.css that replaces each colour of a figure in a page."""
