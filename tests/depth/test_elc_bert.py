from typing import Any

import pytest
import torch
from torch import Tensor

from twoaxis.core.cost import Shape
from twoaxis.core.errors import ConfigError
from twoaxis.core.parameters import initialise
from twoaxis.core.position import LayerStack
from twoaxis.depth import ElcBertConfig
from twoaxis.depth.base import Read
from twoaxis.ledger.stack import trace_stack
from twoaxis.model import Decoder, DecoderConfig
from twoaxis.model.trace import sublayer_list
from twoaxis.ops.norm import layer_norm
from twoaxis.testing import declared_costs, gradient
from twoaxis.testing.conformance import Check
from twoaxis.testing.measured import trace
from twoaxis.testing.toy import ATTENTION, FEED_FORWARD, noise, toy_decoder, toy_tokens

VARIANTS = ("base", "zero", "normalized", "weighted_output")


def logits(variant: Any, block: int) -> Tensor:
    mixer: Any = ElcBertConfig(variant=variant).build(LayerStack(2, 1e-6, (2,) * 12))[0][2 * block]
    initialise(mixer, 0)
    return mixer.combination.logits.detach()


@pytest.mark.parametrize("block", [1, 2, 11])
def test_initial_weights(block: int) -> None:
    n = block + 1
    for variant in ("zero", "normalized", "weighted_output"):
        torch.testing.assert_close(logits(variant, block).softmax(0), torch.full((n,), 1 / n))
    newest = float(torch.e / (torch.e + n - 1))
    assert float(logits("base", block).softmax(0)[-1]) == pytest.approx(newest)


def test_published_initial_weights_of_the_newest() -> None:
    found = [round(float(logits("base", n - 1).softmax(0)[-1]), 3) for n in (2, 6, 12)]
    assert found == [0.731, 0.352, 0.198]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("sublayers", [1, 3])
@pytest.mark.parametrize(
    "check",
    [declared_costs.depth_params_are_exact, declared_costs.depth_flops_are_exact, gradient.gradients_reach_parameters],
    ids=lambda check: check.name,
)
def test_blocks_of_any_length_keep_their_promises(
    variant: Any, sublayers: int, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = ((ATTENTION, FEED_FORWARD, ATTENTION)[:sublayers],)
    for module in (declared_costs, gradient):
        monkeypatch.setattr(module, "toy_decoder", lambda config, **kw: toy_decoder(config, **{**kw, "blocks": blocks}))
    check.run(ElcBertConfig(variant=variant))


def test_one_source_has_no_logit() -> None:
    for config in (ElcBertConfig(), ElcBertConfig(variant="weighted_output")):
        assert not list(config.build(LayerStack(2, 1e-6, (2, 2)))[0][0].parameters())


def test_the_sources_are_dropped_once_the_last_block_has_read_them() -> None:
    stack = LayerStack(1, 1e-6, (2,) * 3)
    base, weighted = (trace_stack(ElcBertConfig(variant=name), stack, Shape(1, 1)) for name in ("base", "weighted_output"))
    assert [base.state_elements(i) for i in range(7)] == [1, 2, 2, 3, 3, 1, 1]
    assert [weighted.state_elements(i) for i in range(7)] == [1, 3, 2, 4, 3, 5, 4]


def test_normalised_outputs_have_mean_0_and_variance_1() -> None:
    y = layer_norm(torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(0)), 1e-7)
    torch.testing.assert_close(y.mean(-1), torch.zeros(2, 3), atol=1e-6, rtol=0)
    torch.testing.assert_close(y.var(-1, unbiased=False), torch.ones(2, 3), atol=1e-5, rtol=0)


@pytest.mark.parametrize("std", [0.02, 1.0])
def test_no_source_of_normalized_is_small_beside_another(std: float) -> None:
    """Whatever the embedding starts at, it has the weight in a sum that its logit gives it."""
    embeddings = std * torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    stack = LayerStack(64, 1e-6, (1, 1))
    config = ElcBertConfig(variant="normalized")
    state = config.build(stack)[1].enter(embeddings)[0]
    mixer = config.build(stack)[0][0]
    update = 5 * noise((2, 3, 64), "update")
    first, second = mixer.write(state, update, update, mixer.read(state)[1]).sources
    assert float(first.square().mean()) == pytest.approx(float(second.square().mean()), rel=1e-3)
    raw = ElcBertConfig(variant="normalized", embedding_norm="none").build(stack)[1].enter(embeddings)[0]
    assert torch.equal(raw.sources[0], embeddings)


def test_a_record_without_the_norm_of_the_embedding_means_the_embedding_as_it_is() -> None:
    old = {"vocab_size": 8, "d_model": 8, "n_layers": 1, "depth": {"kind": "elc_bert", "variant": "normalized"}}
    recorded: Any = DecoderConfig.from_record(old).depth
    today: Any = DecoderConfig.from_data(old).depth
    assert (recorded.norms_embedding, today.norms_embedding) == (False, True)
    assert DecoderConfig.from_record(DecoderConfig.from_data(old).to_data()) == DecoderConfig.from_data(old)


def test_a_blend_starts_at_the_plain_sum_of_the_embedding_as_it_is() -> None:
    with pytest.raises(ConfigError, match=r"embedding_norm='layer': must be 'none' with blend='annealed'.*; leave it out"):
        ElcBertConfig(variant="weighted_output", blend="annealed", embedding_norm="layer")


def test_the_eps_of_a_norm_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"^source_eps=0.001: must be left out, since variant='zero' has no LayerNorm here; "):
        ElcBertConfig(variant="zero", source_eps=1e-3)
    assert ElcBertConfig(variant="zero", embedding_norm="layer", source_eps=1e-3).source_eps == 1e-3


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_token_changes_a_weight(variant: Any) -> None:
    """The weights of every combination, while tokens and so all sources change."""
    model = toy_decoder(ElcBertConfig(variant=variant))
    first, second = (read_weights(model, toy_tokens(seed=seed)) for seed in (0, 1))
    assert len(first) == (3 if variant == "weighted_output" else 2)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, one[:, :1, :1].expand_as(one))


def read_weights(model: Decoder, tokens: Tensor) -> list[Tensor]:
    run = trace(model, tokens)
    each = zip(sublayer_list(model), run.states, run.views, strict=False)
    reads = [total for sublayer, state, (view,) in each for total in sublayer.depth.explain(Read(state, view, ())).sums]
    return [total.weights.detach() for total in (*reads, *model.ends.explain(Read(run.states[-1], run.left)).sums)]
