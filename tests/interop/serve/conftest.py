"""A log that says nothing of the faults that tests plant."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture
def unlogged() -> Iterator[None]:
    logging.disable()
    yield
    logging.disable(logging.NOTSET)
