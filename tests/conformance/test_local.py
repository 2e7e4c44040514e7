"""The checks on examples of every local mixer, plus what only single cases need."""

import pytest
import torch

from twoaxis.core.layout import TokenLayout
from twoaxis.local import LOCAL, CanonConfig, LocalConfig
from twoaxis.model import Decoder
from twoaxis.sequence import AttentionConfig
from twoaxis.testing import Check, local_checks
from twoaxis.testing.toy import FEED_FORWARD, TOKENS, decoder_config, toy_context, toy_mixer, toy_tokens

from .matrix import cases


@pytest.mark.parametrize(("config", "check"), cases(LOCAL, local_checks()))
def test_conformance(config: LocalConfig, check: Check) -> None:
    check.run(config)


PLACES = [(1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (1, 1, 0, 0), (0, 0, 1, 1), (1, 1, 1, 1)]
"""Each place alone, those of one mixer together, and all."""


@pytest.mark.parametrize(("a", "b", "c", "d"), PLACES)
def test_zero_canon_at_any_places_is_the_plain_model(a: int, b: int, c: int, d: int) -> None:
    zero = CanonConfig(taps_init="zero")
    attention = AttentionConfig(n_heads=2, input_local=zero if a else None, projected_local=zero if b else None)
    feed_forward = FEED_FORWARD.replace(input_local=zero if c else None, projected_local=zero if d else None)
    plain = decoder_config(AttentionConfig(n_heads=2))
    canon, reference = (
        Decoder.build(config).double() for config in (plain.replace(blocks=((attention, feed_forward),)), plain)
    )
    assert torch.equal(canon(toy_tokens()), reference(toy_tokens()))
    canon.loss(toy_tokens(), toy_tokens(seed=1))[0].backward()
    taps = [p for name, p in canon.named_parameters() if name.endswith(("local.weight", "local_conv.weight"))]
    assert len(taps) == plain.n_layers * (a + b + c + d) and all(p.grad is not None and p.grad.abs().max() > 0 for p in taps)


def test_the_last_tap_is_the_current_token() -> None:
    conv = toy_mixer(CanonConfig(form="plain", kernel=4))
    with torch.no_grad():
        conv.weight.zero_()
        conv.weight[:, -2] = 1.0
    x = toy_context()
    y, _ = conv(x, TokenLayout.contiguous(TOKENS))
    assert torch.equal(y[:, 1:], x[:, :-1]) and not y[:, 0].any()
