"""The comparison refuses wrong variants of every operator: a parity test that cannot fail proves nothing."""

import pytest

from .adapters import Adapter, Mistake, adapters, claimed_by
from .conftest import KEPT
from .golden import Golden

MISTAKES = [mistake for adapter in adapters() for mistake in adapter.mistakes]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: f"{mistake.fixture}: {mistake.what}")
def test_comparison_refuses(mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    golden = Golden.read(KEPT / f"{mistake.fixture}.json")
    run = claimed_by(golden.name)
    assert run is not None
    mistake.plant(monkeypatch)
    with pytest.raises(AssertionError, match=f"^{mistake.fixture}: (output|grad)/"):
        golden.compare(run(golden))


@pytest.mark.parametrize("adapter", adapters())
def test_every_way_to_run_has_a_planted_mistake(adapter: Adapter) -> None:
    covered = {adapter.runner(mistake.fixture) for mistake in adapter.mistakes}
    assert covered == set(adapter.claims.values())
