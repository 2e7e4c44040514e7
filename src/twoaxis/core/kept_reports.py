"""The reports of studies that ship with the package, so that nothing that cites them depends on the working directory.

`docs/kept_reports.py` writes the data file from the folder `studies` of the repository; a test holds it to that folder.
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
        status: `superseded` for a design that another one has replaced.
        path: of the whole report, in the repository.
        report: the part of `report.json` that is kept, under the same keys.
    """

    name: str
    status: Literal["current", "superseded"]
    path: str
    report: Mapping[str, Any]

    @property
    def question(self) -> str:
        """What was asked."""
        return self.report["question"]

    @property
    def gate(self) -> Mapping[str, Any]:
        """The validity gate: whether the control was trained; empty in a report from before there was one."""
        return self.report.get("gate") or {}

    @property
    def gate_passed(self) -> bool:
        """Whether the report says that its models have passed; a report that does not say so has not."""
        return self.gate.get("passed") is True

    @property
    def withdrawn(self) -> str:
        """Why this is no evidence, in one sentence without its full stop; "" where it is."""
        if self.status == "superseded":
            failed = f"; {str(self.gate.get('sentence', '')).rstrip('.')}" if self.gate.get("passed") is False else ""
            return f"superseded by a later design{failed}"
        if not self.gate_passed:
            return str(self.gate.get("sentence") or "its report has no validity gate").rstrip(".")
        return "" if self.report.get("complete") is True else "runs are missing"


@lru_cache(maxsize=4)
def kept_reports(path: Path = KEPT) -> tuple[KeptReport, ...]:
    """Every kept report: current designs first, each kind by name.

    Args:
        path: of the data file; another than the package's for tests.

    Example:
        >>> [kept.path for kept in kept_reports() if kept.name == "local_mixing"]
        ['studies/results/local_mixing/report.json']
    """
    return tuple(KeptReport(**entry) for entry in json.loads(path.read_text(encoding="utf-8")))
