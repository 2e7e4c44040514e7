"""Value residual and LIMe: what weights of 0 and 1 mean, and stacks whose heads do not fit."""

from typing import Any

import pytest
import torch

from twoaxis.core.errors import ConfigError
from twoaxis.depth import ResidualConfig
from twoaxis.model import DecoderConfig
from twoaxis.sequence import ShortSWAConfig
from twoaxis.testing.measured import trace
from twoaxis.testing.toy import ATTENTION, FEED_FORWARD, toy_decoder, toy_tokens


def decoder(depth: Any, **changes: Any) -> Any:
    config = DecoderConfig.from_data(dict(vocab_size=11, d_model=8, n_layers=1, depth=depth)).depth
    return toy_decoder(config, **changes)


@pytest.mark.parametrize("bias", [-1e9, 1e9])
def test_a_gate_of_one_keeps_the_own_values_and_of_zero_takes_the_first(bias: float) -> None:
    model = decoder({"kind": "value_residual", "variant": "gated"})
    with torch.no_grad():
        for block in list(model.blocks)[1:]:
            block.attention.depth.gate_bias.fill_(bias)
    plain = toy_decoder(ResidualConfig())
    run, tokens = trace(model, toy_tokens()), toy_tokens()
    if bias > 0:
        plain.load_state_dict({name: value for name, value in model.state_dict().items() if ".depth." not in name})
        assert torch.allclose(run.logits, plain(tokens), rtol=0, atol=1e-12)
        return
    first = run.heads[0].v
    for index, block in list(enumerate(model.blocks))[1:]:
        heads, _ = block.attention.depth.mix_heads(run.heads[2 * index], run.contexts[2 * index], run.states[2 * index])
        assert torch.allclose(heads.v, first, rtol=0, atol=1e-12)


def test_the_first_values_stay_those_of_the_first_layer() -> None:
    run = trace(decoder("value_residual"), toy_tokens())
    assert all(state.heads[0][0] is run.states[1].heads[0][0] for state in run.states[1:])
    assert [len(state.heads[0]) for state in run.states] == [0, 1, 1, 1, 1, 1, 1]


def test_chains_of_different_kinds_do_not_meet() -> None:
    short = ShortSWAConfig(n_heads=2, window=3)
    model = decoder("value_residual", blocks=((short, ATTENTION),))
    run = trace(model, toy_tokens())
    assert [tuple(map(len, state.heads)) for state in run.states[:3]] == [(0, 0), (1, 0), (1, 1)]


@pytest.mark.parametrize("kind", ["value_residual", "lime"])
def test_stacks_that_do_not_fit_fail_at_config_time(kind: str) -> None:
    with pytest.raises(ConfigError, match="must be with a sublayer that has heads") as caught:
        DecoderConfig.from_data(dict(vocab_size=11, d_model=8, n_layers=1, depth=kind, blocks=[["swiglu"]]))
    assert "\n" not in str(caught.value)
    uneven = [[{"kind": "attention", "n_heads": n, "head_dim": 4}, "swiglu"] for n in (1, 2)]
    with pytest.raises(ConfigError, match=f"kv-heads of 'attention' under '{kind}'='2 x 4': must be 1 x 4 in every layer"):
        DecoderConfig.from_data(dict(vocab_size=11, d_model=8, n_layers=2, depth=kind, blocks=uneven))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"variant": "gated", "first": 0.25},
            "first=0.25: must be left out with gated, which has no such weights; choose another",
        ),
        ({"variant": "svformer", "own": 2.0}, "own=2.0: must be left out with svformer, which has no such weights"),
    ],
)
def test_options_that_nothing_reads(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DecoderConfig.from_data(dict(vocab_size=11, d_model=8, n_layers=3, depth={"kind": "value_residual", **options}))


def test_the_first_layer_cannot_mix() -> None:
    with pytest.raises(ConfigError, match="leave out layer 0"):
        DecoderConfig.from_data(dict(vocab_size=11, d_model=8, n_layers=2, depth={"kind": "value_residual", "layers": [0, 1]}))


def test_svformer_projects_values_once() -> None:
    model = decoder({"kind": "value_residual", "variant": "svformer"}, blocks=((ATTENTION, FEED_FORWARD),))
    assert [block.attention.mixer.qkv.weight.shape[0] for block in model.blocks] == [24, 16, 16]


def test_lime_mixes_keys_and_values_of_every_earlier_head() -> None:
    run = trace(decoder("lime"), toy_tokens())
    assert [[x.shape[2] for x in state.heads[0]] for state in run.states] == [[2] * n for n in (0, 1, 1, 2, 2, 3, 3)]


def test_plus_starts_as_learnable_weights_and_shares_one_softmax() -> None:
    plus, learnable = (decoder({"kind": "value_residual", "variant": variant}) for variant in ("plus", "learnable"))
    shared = {name: value for name, value in learnable.state_dict().items() if name in plus.state_dict()}
    plus.load_state_dict(shared, strict=False)
    sites = [block.attention.depth for block in plus.blocks]
    first, second, third = sites
    with torch.no_grad():
        for block, weights in zip(list(learnable.blocks)[1:], (2.0, 1.0), strict=True):
            block.attention.depth.weights.copy_(torch.tensor([[weights, 0.25]]))
        # A softmax of 2/3 and 1/3.
        first.logits.copy_(torch.tensor([2.0, 1.0], dtype=torch.float64).log())
        first.scale.fill_(3.0)
        for site in (second, third):
            site.own.fill_(0.25)
    assert torch.allclose(plus(toy_tokens()), learnable(toy_tokens()), rtol=0, atol=1e-12)
    plus(toy_tokens()).square().sum().backward()
    assert abs(float(first.logits.grad.sum())) < 1e-12 < float(first.logits.grad.abs().min())
