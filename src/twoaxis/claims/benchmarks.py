"""The benchmark results that ship with the package, written by `docs/kept_benchmarks.py`."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

KEPT = Path(__file__).with_name("kept_benchmarks.json")


class Ratio(NamedTuple):
    """A ratio of times in one run: the median over rounds, and their range."""

    middle: float
    lowest: float
    highest: float

    @staticmethod
    def parse(cell: str) -> "Ratio":
        """Parses a cell of a result.

        Example:
            >>> Ratio.parse("1.22 (1.15..1.31)")
            Ratio(middle=1.22, lowest=1.15, highest=1.31)
        """
        middle, lowest, highest = re.findall(r"\d+\.\d+", cell)
        return Ratio(float(middle), float(lowest), float(highest))

    def __str__(self) -> str:
        return f"{self.middle:.2f} ({self.lowest:.2f} to {self.highest:.2f})"


@dataclass(frozen=True)
class KeptTable:
    """One table of a result.

    Attributes:
        path: of the result, in the repository.
        machine: environment of the measurement: `machine`, `torch`, `threads` and so on.
        title: its heading.
        columns: names.
        rows: cells.
    """

    path: str
    machine: Mapping[str, str]
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    @property
    def where(self) -> str:
        """The machine and the version of torch."""
        return f"{self.machine.get('machine', 'an unnamed machine')}, torch {self.machine.get('torch', 'unknown')}"

    def ratios(self, column: str) -> dict[str, Ratio]:
        """A column of ratios by the first cell of each row."""
        index = next(i for i, name in enumerate(self.columns) if name.startswith(column))
        return {row[0]: Ratio.parse(row[index]) for row in self.rows}


@lru_cache(maxsize=4)
def kept_tables(path: Path = KEPT) -> tuple[KeptTable, ...]:
    """All stored tables, in the order of the results.

    Example:
        >>> kept_tables()[0].path
        'benchmarks/results/cpu.md'
    """
    return tuple(KeptTable(**table) for table in json.loads(path.read_text(encoding="utf-8")))


def kept_table(title: str, path: str = "") -> KeptTable | None:
    """The first stored table whose heading begins like this, in the named result if any; None without one."""
    try:
        tables = kept_tables(KEPT)
    except (OSError, ValueError):
        return None
    return next((table for table in tables if table.title.startswith(title) and path in ("", table.path)), None)
