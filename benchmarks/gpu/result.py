"""The result file: written anew after every item, so that whoever is cut off keeps what is known."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.settings import Row
from twoaxis.core.files import replacing

MISSING = "—"


class Result:
    """Tables, failures and what was left out, as one JSON file and one Markdown file of the same name.

    Args:
        path: of the files, without a suffix.
        title: the first line.
        facts: what a reader needs to judge the numbers.
    """

    def __init__(self, path: Path, title: str, facts: dict[str, Any]) -> None:
        self.path = path
        self.data: dict[str, Any] = {"title": title, "state": "running", "facts": facts, "stages": []}
        self.write()

    def begin(self, name: str, legend: str) -> None:
        """Opens a stage; what follows belongs to it."""
        self.data["stages"].append({"name": name, "legend": legend, "rows": [], "failed": [], "left_out": []})
        self.write()

    def add(self, rows: Sequence[Row]) -> None:
        """Adds the rows of an item."""
        self._stage["rows"] += rows
        self.write()

    def fail(self, item: str, error: str) -> None:
        """Notes an item that gave no rows."""
        self._stage["failed"].append({"item": item, "error": error})
        self.write()

    def leave_out(self, items: Sequence[str], why: str) -> None:
        """Notes what was not measured."""
        self._stage["left_out"].append({"items": list(items), "why": why})
        self.write()

    def finish(self, seconds: float) -> None:
        """Closes the file with the verdict."""
        words = "every check holds" if self.ok else "some checks do not hold or could not be made; see what is marked"
        self.data |= {"state": f"finished in {seconds:.0f} s: {words}", "ok": self.ok}
        self.write()

    @property
    def ok(self) -> bool:
        """Whether nothing failed and no row says that what it tests does not hold; what was left out says nothing."""
        return all(not stage["failed"] and all(row.get("ok", True) for row in stage["rows"]) for stage in self.data["stages"])

    def write(self) -> None:
        """Writes both files, each whole or not at all."""
        for suffix, text in ((".json", json.dumps(self.data, indent=1) + "\n"), (".md", markdown(self.data))):
            with replacing(self.path.with_name(self.path.name + suffix)) as file:
                file.write(text.encode())

    @property
    def _stage(self) -> dict[str, Any]:
        return self.data["stages"][-1]


def markdown(data: dict[str, Any]) -> str:
    """Lays the result out for people."""
    lines = [f"## {data['title']}", "", f"**{data['state']}**", ""]
    lines += [f"* {key}: {value}" for key, value in data["facts"].items()]
    for stage in data["stages"]:
        lines += ["", f"### {stage['name']}", "", stage["legend"], ""]
        lines += table(stage["rows"])
        lines += ["", *(f"* **failed**: {one['item']}: {one['error']}" for one in stage["failed"])]
        lines += [f"* left out: {', '.join(one['items'])}: {one['why']}" for one in stage["left_out"]]
    return "\n".join(lines).rstrip() + "\n"


def table(rows: Sequence[Row]) -> list[str]:
    """Rows as the lines of a Markdown table, with every column that any of them has.

    Example:
        >>> table([{"what": "a", "ratio": 1.23456}, {"what": "b", "ok": False}])
        ['| what | ratio | ok |', '|---|---|---|', '| a | 1.23 | — |', '| b | — | **no** |']
    """
    if not rows:
        return []
    columns = list(dict.fromkeys(column for row in rows for column in row))
    head = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return head + [f"| {' | '.join(_cell(row.get(column)) for column in columns)} |" for row in rows]


def _cell(value: Any) -> str:
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value).replace("|", "\\|")
