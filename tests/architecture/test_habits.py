"""Habits that keep the suite trustworthy: one command everywhere, no speed assertions, no silent skips."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from twoaxis.core.files import cache_folder
from twoaxis.ops import kernels

CLOCKS = {name + unit for name in ("perf_counter", "monotonic", "process_time") for unit in ("", "_ns")} | {"time_ns", "timeit"}


def _names(node: ast.AST) -> set[str]:
    names = {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}
    calls = [child.func for child in ast.walk(node) if isinstance(child, ast.Call)]
    attributes = {func.attr for func in calls if isinstance(func, ast.Attribute)}
    if any(isinstance(f, ast.Attribute) and f.attr == "time" and ast.unparse(f.value) == "time" for f in calls):
        attributes.add("perf_counter")
    return names | attributes


def timed_assertions(tree: ast.Module) -> Iterator[int]:
    """Yields the lines of assertions whose outcome depends on a clock, directly or through variables."""
    for scope in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)] if _names(tree) & CLOCKS else []:
        timed = set(CLOCKS)
        assignments = [n for n in ast.walk(scope) if isinstance(n, ast.Assign | ast.AugAssign | ast.AnnAssign) and n.value]
        flows = []
        for node in assignments:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            flows.append((_names(node.value) if node.value else set(), set().union(*map(_names, targets))))
        for _ in flows:
            for used, given in flows:
                if used & timed:
                    timed |= given
        yield from (n.lineno for n in ast.walk(scope) if isinstance(n, ast.Assert) and _names(n.test) & timed)


@pytest.mark.parametrize(
    "body",
    [
        "assert time.perf_counter() < limit",
        "begin = perf_counter(); run(); elapsed = perf_counter() - begin; assert elapsed < 1",
        "begin = time.time(); run(); assert time.time() - begin < 1",
    ],
)
def test_finds_timed_assertions(body: str) -> None:
    assert list(timed_assertions(ast.parse(f"def test():\n  {body}")))


def test_no_assertion_on_time(test_sources: dict[str, ast.Module]) -> None:
    found = {path: lines for path, tree in test_sources.items() if (lines := list(timed_assertions(tree)))}
    assert not found, "speed is reported by benchmarks/, never asserted"


def test_a_session_has_a_cache_folder_of_its_own() -> None:
    folder = cache_folder()
    assert folder.is_dir() and folder.parent == Path(tempfile.gettempdir()) and folder.name.startswith("twoaxis-tests-")


def test_no_test_switches_off_the_checks_of_shapes(test_sources: dict[str, ast.Module]) -> None:
    found = {
        path: [
            node.lineno
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and ast.unparse(node) == "jaxtyping.config"
        ]
        for path, tree in test_sources.items()
    }
    assert not any(found.values()), "it would hold for every test after it"


def test_continuous_integration_runs_what_a_person_runs(root: Path) -> None:
    script = root / ".ci" / "run"
    commands = [line for line in script.read_text().splitlines() if line and not line.startswith("#")]
    assert commands == ["set -euo pipefail", 'cd "$(dirname "$0")/.."', "make test"]
    assert script.stat().st_mode & 0o100
    assert re.search(r"^test:", (root / "Makefile").read_text(), re.MULTILINE)


SUITE = """
import pytest

def test_passes(): pass
def test_known(): assert False
def test_repaired(): pass
def test_skips(): pytest.skip("silent")
@pytest.mark.xfail
def test_expected(): assert False
"""
TABLE = """
| test id | reason | exit condition |
|---|---|---|
| `tests/test_suite.py::test_known` | broken | it is repaired |
| `tests/test_suite.py::test_repaired` | was broken | it is repaired |
"""


def test_a_skip_needs_a_row_and_a_repaired_test_must_leave(root: Path, tmp_path: Path) -> None:
    tests = tmp_path / "tests"
    tests.mkdir()
    for name in ("conftest.py", "shape_checks.py"):
        shutil.copy(root / "tests" / name, tests)
    (tests / "test_suite.py").write_text(SUITE)
    (tests / "QUARANTINE.md").write_text(TABLE)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "--strict-markers"]
    # Its session would compile kernels that none of these tests runs.
    environment = {**os.environ, kernels.SWITCH: "off"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    lines = re.findall(r"^(PASSED|FAILED|XFAIL) tests/test_suite.py::(\w+)", done.stdout, re.MULTILINE)
    found = {name: outcome for outcome, name in lines}
    assert found == {
        "test_passes": "PASSED",
        "test_known": "XFAIL",
        "test_repaired": "FAILED",
        "test_skips": "FAILED",
        "test_expected": "FAILED",
    }, done.stdout
