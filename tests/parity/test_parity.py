"""Our outputs and gradients equal those of the authors' code, at the tolerance stated with each fixture.

What is built for a fixture that is kept here agrees with the tables on which forms are certified.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .adapters import claimed_by
from .conftest import KEPT, UNCLAIMED
from .golden import Golden
from .test_certified import assert_tables_agree, notes


@pytest.fixture(scope="module")
def built() -> Iterator[list[Any]]:
    """The configurations from which mixers are built."""
    with pytest.MonkeyPatch.context() as patch:
        yield notes(patch)


def test_parity(fixture_path: Path, built: list[Any], record_property: Callable[[str, object], None]) -> None:
    golden = Golden.read(fixture_path)
    run = claimed_by(golden.name)
    if run is None:
        record_property(UNCLAIMED, golden.name)
        return
    built.clear()
    golden.compare(run(golden))
    if fixture_path.parent == KEPT:
        assert_tables_agree(golden, built)
