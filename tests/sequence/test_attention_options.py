"""Options of attention that the conformance suite does not tell apart from others: sinks, partial rotation, patterns."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from twoaxis.core.errors import ConfigError
from twoaxis.core.layout import TokenLayout
from twoaxis.core.parameters import initialise
from twoaxis.local import CanonConfig
from twoaxis.model import Decoder
from twoaxis.ops.local_attention import visible
from twoaxis.sequence import AttentionConfig, ShortSWAConfig
from twoaxis.testing.decoding import decode
from twoaxis.testing.toy import FEED_FORWARD, TOKENS, decoder_config, perturb, toy_context, toy_mixer, toy_site, toy_tokens

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


def weights_seen(mixer: Any) -> Tensor:
    """The logarithm of the sum of a head's weights before they are divided by it, for every query."""
    heads = mixer.project(toy_context(), LAYOUT)[0]
    q, k = mixer.queries_and_keys(heads, LAYOUT)
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).transpose(-1, -2) / math.sqrt(q.shape[-1])
    return scores.masked_fill(~visible(TOKENS, TOKENS, mixer.config.span), -torch.inf).logsumexp(-1)


@pytest.mark.parametrize("window", [None, 3, TOKENS, 4 * TOKENS])
@pytest.mark.parametrize("sink", ["learned", "per_token"])
def test_a_sink_is_a_gate_on_the_output_of_its_head(window: int | None, sink: str) -> None:
    mixer = toy_mixer(ShortSWAConfig.from_data({"n_heads": 2, "window": window or 99, "sink": sink}))
    plain = toy_mixer(mixer.config.replace(sink="none"))
    with torch.no_grad():
        for one in (mixer, plain):
            one.output.weight.copy_(torch.eye(8))
    score = mixer.sink_scores(toy_context())
    gate = torch.sigmoid(weights_seen(mixer) - (score if sink == "per_token" else score[:, None]))
    expected = plain(toy_context(), LAYOUT)[0].unflatten(-1, (2, -1)) * gate.transpose(1, 2).unsqueeze(-1)
    torch.testing.assert_close(mixer(toy_context(), LAYOUT)[0], expected.flatten(2), rtol=0, atol=1e-14)


def test_a_sink_per_token_is_projected_from_the_context_before_a_local_mixer() -> None:
    mixer = toy_mixer(AttentionConfig(n_heads=2, sink="per_token", input_local=CanonConfig()))
    scores = mixer.sink_scores(toy_context())
    torch.testing.assert_close(scores, (toy_context() @ mixer.sink_weight.T).transpose(1, 2))
    changed = toy_context()
    changed[:, 3] += 1.0
    moved = (mixer.sink_scores(changed) != scores).any(1)
    assert moved.tolist() == [[t == 3 for t in range(TOKENS)]] * 2


@pytest.mark.parametrize(("sink_init", "spread"), [("zero", 0.0), ("normal", 0.02)])
@pytest.mark.parametrize(("sink", "name"), [("learned", "sink"), ("per_token", "sink_weight")])
def test_sinks_start_at_zero_or_as_in_gpt_oss(sink: str, name: str, sink_init: str, spread: float) -> None:
    config = AttentionConfig.from_data({"n_heads": 512, "head_dim": 2, "sink": sink, "sink_init": sink_init})
    mixer = config.build(toy_site())
    initialise(mixer, 0)
    assert float(getattr(mixer, name).detach().std()) == pytest.approx(spread, rel=0.1)


def test_an_initial_value_of_no_sink_is_refused() -> None:
    with pytest.raises(ConfigError, match="sink_init='normal': must be left out without a sink; set sink='learned'"):
        AttentionConfig(sink_init="normal")


@pytest.mark.parametrize("depth", ["value_residual", "lime", "deep_cross_attention"])
def test_sinks_per_token_stay_with_heads_that_depth_mixes(depth: str) -> None:
    config = decoder_config(AttentionConfig(n_heads=2, sink="per_token", sink_init="normal"), depth=depth)
    model, tokens = perturb(Decoder.build(config).double()), toy_tokens()
    with torch.no_grad():
        full = model(tokens)
        assert torch.allclose(decode(model, tokens, (4, 1, 4)), full, rtol=0, atol=1e-11)
        for name, parameter in model.named_parameters():
            if name.endswith("sink_weight"):
                parameter.zero_()
        assert not torch.allclose(model(tokens), full, rtol=0, atol=1e-3)


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
    with pytest.raises(ConfigError, match="qk_norm='after_rope': must be none, before_rope or after_local with"):
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
