import itertools
from typing import Any

import pytest
import torch

from twoaxis import ConfigError, Decoder
from twoaxis.core.position import LayerStack
from twoaxis.depth import ResidualConfig, VerticalAttentionConfig
from twoaxis.testing import declared_costs, gradient
from twoaxis.testing.toy import decoder_config, toy_decoder, toy_tokens

NORMS: list[Any] = [
    ("sources", "rms"),
    ("sources", "layer"),
    ("sources", "l2"),
    ("weights", "rms"),
    ("sum", "l2"),
    ("none", "rms"),
]
# Every pair of options, in a quarter of all combinations.
OPTIONS = [
    VerticalAttentionConfig(
        source=("delta", "output")[s],
        skip=("none", "added", "gated")[k],
        norm=norm,
        norm_kind=kind,
        head=("last", "mixture")[(s + k + n) % 2],
        embedding=("source", "first_input")[(s + n) % 2],
    )
    for s, k, (n, (norm, kind)) in itertools.product(range(2), range(3), enumerate(NORMS))
]


def name(config: VerticalAttentionConfig) -> str:
    return "-".join(getattr(config, field) for field in ("source", "skip", "norm", "norm_kind", "head", "embedding"))


@pytest.mark.parametrize("config", OPTIONS, ids=name)
def test_parameters_are_exact_under_every_option(config: VerticalAttentionConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (declared_costs, gradient):
        monkeypatch.setattr(module, "toy_decoder", lambda config, **kw: toy_decoder(config, **{**kw, "n_layers": 2}))
    declared_costs.depth_params_are_exact.run(config)
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


@pytest.mark.parametrize("impl", ["fused", "reference"])
def test_unit_length_is_rounded_once(impl: Any) -> None:
    # 24 ** -0.5 itself is no bfloat16.
    h = torch.randn(1, 64, 24, generator=torch.Generator().manual_seed(0)).bfloat16()
    config = VerticalAttentionConfig(norm_kind="l2", head="mixture", impl=impl)
    _, ends = config.build(LayerStack(24, 1e-30, (1,)))
    exact = h.double() / h.double().norm(dim=-1, keepdim=True)
    assert torch.equal(ends.enter(h)[0].sources[0], exact.bfloat16())
