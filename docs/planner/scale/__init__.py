"""Scale on paper: what every method costs at three model shapes and three contexts."""

import json
from typing import Any

from planner.scale.axes import axes
from planner.scale.break_even import by_layers, by_stages
from planner.scale.compute import CONTROL, eager, scale

DIGITS = 6


def scale_data() -> dict[str, Any]:
    """All numbers of the page, ready for JSON; takes a minute or two."""
    rows = scale()
    control = {row["shape"]: row["forwarding"]["naive"]["boundary_bytes"] for row in rows if row["method"] == CONTROL}
    found = {"rows": rows, "eager": eager(), "by_layers": by_layers(), "by_stages": by_stages(), "axes": axes()}
    return rounded(found | {"control_bytes": control})


def rounded(value: Any) -> Any:
    """Data with every number that is not whole cut to a few digits.

    Example:
        >>> rounded({"a": [0.123456789, 7]})
        {'a': [0.123457, 7]}
    """
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def scale_text(data: dict[str, Any]) -> str:
    """The data as a JSON file with one row in a line."""
    parts = []
    for name, value in data.items():
        rows = ",\n".join(map(json.dumps, value)) if isinstance(value, list) else ""
        parts.append(f"{json.dumps(name)}: " + (f"[\n{rows}\n]" if rows else json.dumps(value)))
    return "{\n" + ",\n".join(parts) + "\n}\n"
