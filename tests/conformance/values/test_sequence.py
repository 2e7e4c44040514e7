"""Every sequence mixer, local mixer and feed-forward is its equation, at every option, with its gradients."""

from typing import Any

import pytest

from twoaxis.core.layout import TokenLayout
from twoaxis.core.measure import noise, perturb
from twoaxis.core.parameters import initialise
from twoaxis.core.position import LayerStack, SublayerPosition
from twoaxis.feed_forward import FEED_FORWARD
from twoaxis.local import LOCAL
from twoaxis.sequence import SEQUENCE

from . import sequence
from .cases import cases_of, rows_of
from .setting import IDS, VOCAB, B, D, T, same

EPS = 1e-3
LAYOUT = TokenLayout.contiguous(T).of(IDS)


def site() -> SublayerPosition:
    """The last of three blocks, where a width that rises with depth is not that of the first."""
    return LayerStack(D, EPS, (2, 2, 2), vocab_size=VOCAB).sites[5]


def built(config: Any) -> Any:
    """The mixer away from its initial values."""
    mixer = config.build(D, site()) if config.kind in LOCAL else config.build(site())
    initialise(mixer, 0)
    return perturb(mixer.double())


CASES = [
    pytest.param(case.config, id=case.name)
    for table in (SEQUENCE, FEED_FORWARD, LOCAL)
    for row in rows_of(table)
    for case in cases_of(row)
]


@pytest.mark.parametrize("config", CASES)
def test_is_its_equation(config: Any) -> None:
    equation = getattr(sequence, config.kind, None)
    assert equation is not None, (
        f"{config.kind!r} has no equation in tests/conformance/values; write it as a function of this name"
    )
    mixer, x = built(config), noise((B, T, D), "context").requires_grad_()
    got, _ = mixer(x, LAYOUT)
    given = () if config.kind in LOCAL else (EPS,)
    expected = equation(config, mixer.state_dict(keep_vars=True), x, *given)
    same([got], [expected], {"context": x, **dict(mixer.named_parameters())})


@pytest.mark.parametrize("depth", ["equal", "rising"])
def test_hidden_width_of_the_last_of_three_blocks(depth: str) -> None:
    """1.5 of the mean where widths rise."""
    for row in FEED_FORWARD:
        mixer: Any = row.config.from_data({"d_ff": 256, "d_ff_by_depth": depth}).build(site())
        assert mixer.down.weight.shape == (D, {"equal": 256, "rising": 384}[depth])
