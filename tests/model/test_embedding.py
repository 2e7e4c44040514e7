"""The scale at which tokens enter the stack: the embedding's initial spread, and the norm behind it."""

import pytest
import torch

from twoaxis import ConfigError, DecoderConfig
from twoaxis.core.cost import Shape
from twoaxis.core.measure import saved_bytes
from twoaxis.ledger.decoder_memory import decoder_saved_bytes, recomputing_saved_bytes
from twoaxis.model import Decoder
from twoaxis.model.cost import decoder_cost

from .build import decoder, tokens


@pytest.mark.parametrize(("asked", "std"), [(0.02, 0.02), (3.0, 3.0), (None, 0.125)])
def test_the_embedding_starts_with_the_spread_asked_for(asked: float | None, std: float) -> None:
    config = DecoderConfig(vocab_size=512, d_model=64, n_layers=1, embedding_std=asked)
    weight = Decoder.build(config, seed=0).embedding.weight
    assert weight.std().item() == pytest.approx(std, rel=0.02)
    assert torch.equal(weight, Decoder.build(config.replace(embedding_std=1.0), seed=0).embedding.weight * std)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("inf"), float("nan")])
def test_spreads_that_no_embedding_can_have(bad: float) -> None:
    with pytest.raises(ConfigError, match=r"^embedding_std="):
        DecoderConfig(vocab_size=4, d_model=2, n_layers=1, embedding_std=bad)


def test_the_norm_brings_any_embedding_to_one_scale() -> None:
    model, text = decoder(embedding_norm="rms"), tokens(2, 5)
    assert model.embedding_norm is not None
    raw = model.embedding(text)
    expected = raw / (raw.square().mean(-1, keepdim=True) + model.config.norm_eps).sqrt() * model.embedding_norm.gain
    torch.testing.assert_close(model.embed(text), expected)
    assert decoder().embedding_norm is None


def test_the_norm_is_part_of_every_pass() -> None:
    model, text = decoder(embedding_norm="rms"), tokens(2, 6)
    before = model(text)
    with torch.no_grad():
        model.embedding_norm.gain.mul_(2)  # type: ignore[union-attr]
    assert not torch.allclose(model(text), before)
    logits, cache = model(text[:, :4], cache=model.new_cache())
    rest, _ = model(text[:, 4:], cache=cache)
    torch.testing.assert_close(torch.cat((logits, rest), dim=1), model(text))


@pytest.mark.parametrize("element_bytes", [4, 8])
def test_the_norm_costs_what_is_declared(element_bytes: int) -> None:
    config = decoder(embedding_norm="rms").config
    plain = config.replace(embedding_norm="none")
    model = Decoder.build(config, seed=0).to({4: torch.float32, 8: torch.float64}[element_bytes])
    text, shape = tokens(2, 7), Shape(2, 7, element_bytes)
    added = decoder_cost(config, shape).params - decoder_cost(plain, shape).params
    assert added == config.d_model
    assert decoder_cost(config, shape).params == sum(parameter.numel() for parameter in model.parameters())

    def measured(recompute: bool) -> int:
        return saved_bytes(
            lambda: model.loss(text, text.roll(-1, 1), recompute=recompute)[0], lambda loss: [*model.parameters(), loss, text]
        )

    assert measured(False) == decoder_saved_bytes(config, shape)
    more = recomputing_saved_bytes(config, shape) - recomputing_saved_bytes(plain, shape)
    assert more == 14 * (config.d_model * element_bytes + max(4, element_bytes))
