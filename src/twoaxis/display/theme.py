"""What all figures share: their widths, their colours and their look."""

from typing import Any

WIDE, NARROW = 940, 324
"""The widths every figure is drawn for, in CSS pixels: a screen or a sheet of paper, and a phone."""

INK, MUTED, GRID, BAND, PAPER = "#1b1f24", "#5c6470", "#e3e6ea", "#eceff3", "#ffffff"
"""Text, lesser text, lines behind the data, areas behind the data, and the ground. A page maps them to its own colours."""

CONTROL, COMPANION = "#3d434b", "#6b7280"

ARMS = ("#0067a5", "#c04a00", "#007a5a", "#a8327f", "#856300", "#5b4bb0", "#00788f")
"""Every pair differs also for the colour-blind, and each stands out from white by at least 4.5 to 1."""

HEAT = "#00568a"
"""Of heat maps, drawn more opaque for more."""

FONT = "Liberation Sans, Arial, Helvetica, sans-serif"
PNG_SCALE = 2.0

SIGNED = "datum.value == 0 ? '0' : format(datum.value, '+~f')"
"""How an axis writes differences."""

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
"""The look of all figures; titles inside a figure set their own size."""

PAGE_COLORS = {
    **{PAPER: "card", INK: "ink", MUTED: "muted", GRID: "line", BAND: "band"},
    **{CONTROL: "control", COMPANION: "companion", HEAT: "heat"},
    **{color: f"arm-{number}" for number, color in enumerate(ARMS, 1)},
}
"""The variable of static/theme.css that stands in a page for each colour of a drawn figure."""
