"""Our outputs and gradients equal those of the authors' code, at the tolerance stated with each fixture."""

from collections.abc import Callable
from pathlib import Path

from .adapters import claimed_by
from .conftest import UNCLAIMED
from .golden import Golden


def test_parity(fixture_path: Path, record_property: Callable[[str, object], None]) -> None:
    golden = Golden.read(fixture_path)
    run = claimed_by(golden.name)
    if run is None:
        record_property(UNCLAIMED, golden.name)
        return
    golden.compare(run(golden))
