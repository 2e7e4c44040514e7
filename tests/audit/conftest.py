"""A cache of prepared text that ends with the test."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def cache(new_cache: Path) -> None:
    del new_cache
