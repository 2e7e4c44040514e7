"""Mixture-of-depths attention: which sublayers fill slots, what is not looked at, and what is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor

from twoaxis.core.errors import ConfigError
from twoaxis.core.layout import PADDING, TokenLayout
from twoaxis.core.measure import perturb
from twoaxis.depth import ResidualConfig
from twoaxis.model import Decoder, DecoderConfig, generate
from twoaxis.model.trace import trace
from twoaxis.testing.decoding import decode
from twoaxis.testing.measured import sublayer_list
from twoaxis.testing.toy import toy_decoder, toy_tokens

KIND = "mixture_of_depths_attention"
ATTENTION = {"kind": "attention", "n_heads": 4, "n_kv_heads": 2, "head_dim": 4, "qk_norm": "before_rope"}
SINK = {**ATTENTION, "sink": "learned", "window": 3}
BLOCKS = [[ATTENTION, "swiglu"]]


def config(blocks: Any = BLOCKS, n_layers: int = 3, **options: Any) -> DecoderConfig:
    sizes = {"vocab_size": 11, "d_model": 8, "n_layers": n_layers}
    return DecoderConfig.from_data({**sizes, "depth": {"kind": KIND, **options}, "blocks": blocks})


def decoder(blocks: Any = BLOCKS, n_layers: int = 3, **options: Any) -> Decoder:
    return perturb(Decoder.build(config(blocks, n_layers, **options)).double())


def slots(model: Decoder) -> list[int]:
    """The slots, of two tensors each, in the state before each sublayer and at the end."""
    return [len(state.heads[0]) // 2 for state in trace(model, toy_tokens()).states]


def test_attention_and_feed_forwards_fill_slots_while_a_later_attention_reads_them() -> None:
    assert slots(decoder()) == [0, 1, 2, 3, 4, 0, 0]
    assert slots(decoder(slots="attention")) == [0, 1, 1, 2, 2, 0, 0]
    # Every sublayer without heads fills one, also two in a row, and the first block's attention may come late.
    assert slots(decoder([["swiglu", ATTENTION, "gelu", "swiglu"]], 2)) == [0, 0, 1, 2, 3, 4, 0, 0, 0]


def test_only_feed_forwards_that_are_read_have_parameters() -> None:
    names = [name for name, _ in decoder().named_parameters() if ".depth." in name]
    assert names == ["blocks.0.swiglu.depth.slot.weight", "blocks.1.swiglu.depth.slot.weight"]
    assert not [name for name, _ in decoder(slots="attention").named_parameters() if ".depth." in name]
    assert not [name for name, _ in decoder(weights="off").named_parameters() if ".depth." in name]


def test_kinds_of_attention_have_slots_of_their_own_and_feed_forwards_fill_those_of_the_nearest() -> None:
    short = {"kind": "short_swa", "n_heads": 2, "head_dim": 2, "window": 3}
    states = trace(decoder([[short, "gelu", ATTENTION, "swiglu"]], 2), toy_tokens()).states
    assert [tuple(len(chain) // 2 for chain in state.heads[:2]) for state in states[:6]] == [
        (0, 0),
        (1, 0),
        (2, 0),
        (2, 1),
        (2, 2),
        (0, 2),
    ]


def test_the_gain_of_the_key_norm_crosses_no_block() -> None:
    states = trace(decoder(), toy_tokens()).states
    assert [len(state.heads[-1]) for state in states] == [0, 1, 0, 1, 0, 0, 0]


def test_feed_forwards_normalise_with_the_gain_of_the_attention_before_them() -> None:
    model = decoder(n_layers=2, blocks=[[{**ATTENTION, "output_init": "zero"}, "swiglu"]])
    mixer: Any = model.blocks[0].attention.mixer  # type: ignore[union-attr]
    with torch.no_grad():
        # What the feed-forward reads does not depend on the gain.
        mixer.output.weight.zero_()
    key = trace(model, toy_tokens()).states[2].heads[0][2]
    (by_gain,) = torch.autograd.grad(key.sum(), [mixer.k_gain])
    torch.testing.assert_close((by_gain * mixer.k_gain).sum(), key.sum())
    with torch.no_grad():
        mixer.k_gain.mul_(3)
    torch.testing.assert_close(trace(model, toy_tokens()).states[2].heads[0][2], 3 * key)


@pytest.mark.parametrize("attention", [ATTENTION, SINK, {**ATTENTION, "impl": "reference"}])
def test_closed_slots_are_the_plain_model(attention: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of minus infinity, weights="off", a blend of 0 and the residual: the same logits and gradients."""
    blocks, tokens = [[attention, "swiglu"]], toy_tokens()
    plain = perturb(Decoder.build(config(blocks).replace(depth=ResidualConfig())).double())
    expected = _logits_and_gradients(plain, tokens)
    shared = plain.state_dict()

    def loaded(**options: Any) -> Decoder:
        model = decoder(blocks, **options)
        model.load_state_dict(shared, strict=False)
        return model

    for options in ({"weights": "off"}, {"blend": "annealed"}):
        model = loaded(**options)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.mul_(0.0 if name.endswith(".blend") else 1.0)
        _same(_logits_and_gradients(model, tokens), expected)
    from twoaxis.depth import mixture_of_depths_attention as module

    right = module.depth_summary

    def closed(*given: Any) -> tuple[Tensor, Tensor]:
        score, value = right(*given)
        return torch.full_like(score, -torch.inf), value

    opened = _logits_and_gradients(loaded(), tokens)
    monkeypatch.setattr(module, "depth_summary", closed)
    _same(_logits_and_gradients(loaded(), tokens), expected)
    assert (opened[0] - expected[0]).abs().max() > 1e-3


def _logits_and_gradients(model: Decoder, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    logits = model(tokens)
    logits.square().sum().backward()
    return logits.detach(), {n: p.grad for n, p in model.named_parameters() if ".depth." not in n and p.grad is not None}


def _same(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got[0], expected[0], rtol=1e-11, atol=1e-12)
    for name, gradient in expected[1].items():
        torch.testing.assert_close(got[1][name], gradient, rtol=1e-9, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")


def test_uniform_slots_do_not_look_at_keys() -> None:
    """Every slot has the score 0: a share of n / (n + sum of exp(scores of tokens)), and the mean of the values."""
    model = decoder([[ATTENTION]], 3, weights="uniform")
    run = trace(model, toy_tokens())
    heads, state = run.heads[2], run.states[2]
    mixed, _ = sublayer_list(model)[2].depth.mix_heads(heads, run.contexts[2], state)
    score, value = mixed.beside
    assert torch.allclose(score, torch.full_like(score, 2.0).log())
    first, second = state.heads[0]
    assert torch.allclose(value, ((first + second) / 2).repeat_interleave(2, dim=2))


def test_packed_documents_and_padding_do_not_mask_slots() -> None:
    """Slots are of the own token: a document alone, packed behind another and padded on the left gives the same logits."""
    model = decoder([[SINK, "swiglu"]])
    tokens = toy_tokens(batch=1, tokens=9)
    alone = model(tokens[:, 4:])
    packed = model(tokens, TokenLayout.packed(torch.tensor([[0] * 4 + [1] * 5])))
    padded = model(tokens, TokenLayout.left_padded(torch.tensor([5]), 9))
    for found in (packed, padded):
        torch.testing.assert_close(found[:, 4:], alone, rtol=1e-11, atol=1e-12)
    # Padding attends to itself and to slots, and is finite.
    documents = torch.tensor([[PADDING] * 4 + [0] * 5])
    layout = TokenLayout((torch.arange(9) - 4).clamp(min=0)[None], documents)
    assert model(tokens, layout).isfinite().all()


@pytest.mark.parametrize("attention", [ATTENTION, SINK])
@pytest.mark.parametrize("options", [{}, {"weights": "uniform"}, {"blend": "annealed"}, {"norm": "post"}])
def test_generation_from_caches_is_the_full_pass(attention: Any, options: dict[str, Any]) -> None:
    model, tokens = decoder([[attention, "swiglu"]], **options), toy_tokens()
    with torch.no_grad():
        full = model(tokens)
        for chunks in ((1,) * 9, (4, 1, 3, 1)):
            torch.testing.assert_close(decode(model, tokens, chunks), full, rtol=1e-11, atol=1e-12)
    prompts = [[1, 2, 3, 4, 5], [6, 7]]
    together = generate(model, prompts, max_new_tokens=4)
    assert together == [generate(model, [prompt], max_new_tokens=4)[0] for prompt in prompts]


def test_generation_carries_no_slots() -> None:
    model = decoder()
    _, cache = model.hidden(model.embed(toy_tokens()), cache=model.new_cache())
    assert cache is not None
    assert all(sublayer.depth == () for block in cache.sublayers for sublayer in block)


@pytest.mark.parametrize(
    ("blocks", "options", "message"),
    [
        ([["swiglu"]], {}, "must be with a sublayer that has heads"),
        (
            [[{**ATTENTION, "qk_norm": "after_rope"}]],
            {},
            "key norm of 'attention' in block 0='after_rope': must be before_rope or none; set qk_norm='before_rope', for "
            "slots of 'mixture_of_depths_attention' are not rotated",
        ),
        ([[{**ATTENTION, "qk_norm": "key_after_rope"}]], {}, "must be before_rope or none"),
        (BLOCKS, {"weights": "off", "slots": "attention"}, "slots='attention': must be left out with weights='off'"),
        (BLOCKS, {"weights": "off", "blend": "annealed"}, "blend='annealed': must be left out with weights='off'"),
        (BLOCKS, {"norm": "post", "blend": "annealed"}, "blend='annealed': must be left out with norm='post'"),
        (
            [[ATTENTION, "swiglu"], [{**ATTENTION, "n_kv_heads": 1}, "swiglu"]],
            {},
            "kv-heads of 'attention' under 'mixture_of_depths_attention'='1 x 4': must be 2 x 4 in every layer",
        ),
    ],
)
def test_what_does_not_fit_fails_at_config_time(blocks: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(blocks, **options)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_uniform_slots_take_any_key_norm() -> None:
    assert decoder([[{**ATTENTION, "qk_norm": "after_rope"}, "swiglu"]], weights="uniform")(toy_tokens()).isfinite().all()


def test_attention_of_another_library_is_refused() -> None:
    model = decoder()
    layout = TokenLayout(torch.arange(9)[None], attend=lambda module, q, k, v: q.transpose(1, 2).flatten(2))
    with pytest.raises(ConfigError, match="one more key for each query from the depth mixer; must be the attention of this"):
        model(toy_tokens(), layout)


def test_keys_without_a_norm_and_a_norm_of_all_heads() -> None:
    for attention in ({**ATTENTION, "qk_norm": "none"}, {**ATTENTION, "qk_norm_over": "all_heads"}):
        model = decoder([[attention, "swiglu"]])
        with torch.no_grad():
            torch.testing.assert_close(decode(model, toy_tokens(), (2, 7)), model(toy_tokens()), rtol=1e-11, atol=1e-12)
    assert toy_decoder(config().depth) is not None
