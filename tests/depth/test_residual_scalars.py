"""Residual scalars: where the stream starts, what is added back, and when that is the plain model."""

import pytest
import torch

from twoaxis.core.errors import ConfigError
from twoaxis.depth import ResidualConfig, ResidualScalarsConfig
from twoaxis.testing.toy import noise, toy_decoder, toy_tokens


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_what_is_added_back_has_root_mean_square_one_whatever_the_scale_of_the_embedding(scale: float) -> None:
    embeddings = scale * noise((2, 3, 8), "embeddings")
    stack = toy_decoder(ResidualConfig()).config.stack
    state = ResidualScalarsConfig().build(stack)[1].enter(embeddings)[0]
    assert state.stream is embeddings
    root_mean_square = embeddings.square().mean(-1, keepdim=True).sqrt()
    torch.testing.assert_close(state.embedding, embeddings / root_mean_square, rtol=1e-9, atol=0)
    start = ResidualScalarsConfig(embedding="normalised_start").build(stack)[1].enter(embeddings)[0]
    assert start.stream is start.embedding and torch.equal(start.embedding, state.embedding)
    raw = ResidualScalarsConfig(embedding="raw").build(stack)[1].enter(embeddings)[0]
    assert raw.stream is raw.embedding is embeddings


def test_a_zero_embedding_stays_finite() -> None:
    embeddings = torch.zeros(1, 2, 8, requires_grad=True)
    state = ResidualScalarsConfig().build(toy_decoder(ResidualConfig()).config.stack)[1].enter(embeddings)[0]
    state.embedding.sum().backward()
    assert not state.embedding.any() and embeddings.grad is not None and embeddings.grad.isfinite().all()


def test_a_normalised_embedding_is_the_same_at_the_start_of_both() -> None:
    """In a model whose stream starts at root mean square 1 the default is nanochat's form."""
    stack = toy_decoder(ResidualConfig()).config.stack
    once = ResidualScalarsConfig(embedding="normalised_start").build(stack)[1].enter(noise((2, 3, 8), "embeddings"))[0]
    again = ResidualScalarsConfig().build(stack)[1].enter(once.stream)[0]
    torch.testing.assert_close(again.embedding, once.embedding, rtol=1e-14, atol=1e-14)


def test_only_the_default_and_the_raw_form_start_as_the_plain_model() -> None:
    tokens = toy_tokens()
    plain = toy_decoder(ResidualConfig(), perturbed=False)(tokens)
    for embedding, relation in (("normalised", "exact"), ("raw", "exact"), ("normalised_start", "none")):
        config = ResidualScalarsConfig.from_data({"embedding": embedding})
        logits = toy_decoder(config, perturbed=False)(tokens)
        assert config.init_equivalence.relation == relation
        assert torch.allclose(logits, plain, rtol=1e-12, atol=1e-12) == (relation == "exact")


def test_weights_as_published_fall_linearly_with_depth() -> None:
    config = ResidualScalarsConfig(granularity="block", init="nanochat", backout_layer="middle")
    model = toy_decoder(config, perturbed=False, n_layers=5)
    mixers = [block.sublayers[0].depth for block in model.blocks]  # type: ignore[union-attr, index]
    for name, first, last in (("stream_weight", 1.15, 1.05), ("embedding_weight", 0.2, 0.05)):
        starts = torch.cat([getattr(mixer, name).detach() for mixer in mixers])
        torch.testing.assert_close(starts, torch.linspace(first, last, 5, dtype=starts.dtype), rtol=1e-6, atol=0)
    assert config.init_equivalence.relation == "none"
    assert [block.sublayers[1].depth.mixes for block in model.blocks] == [False] * 5  # type: ignore[union-attr, index]


def test_a_block_that_the_model_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^backout_layer=3: must be below the 3 blocks of the model; count from 0"):
        toy_decoder(ResidualScalarsConfig(backout_layer=3))


def test_the_middle_block_is_half_of_the_blocks_rounded_down() -> None:
    config = ResidualScalarsConfig(backout_layer="middle")
    found = [config.backout_block(toy_decoder(config, n_layers=n).config.stack) for n in (1, 2, 3, 4, 5)]
    assert found == [0, 1, 1, 2, 2]
