"""The comparison refuses wrong variants of every operator: a parity test that cannot fail proves nothing."""

import pytest

from .adapters import Adapter, Mistake, attention_residuals, claimed_by, deep_delta, sliding_window
from .conftest import KEPT
from .golden import Golden

ADAPTERS = [attention_residuals.ADAPTER, deep_delta.ADAPTER, sliding_window.ADAPTER]
MISTAKES = [mistake for adapter in ADAPTERS for mistake in adapter.mistakes]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: f"{mistake.fixture}: {mistake.what}")
def test_comparison_refuses(mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    golden = Golden.read(KEPT / f"{mistake.fixture}.json")
    run = claimed_by(golden.name)
    assert run is not None
    mistake.plant(monkeypatch)
    with pytest.raises(AssertionError, match=f"^{mistake.fixture}: (output|grad)/"):
        golden.compare(run(golden))


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_every_way_to_run_has_a_planted_mistake(adapter: Adapter) -> None:
    covered = {adapter.runner(mistake.fixture) for mistake in adapter.mistakes}
    assert covered == set(adapter.claims.values())
