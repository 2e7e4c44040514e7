"""How results reach standard output: a table for people, JSON for machines."""

import json
import os
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]

UNKNOWN_WIDTH = 160
"""Columns of what is printed into a file or a pipe."""


def print_json(data: Any) -> None:
    """Prints data as indented JSON."""
    print(json.dumps(data, indent=1, ensure_ascii=False))


def name_of(path: Path) -> str:
    r"""How a path is shown: bytes of it that are not UTF-8, which no text can hold, as escapes.

    Example:
        >>> name_of(Path(os.fsdecode(b"caf\xe9.txt")))
        'caf\\xe9.txt'
    """
    return os.fsencode(path).decode(errors="backslashreplace")


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    numbers: Sequence[str] = (),
    width: int | None = None,
    whole: Sequence[str] = (),
) -> None:
    """Prints a table; the columns named in `numbers` are aligned to the right.

    Args:
        title: above it, or empty.
        columns: their names.
        rows: their cells.
        numbers: names of columns that are aligned to the right.
        width: in characters; that of the terminal by default, and 160 without one.
        whole: names of columns whose cells are never broken.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", title_style="bold", header_style="", box=None, pad_edge=False)
    for column in columns:
        justify = "right" if column in numbers else "left"
        table.add_column(column, justify=justify, overflow="fold", no_wrap=column in whole)
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    Console(highlight=False, width=width or (None if _is_terminal() else UNKNOWN_WIDTH)).print(table)


def print_item(text: str, indent: str = "* ") -> None:
    """Prints a paragraph with a hanging indent, as wide as a table."""
    from shutil import get_terminal_size

    width = get_terminal_size().columns if _is_terminal() else UNKNOWN_WIDTH
    hanging = " " * len(indent)
    # Paths and names with hyphens stay whole, so that they can be copied.
    print(
        textwrap.fill(
            text, width, initial_indent=indent, subsequent_indent=hanging, break_on_hyphens=False, break_long_words=False
        )
    )


def _is_terminal() -> bool:
    import sys

    return sys.stdout.isatty()
