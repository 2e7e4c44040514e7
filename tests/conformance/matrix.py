"""Which checks the suite runs on which example."""

import os
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from twoaxis.core.registry import Row
from twoaxis.testing import Check, causality
from twoaxis.testing.sharded import ON_TWO_RANKS

EVERY = os.environ.get("CONFORMANCE") == "every"
"""Whether every check runs on every example, as in `make conformance` and `twoaxis check`."""

ON_EVERY_FORM = (causality.empty_input,)
"""Checks that cost little and find what each form can have for itself: a view or an engine that takes no rows."""


TURNS = 24
"""Of so many checks, each further example has one; values, gradients and start of every form are tested in `values`."""


def cases(table: Iterable[Row[Any]], checks: Sequence[Check]) -> list[Any]:
    """Every check on the first example of each mixer, and on the others `ON_EVERY_FORM` and every 24th one, in turn.

    `tests/distributed` runs the checks that need two ranks, with one pair of processes.
    """
    return [
        pytest.param(row.example(example), check, id=f"{row.kind}-{example}-{check.name}")
        for place, row in enumerate(table)
        for index, example in enumerate(row.examples)
        for number, check in enumerate(checks)
        if check not in ON_TWO_RANKS
        and (index == 0 or check in ON_EVERY_FORM or (not check.slow and (EVERY or (place + index + number) % TURNS == 0)))
    ]
