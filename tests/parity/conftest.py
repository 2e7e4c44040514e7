"""One test per fixture; those that no adapter claims are counted apart and listed by name.

`pytest tests/parity --fixtures DIR` (repeatable) runs on the fixtures of any folder instead of the copies kept here.
"""

import json
from pathlib import Path

import pytest

from .golden import fixture_paths

KEPT = Path(__file__).with_name("fixtures")
UNCLAIMED = "unclaimed"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "fixture_path" in metafunc.fixturenames:
        folders = [Path(folder) for folder in getattr(metafunc.config.option, "fixture_folders", [])] or [KEPT]
        paths = [path for folder in folders for path in fixture_paths(folder)]
        metafunc.parametrize("fixture_path", paths, ids=[_name(path) for path in paths])


def _name(path: Path) -> str:
    try:
        return json.loads(path.read_text())["name"]
    except (OSError, ValueError, KeyError, TypeError):
        return path.stem


def _unclaimed(report: pytest.TestReport) -> str | None:
    return next((str(value) for key, value in report.user_properties if key == UNCLAIMED), None)


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(report: pytest.CollectReport | pytest.TestReport) -> tuple[str, str, str] | None:
    if isinstance(report, pytest.TestReport) and report.when == "call" and report.passed and _unclaimed(report):
        return UNCLAIMED, "u", UNCLAIMED.upper()
    return None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    names = sorted({_unclaimed(report) or "" for report in terminalreporter.stats.get(UNCLAIMED, [])})
    if names:
        terminalreporter.section("unclaimed fixtures", sep="=")
        terminalreporter.write_line(f"no adapter claims these {len(names)}, so nothing was compared with them:")
        for name in names:
            terminalreporter.write_line(f"  {name}")
