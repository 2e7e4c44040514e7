"""The Markdown elements of generated pages."""

import re
from collections.abc import Iterable


def escaped(text: str) -> str:
    """One line of Markdown whose only markup is code between backticks."""
    parts = " ".join(text.split()).split("`")
    plain = [re.sub(r"([|*_<])", r"\\\1", part) if index % 2 == 0 else part for index, part in enumerate(parts)]
    return "`".join(plain)


def table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """The lines of a table, with an empty one at its end."""
    columns = list(columns)
    return [_row(columns), "|---" * len(columns) + "|", *map(_row, rows), ""]


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(map(escaped, cells)) + " |"
