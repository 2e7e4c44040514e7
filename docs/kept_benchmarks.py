"""`python docs/kept_benchmarks.py`: writes the data file with which claims cite the benchmarks of this repository.

Every table of a result is copied as it is, cell by cell, with the machine that its header names.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
WRITTEN = ROOT / "src" / "twoaxis" / "claims" / "kept_benchmarks.json"
FILES = ("cpu.md",)
"""Results of one run each."""


def main() -> int:
    """Writes the file."""
    WRITTEN.write_text(text(), encoding="utf-8")
    return 0


def text() -> str:
    """The data file: one table a line."""
    found = [table for name in FILES for table in tables(ROOT / "benchmarks" / "results" / name)]
    return "[\n" + ",\n".join(json.dumps(table, ensure_ascii=False) for table in found) + "\n]\n"


def tables(path: Path) -> list[dict[str, Any]]:
    """The tables of one result with the heading each stands under."""
    lines = path.read_text(encoding="utf-8").splitlines()
    machine = {key: value for line in lines if (fact := re.match(r"\* (\w+): (.*)", line)) for key, value in [fact.groups()]}
    found: list[dict[str, Any]] = []
    title, rows = "", list[list[str]]()
    for line in [*lines, ""]:
        if line.startswith("### "):
            title = line[4:]
        if line.startswith("|"):
            rows.append([cell.strip().replace("**", "") for cell in line.strip().strip("|").split("|")])
        elif rows:
            source = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name
            found.append({"path": source, "machine": machine, "title": title, "columns": rows[0], "rows": rows[2:]})
            rows = []
    return found


if __name__ == "__main__":
    sys.exit(main())
