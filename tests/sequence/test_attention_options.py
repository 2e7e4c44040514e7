"""Options of attention that the conformance suite does not tell apart from others: sinks, partial rotation, patterns."""

import math

import pytest
import torch

from twoaxis.core.errors import ConfigError
from twoaxis.core.layout import TokenLayout
from twoaxis.model import Decoder
from twoaxis.sequence import AttentionConfig
from twoaxis.testing.decoding import decode
from twoaxis.testing.toy import FEED_FORWARD, TOKENS, decoder_config, perturb, toy_context, toy_mixer, toy_tokens

LAYOUT = TokenLayout.contiguous(TOKENS)


@pytest.mark.parametrize("window", [None, 3])
def test_a_sink_far_below_all_scores_is_no_sink_and_far_above_takes_all(window: int | None) -> None:
    plain = toy_mixer(AttentionConfig(n_heads=2, window=window))
    mixer = toy_mixer(AttentionConfig(n_heads=2, window=window, sink="learned"))
    outputs = []
    for score in (-math.inf, -800.0, 800.0):
        with torch.no_grad():
            mixer.sink.fill_(score)
        outputs.append(mixer(toy_context(), LAYOUT)[0])
    expected = plain(toy_context(), LAYOUT)[0]
    assert torch.allclose(outputs[1], expected, rtol=0, atol=1e-12)
    assert outputs[2].abs().max() < 1e-12


def test_a_fresh_sink_weighs_like_a_score_of_zero() -> None:
    mixer = toy_mixer(AttentionConfig(n_heads=2, sink="learned"))
    with torch.no_grad():
        mixer.sink.zero_()
        mixer.qkv.weight[:8].zero_()
    values = mixer.project(toy_context(), LAYOUT)[0].v.flatten(2)
    means = values.cumsum(dim=1) / torch.arange(2, TOKENS + 2).view(1, -1, 1)
    assert torch.allclose(mixer(toy_context(), LAYOUT)[0], means @ mixer.output.weight.T, rtol=0, atol=1e-12)


def test_rotation_turns_only_the_first_channels() -> None:
    whole, none = (AttentionConfig(n_heads=2, head_dim=4, rope_dim=dim) for dim in (4, 0))
    heads = toy_mixer(whole).project(toy_context(), LAYOUT)[0].q
    turned = toy_mixer(AttentionConfig(n_heads=2, head_dim=4, rope_dim=2))._rotate(heads, LAYOUT)
    assert torch.equal(turned[..., 2:], heads[..., 2:]) and not torch.allclose(turned[:, 1:, :, :2], heads[:, 1:, :, :2])
    assert torch.equal(toy_mixer(none)._rotate(heads, LAYOUT), heads)
    assert torch.equal(toy_mixer(whole)._rotate(heads, LAYOUT), toy_mixer(AttentionConfig(n_heads=2))._rotate(heads, LAYOUT))


def test_more_rotated_channels_than_a_head_has_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"rope_dim=6: must be at most the head width 4; leave it out"):
        decoder_config(AttentionConfig(n_heads=2, rope_dim=6))


def test_a_norm_after_rotation_beside_a_projected_local_mixer_is_refused() -> None:
    with pytest.raises(ConfigError, match="qk_norm='after_rope': must be none or before_rope with projected_local"):
        AttentionConfig.from_data({"qk_norm": "after_rope", "projected_local": "canon"})


def test_local_and_global_layers_alternate_along_depth() -> None:
    local, everywhere = AttentionConfig(n_heads=2, window=2), AttentionConfig(n_heads=2)
    config = decoder_config(everywhere, n_layers=4, blocks=((local, FEED_FORWARD), (everywhere, FEED_FORWARD)))
    assert [block[0].span for block in config.layers] == [2, None, 2, None]  # type: ignore[union-attr]
    model = perturb(Decoder.build(config).double())
    tokens = toy_tokens(tokens=12)
    with torch.no_grad():
        full = model(tokens)
        for chunks in ((1,) * 12, (3, 4, 5)):
            assert torch.allclose(decode(model, tokens, chunks), full, rtol=0, atol=1e-11)
