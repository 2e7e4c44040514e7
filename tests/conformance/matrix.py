"""Which checks the suite runs on which example."""

import os
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from twoaxis.core.registry import Row
from twoaxis.testing import Check
from twoaxis.testing.sharded import ON_TWO_RANKS

EVERY = os.environ.get("CONFORMANCE") == "every"
"""Whether every check runs on every example, as in `make conformance` and `twoaxis check`."""


def cases(table: Iterable[Row[Any]], checks: Sequence[Check]) -> list[Any]:
    """Every check on the first example of each mixer, and every twelfth one on the others, in turn.

    `tests/distributed` runs the checks that need two ranks, with one pair of processes.
    """
    return [
        pytest.param(row.example(example), check, id=f"{row.kind}-{example}-{check.name}")
        for place, row in enumerate(table)
        for index, example in enumerate(row.examples)
        for number, check in enumerate(checks)
        if check not in ON_TWO_RANKS and (index == 0 or (not check.slow and (EVERY or (place + index + number) % 12 == 0)))
    ]
