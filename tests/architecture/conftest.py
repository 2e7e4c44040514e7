"""The parsed sources of the package and of its tests."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _parse(folder: str) -> dict[str, ast.Module]:
    files = sorted((ROOT / folder).rglob("*.py"))
    return {str(file.relative_to(ROOT)): ast.parse(file.read_text()) for file in files}


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def package_sources() -> dict[str, ast.Module]:
    return _parse("src/twoaxis")


@pytest.fixture(scope="session")
def test_sources() -> dict[str, ast.Module]:
    return _parse("tests")
