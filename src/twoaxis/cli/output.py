"""Results as JSON for machines, names of files as text, progress through a list, and which of several processes shows them."""

import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def print_json(data: Any) -> None:
    """Prints data as indented JSON."""
    print(json.dumps(data, indent=1, ensure_ascii=False))


T = TypeVar("T")


def counting(items: Iterable[T], total: int, stage: str) -> Iterator[T]:
    """Yields the items, and writes to standard error at intervals how many are done, their rate and the time left."""
    from twoaxis.train import PlainProgress

    progress = PlainProgress()
    for done, item in enumerate(items, start=1):
        yield item
        progress.preparing(stage, done, total)


def is_first_process() -> bool:
    """Whether this is the first of the processes that `torchrun` has started, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def say(line: str) -> None:
    """Writes a line to standard error."""
    print(f"twoaxis: {line}", file=sys.stderr, flush=True)


def name_of(path: Path) -> str:
    r"""A path as text, with bytes that are not UTF-8 as escapes.

    Example:
        >>> name_of(Path(os.fsdecode(b"caf\xe9.txt")))
        'caf\\xe9.txt'
    """
    return os.fsencode(path).decode(errors="backslashreplace")
