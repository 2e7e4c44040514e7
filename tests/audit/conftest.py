"""A cache of prepared text that ends with the test."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOAXIS_CACHE", str(tmp_path / "cache"))
