"""Results as JSON for machines, names of files as text, and which of several processes shows them."""

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def print_json(data: Any) -> None:
    """Prints data as indented JSON."""
    print(json.dumps(data, indent=1, ensure_ascii=False))


def is_first_process() -> bool:
    """Whether this is the first of the processes that `torchrun` has started, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def name_of(path: Path) -> str:
    r"""A path as text, with bytes that are not UTF-8 as escapes.

    Example:
        >>> name_of(Path(os.fsdecode(b"caf\xe9.txt")))
        'caf\\xe9.txt'
    """
    return os.fsencode(path).decode(errors="backslashreplace")
