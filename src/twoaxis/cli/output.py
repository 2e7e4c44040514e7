"""Results as JSON for machines, and names of files as text."""

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def print_json(data: Any) -> None:
    """Prints data as indented JSON."""
    print(json.dumps(data, indent=1, ensure_ascii=False))


def name_of(path: Path) -> str:
    r"""A path as text, with bytes that are not UTF-8 as escapes.

    Example:
        >>> name_of(Path(os.fsdecode(b"caf\xe9.txt")))
        'caf\\xe9.txt'
    """
    return os.fsencode(path).decode(errors="backslashreplace")
