"""The reports of studies that ship with the package, available in any working directory.

`docs/kept_reports.py` writes the data file from the folder `studies` of the repository; a test compares the two.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

KEPT = Path(__file__).with_name("kept_reports.json")


@dataclass(frozen=True)
class KeptReport:
    """The outcome of one study.

    Attributes:
        name: of its file in `studies`, and of its page in `docs/studies`.
        status: `superseded` if another design has replaced it.
        path: of the whole report, in the repository.
        report: a part of `report.json`, with the same keys.
    """

    name: str
    status: Literal["current", "superseded"]
    path: str
    report: Mapping[str, Any]

    @property
    def question(self) -> str:
        """The question of the study."""
        return self.report["question"]

    @property
    def gate(self) -> Mapping[str, Any]:
        """The validity gate: whether the control was trained; empty in older reports."""
        return self.report.get("gate") or {}

    @property
    def gate_passed(self) -> bool:
        """Whether the report states that its models passed the gate."""
        return self.gate.get("passed") is True

    @property
    def withdrawn(self) -> str:
        """The reason why this is no evidence, as a sentence without full stop; "" if it is evidence."""
        if self.status == "superseded":
            failed = f"; {str(self.gate.get('sentence', '')).rstrip('.')}" if self.gate.get("passed") is False else ""
            return f"superseded by a later design{failed}"
        if not self.gate_passed:
            return str(self.gate.get("sentence") or "its report has no validity gate").rstrip(".")
        return "" if self.report.get("complete") is True else "runs are missing"


@lru_cache(maxsize=4)
def kept_reports(path: Path = KEPT) -> tuple[KeptReport, ...]:
    """Every kept report: current designs first, then by name.

    Example:
        >>> [kept.path for kept in kept_reports() if kept.name == "local_mixing"]
        ['studies/results/local_mixing/report.json']
    """
    return tuple(KeptReport(**entry) for entry in json.loads(path.read_text(encoding="utf-8")))
