"""Depth value mixing: which layers are read and kept, what caches hold, and what is refused."""

from typing import Any

import pytest
import torch

from twoaxis.core.errors import ConfigError
from twoaxis.core.layout import TokenLayout
from twoaxis.core.measure import perturb
from twoaxis.depth import DepthValueMixingConfig, ResidualConfig
from twoaxis.model import Decoder, DecoderConfig, generate
from twoaxis.model.trace import trace
from twoaxis.testing.decoding import decode
from twoaxis.testing.toy import toy_tokens

KIND = "depth_value_mixing"
ATTENTION = {"kind": "attention", "n_heads": 4, "n_kv_heads": 2, "head_dim": 4, "qk_norm": "key_after_rope"}
SHORT = {"kind": "short_swa", "n_heads": 2, "head_dim": 4, "window": 3, "sink": "learned"}


def config(blocks: Any = ((ATTENTION, "swiglu"),), n_layers: int = 4, **options: Any) -> DecoderConfig:
    sizes = {"vocab_size": 11, "d_model": 8, "n_layers": n_layers}
    return DecoderConfig.from_data({**sizes, "depth": {"kind": KIND, **options}, "blocks": blocks})


def decoder(blocks: Any = ((ATTENTION, "swiglu"),), n_layers: int = 4, **options: Any) -> Decoder:
    return perturb(Decoder.build(config(blocks, n_layers, **options)).double())


@pytest.mark.parametrize(
    ("stride", "recent", "sources"),
    [
        (1, 0, [(), (0,), (0, 1), (0, 1, 2), (0, 1, 2, 3)]),
        (2, 0, [(), (0,), (0,), (0, 2), (0, 2)]),
        (2, 1, [(), (0,), (0, 1), (0, 2), (0, 2, 3)]),
        (3, 2, [(), (0,), (0, 1), (0, 1, 2), (0, 2, 3)]),
        (16, 0, [(), (0,), (0,), (0,), (0,)]),
    ],
)
def test_a_layer_reads_every_stride_th_and_the_last_ones(stride: int, recent: int, sources: list[tuple[int, ...]]) -> None:
    found = DepthValueMixingConfig(stride=stride, recent_window=recent)
    assert [found.sources(layer) for layer in range(5)] == sources


def test_the_state_holds_what_later_layers_read() -> None:
    """A key and a mixed value of each; with stride 2 and the last one: 0, then 0 and 1, then 0 and 2, then nothing."""
    run = trace(decoder(((ATTENTION,),), stride=2, recent_window=1), toy_tokens())
    assert [len(state.heads[0]) // 2 for state in run.states] == [0, 1, 2, 2, 0]
    assert run.states[1].heads[0][0] is run.states[3].heads[0][0]
    uniform = trace(decoder(((ATTENTION,),), weights="uniform"), toy_tokens())
    assert [len(state.heads[0]) for state in uniform.states] == [0, 1, 2, 3, 0]


def test_every_choice_of_sources_changes_logits() -> None:
    """Sources that are never selected would leave the plain model behind, and nobody would notice."""
    tokens = toy_tokens()
    options: list[dict[str, Any]] = [
        {"weights": "off"},
        {},
        {"stride": 2},
        {"stride": 2, "recent_window": 1},
        {"stride": 16},
        {"weights": "uniform"},
    ]
    logits = [decoder(**each)(tokens) for each in options]
    for i, one in enumerate(logits):
        for other in logits[:i]:
            assert (one - other).abs().max() > 1e-4
    plain = perturb(Decoder.build(config().replace(depth=ResidualConfig())).double())
    assert torch.equal(plain(tokens), logits[0])


def test_a_blend_of_zero_is_the_plain_model_and_of_one_the_mixing() -> None:
    tokens, mixed, plain = toy_tokens(), decoder(), decoder(weights="off")
    model = decoder(blend="annealed")
    for weight, expected in ((0.0, plain), (1.0, mixed)):
        with torch.no_grad():
            for block in list(model.blocks)[1:]:
                block.attention.depth.blend.fill_(weight)  # type: ignore[union-attr, operator]
        torch.testing.assert_close(model(tokens), expected(tokens), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("attention", [ATTENTION, SHORT, {**ATTENTION, "n_kv_heads": 1, "qk_norm": "after_rope"}])
@pytest.mark.parametrize("options", [{}, {"stride": 2, "recent_window": 1}, {"weights": "uniform"}, {"blend": "annealed"}])
def test_generation_from_caches_is_the_full_pass(attention: Any, options: dict[str, Any]) -> None:
    """The cache holds keys as they attend and mixed values; the released code caches own values."""
    model, tokens = decoder(((attention, "swiglu"),), **options), toy_tokens()
    with torch.no_grad():
        full = model(tokens)
        for chunks in ((1,) * 9, (4, 1, 3, 1)):
            torch.testing.assert_close(decode(model, tokens, chunks), full, rtol=1e-11, atol=1e-12)
    prompts = [[1, 2, 3, 4, 5], [6, 7]]
    together = generate(model, prompts, max_new_tokens=4)
    assert together == [generate(model, [prompt], max_new_tokens=4)[0] for prompt in prompts]


def test_padding_and_packed_documents_are_masked() -> None:
    model, tokens = decoder(), toy_tokens(batch=1, tokens=9)
    alone = model(tokens[:, 4:])
    packed = model(tokens, TokenLayout.packed(torch.tensor([[0] * 4 + [1] * 5])))
    padded = model(tokens, TokenLayout.left_padded(torch.tensor([5]), 9))
    for found in (packed, padded):
        torch.testing.assert_close(found[:, 4:], alone, rtol=1e-11, atol=1e-12)


def test_attention_of_another_library_gets_mixed_values() -> None:
    seen = []

    def attend(module: Any, q: Any, k: Any, v: Any) -> Any:
        seen.append(v)
        return q.transpose(1, 2).flatten(2)

    model = decoder(n_layers=2)
    model(toy_tokens(), TokenLayout(torch.arange(9)[None], attend=attend))
    run = trace(model, toy_tokens())
    assert torch.equal(seen[0], run.heads[0].v.transpose(1, 2))
    assert (seen[1] - run.heads[2].v.transpose(1, 2)).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("blocks", "options", "message"),
    [
        ([["swiglu"]], {}, "must be with a sublayer that has heads"),
        ([[ATTENTION]], {"recent_window": 2}, "recent_window=2: must be 0 with stride=1, which reads all; set stride"),
        ([[ATTENTION]], {"weights": "off", "stride": 2}, "stride=2: must be left out with weights='off', which reads nothing"),
        (
            [[SHORT, "swiglu"], [ATTENTION, "swiglu"]],
            {},
            "sublayers with heads=['short_swa', 'attention']: must be two sublayers of one kind, or more, of which the later "
            "ones read the first; raise n_layers, or drop 'depth_value_mixing'",
        ),
    ],
)
def test_what_selects_nothing_fails_at_config_time(blocks: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(blocks, 2, **options)
    assert message in str(caught.value) and "\n" not in str(caught.value)
