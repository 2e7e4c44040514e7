import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from twoaxis import ConfigError, Decoder
from twoaxis.depth import ResidualConfig, VerticalAttentionConfig
from twoaxis.testing import cost, gradient, state
from twoaxis.testing.toy import ATTENTION, FEED_FORWARD, decoder_config, toy_decoder, toy_tokens

EPS = 1e-6
NORMS: list[Any] = [
    ("sources", "rms"),
    ("sources", "layer"),
    ("sources", "l2"),
    ("weights", "rms"),
    ("sum", "l2"),
    ("none", "rms"),
]
OPTIONS = [
    VerticalAttentionConfig(source=source, skip=skip, norm=norm, norm_kind=kind, head=head, embedding=embedding)
    for source, skip, (norm, kind), head, embedding in itertools.product(
        ("delta", "output"),
        ("none", "added", "gated"),
        NORMS,
        ("last", "mixture"),
        ("source", "first_input"),
    )
]
SUBLAYERS = (ATTENTION, FEED_FORWARD, ATTENTION)


def name(config: VerticalAttentionConfig) -> str:
    return "-".join(getattr(config, field) for field in ("source", "skip", "norm", "norm_kind", "head", "embedding"))


def normalised(h: Tensor, kind: str) -> Tensor:
    if kind == "layer":
        return F.layer_norm(h, h.shape[-1:], eps=EPS)
    rms = (h.square().mean(-1, keepdim=True) + EPS).sqrt()
    return h / rms / (h.shape[-1] ** 0.5 if kind == "l2" else 1)


def read(config: VerticalAttentionConfig, mixture: Any, sources: list[Tensor], stream: Tensor) -> Tensor:
    a = [torch.ones(1, dtype=torch.float64)] if mixture.logits is None else list(mixture.logits.softmax(0))
    if config.norm == "weights":
        each = [w / (h.square().mean(-1, keepdim=True) + EPS).sqrt() for w, h in zip(a, sources, strict=True)]
        a = [w / sum(each) for w in each]
    if config.norm == "sources":
        sources = [normalised(h, config.norm_kind) for h in sources]
    mixed: Any = sum(w * h for w, h in zip(a, sources, strict=True))
    if config.norm == "sum":
        mixed = normalised(mixed, config.norm_kind)
    if config.skip == "none":
        return mixed
    return stream + (mixture.gate if config.skip == "gated" else 1) * mixed


@pytest.mark.parametrize("granularity", ["block", "sublayer"])
@pytest.mark.parametrize("config", OPTIONS, ids=name)
def test_is_the_equation_under_every_option(config: VerticalAttentionConfig, granularity: Any) -> None:
    config = config.replace(granularity=granularity)
    model = toy_decoder(config, n_layers=2, blocks=(SUBLAYERS,))
    blocks: Any = [[sublayer.depth for sublayer in block.sublayers] for block in model.blocks]  # type: ignore[union-attr]
    layers = blocks if granularity == "block" else [[mixer] for block in blocks for mixer in block]
    ends: Any = model.ends
    embeddings = model.embed(toy_tokens())
    weight = torch.linspace(-1, 1, 64, dtype=torch.float64).reshape(8, 8)

    current = ends.enter(embeddings)
    sources = [embeddings] if config.embedding == "source" else []
    stream = last = embeddings
    for layer in layers:
        U = read(config, layer[0].mixture, sources, stream) if sources else stream
        D = torch.zeros_like(U)
        for mixer in layer:
            view, carry = mixer.read(current)
            torch.testing.assert_close(view, U + D)
            current = mixer.write(current, torch.tanh(view @ weight), view, carry)
            D = D + torch.tanh((U + D) @ weight)
        stream = U + D
        last = D if config.source == "delta" else U + D
        sources.append(last)
    expected = stream if config.skip != "none" else last
    if config.head == "mixture":
        expected = read(config, ends.mixture, sources, stream)
    torch.testing.assert_close(ends.leave(current), expected)


@pytest.mark.parametrize("config", OPTIONS, ids=name)
def test_costs_and_state_are_exact_under_every_option(config: VerticalAttentionConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (cost, state, gradient):
        monkeypatch.setattr(module, "toy_decoder", lambda config, **kw: toy_decoder(config, **{**kw, "n_layers": 2}))
    cost.depth_params_are_exact.run(config)
    cost.depth_saved_bytes_are_exact.run(config)
    state.state_floats_are_exact.run(config)
    gradient.gradients_reach_parameters.run(config)


@pytest.mark.parametrize("source", ["delta", "output"])
def test_a_closed_gate_is_the_residual(source: Any) -> None:
    config = VerticalAttentionConfig(skip="gated", source=source, head="mixture")
    gated, plain = (Decoder.build(decoder_config(c)).double() for c in (config, ResidualConfig()))
    assert torch.equal(gated(toy_tokens()), plain(toy_tokens()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm": "none", "norm_kind": "layer"}, "norm_kind='layer': must be left out when norm='none'"),
        ({"norm": "weights", "norm_kind": "l2"}, "norm_kind='l2': must be left out when norm='weights'"),
    ],
)
def test_options_that_exclude_each_other(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        VerticalAttentionConfig(**options)
