"""Attention Residuals: blocks, heads, key ranks and schedules against each other and against the residual."""

from typing import Any

import pytest
import torch
from torch import Tensor

from twoaxis.checkpoints.layouts import state_map
from twoaxis.core.errors import ConfigError
from twoaxis.core.parameters import initialise
from twoaxis.core.position import LayerStack
from twoaxis.depth import AttentionResidualsConfig
from twoaxis.depth.history import source_blocks
from twoaxis.model import Decoder, DecoderConfig
from twoaxis.model.trace import sublayer_list
from twoaxis.sequence import ShortSWAConfig
from twoaxis.testing.measured import gradients, trace
from twoaxis.testing.toy import ATTENTION, FEED_FORWARD, noise, perturb, toy_decoder, toy_tokens

THREE = ((ATTENTION, FEED_FORWARD, FEED_FORWARD),)


def logits_and_gradients(model: Decoder) -> dict[str, Tensor]:
    logits = model(toy_tokens())
    return {"logits": logits.detach(), **gradients(model, (logits * noise(tuple(logits.shape), "loss")).sum())}


def assert_equal(config: AttentionResidualsConfig, other: AttentionResidualsConfig, **changes: Any) -> None:
    expected = logits_and_gradients(toy_decoder(other, **changes))
    got = logits_and_gradients(toy_decoder(config, **changes))
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=0, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("n_heads", [1, 2])
@pytest.mark.parametrize("count", ["sublayer", "layer"])
@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 12])
def test_two_phases_equal_one_read_each(block_size: int, count: str, n_heads: int) -> None:
    """Also where a source block spans several transformer blocks, or a transformer block several sources."""
    impl = ("fused", "reference")[(block_size + n_heads) % 2]
    plain = AttentionResidualsConfig.from_data({"block_size": block_size, "count": count, "n_heads": n_heads, "impl": impl})
    assert_equal(plain.replace(schedule="two_phase"), plain)
    assert_equal(plain.replace(schedule="two_phase"), plain, blocks=THREE)
    assert_equal(plain.replace(schedule="two_phase"), plain, blocks=((FEED_FORWARD,),), n_layers=4)


def test_one_output_per_source_is_the_full_form() -> None:
    assert_equal(AttentionResidualsConfig(block_size=(1,) * 6), AttentionResidualsConfig())
    assert_equal(AttentionResidualsConfig(block_size=(2, 2, 2)), AttentionResidualsConfig(block_size=2))
    assert_equal(AttentionResidualsConfig(block_size=(4, 2)), AttentionResidualsConfig(block_size=4))
    assert_equal(AttentionResidualsConfig(block_size=1, count="layer"), AttentionResidualsConfig(block_size=2))
    assert_equal(AttentionResidualsConfig(block_size=(1, 2), count="layer"), AttentionResidualsConfig(block_size=(2, 4)))


def test_one_head_is_no_head() -> None:
    assert_equal(AttentionResidualsConfig(n_heads=1), AttentionResidualsConfig())


def test_layers_of_different_lengths_open_sources() -> None:
    stack = LayerStack(8, 1e-6, (1, 3, 2, 2))
    assert source_blocks(1, "layer", stack).openings == (0, 1, 4, 6)
    assert source_blocks((1, 3), "layer", stack).openings == (0, 1)
    assert source_blocks(3, "layer", stack).openings == (0, 6)
    assert source_blocks(3, "sublayer", stack).openings == (0, 3, 6)
    config = AttentionResidualsConfig(block_size=(1, 3), count="layer")
    assert [config.sources(index, stack) for index in (0, 1, 2, 8)] == [1, 2, 3, 3]
    assert config.blocks(stack).counts(8) == (1, 1, 7)


@pytest.mark.parametrize("impl", ["fused", "reference"])
def test_a_source_scaled_by_a_hundred_keeps_the_weights_of_the_others(impl: str) -> None:
    config = AttentionResidualsConfig.from_data({"impl": impl})
    stack = LayerStack(4, 1e-14, (1, 1, 1))
    mixers = torch.nn.ModuleList(config.build(stack)[0])
    initialise(mixers, 0)
    perturb(mixers.double())
    first, *updates = [noise((2, 3, 4), f"update {index}") for index in range(3)]

    def last_read(scale: float) -> Tensor:
        state = config.build(stack)[1].enter(first)[0]
        for mixer, update in zip(mixers[:2], (scale * updates[0], updates[1]), strict=True):
            state = mixer.write(state, update, update, state)  # type: ignore[operator]
        return mixers[2].read(state)[0]  # type: ignore[operator]

    one, two, hundred = last_read(1.0), last_read(2.0), last_read(100.0)
    # With the weights fixed the read is affine in the scale.
    torch.testing.assert_close(hundred, one + 99 * (two - one), rtol=0, atol=1e-10)


@pytest.mark.parametrize("options", [{"key_rank": 3}, {"query": "token"}, {"n_heads": 2}, {"schedule": "two_phase"}])
def test_zero_queries_are_the_residual_as_eps_vanishes(options: dict[str, object]) -> None:
    """The difference shrinks with eps, in values and in the gradients of shared parameters."""
    depth = AttentionResidualsConfig.from_data(options)
    differences = []
    for eps in (1e-4, 1e-8, 1e-12):
        own = toy_decoder(depth, perturbed=False, norm_eps=eps)
        plain = Decoder.build(own.config.replace(depth="residual"), seed=0).double()
        expected, got = logits_and_gradients(plain), logits_and_gradients(own)
        differences.append(max(float((got[name] - value).abs().max()) for name, value in expected.items()))
    assert differences[0] > 50 * differences[1] > 50 * 50 * differences[2]


def test_key_rank_asks_every_sublayer_for_a_key_and_averages_them() -> None:
    model = toy_decoder(AttentionResidualsConfig(key_rank=3, block_size=2), blocks=THREE, n_layers=1)
    run = trace(model, toy_tokens())
    assert [update.shape[-1] for update in run.updates] == [11, 11, 11]
    torch.testing.assert_close(run.states[2].keys[1], (run.updates[0] + run.updates[1])[..., 8:] / 2)
    torch.testing.assert_close(run.states[2].values[1], (run.updates[0] + run.updates[1])[..., :8])
    torch.testing.assert_close(run.states[3].keys[2], run.updates[2][..., 8:])


def test_log_count_gives_zero_queries_one_vote_per_output() -> None:
    depth = AttentionResidualsConfig(key_rank=3, block_size=2, source_prior="log_count")
    run = trace(toy_decoder(depth, perturbed=False), toy_tokens())
    first, second, third, last = run.states[-1].values
    torch.testing.assert_close(run.left, (first + 2 * (second + third + last)) / 7)


SWA = ShortSWAConfig(n_heads=2, window=2)


def test_inkling2_reads_thrice_before_global_attention_alone() -> None:
    """One read before local attention and feed-forwards, and none before the first sublayer."""
    depth = AttentionResidualsConfig(form="inkling2", count="layer")
    windowed = ATTENTION.replace(window=3)
    model = toy_decoder(depth, blocks=((ATTENTION, FEED_FORWARD), (SWA, windowed, ATTENTION, FEED_FORWARD)), n_layers=2)
    reads = [[name for name, part in s.depth.named_children() if part is not None] for s in sublayer_list(model)]
    thrice = ["query", "key_query", "value_query"]
    assert reads == [[], ["query"], ["query"], ["query"], thrice, ["query"]]
    assert [hasattr(s, "value_norm") for s in sublayer_list(model)] == [False, False, False, False, True, False]


def test_no_layout_of_another_form_takes_inkling2() -> None:
    config = toy_decoder(AttentionResidualsConfig(form="inkling2", count="layer")).config
    with pytest.raises(ConfigError, match=r"depth.form='inkling2': must be 'report', whose reads have a gain"):
        state_map("attnres_fla", config)


@pytest.mark.parametrize(
    ("depth", "message"),
    [
        ({"block_size": [2, 3]}, r"block_size=\(2, 3\): must be sizes that add up to the 6 sublayers of the model"),
        ({"block_size": [2, 2], "count": "layer"}, r"must be sizes that add up to the 3 layers"),
        ({"block_size": 0}, r"block_size"),
        ({"n_heads": 3}, r"n_heads=3: must be a divisor of d_model=8"),
        ({"key_rank": 3, "n_heads": 2}, r"key_rank=3: must be a multiple of n_heads=2"),
        (
            {"form": "inkling2", "count": "layer", "key_scale": "head"},
            r"key_scale='head': must be left out with form='inkling2'",
        ),
        ({"source_prior": "log_count"}, r"source_prior='log_count': must be 'none' without a key_rank"),
        ({"schedule": "two_phase", "query": "token"}, r"query='token': must be left out with schedule='two_phase'"),
        ({"schedule": "two_phase", "key_rank": 2}, r"key_rank=2: must be left out with schedule='two_phase'"),
        ({"form": "inkling2"}, r"count='sublayer': must be 'layer' with form='inkling2'.*; set count='layer'"),
        ({"form": "inkling2", "count": "layer", "n_heads": 2}, r"n_heads=2: must be left out with form="),
        ({"form": "inkling2", "count": "layer", "schedule": "two_phase"}, r"schedule='two_phase': must be left out"),
        ({"form": "inkling2", "count": "layer", "mixture": "sum"}, r"mixture='sum': must be left out"),
    ],
)
def test_what_does_not_fit_fails_at_config_time(depth: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DecoderConfig.from_data(
            {"vocab_size": 8, "d_model": 8, "n_layers": 3, "depth": {"kind": "attention_residuals", **depth}},
        )
