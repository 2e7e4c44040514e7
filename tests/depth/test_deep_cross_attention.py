from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from twoaxis import ConfigError, Decoder, DecoderConfig
from twoaxis.core.parameters import declarations
from twoaxis.depth import DeepCrossAttentionConfig, ResidualConfig
from twoaxis.testing.measured import gradients, trace
from twoaxis.testing.toy import ATTENTION, FEED_FORWARD, decoder_config, noise, perturb, toy_decoder, toy_tokens

L = 5
BLOCKS = ((ATTENTION,), (ATTENTION, FEED_FORWARD), (ATTENTION, FEED_FORWARD, ATTENTION))


def fresh(config: DeepCrossAttentionConfig | ResidualConfig, **changes: Any) -> Decoder:
    return toy_decoder(config, perturbed=False, n_layers=L, **changes)


def same(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("variant", ["v1", "v2", "v3", "dca"])
@pytest.mark.parametrize("k", [None, 1, 2, L - 1, L])
@pytest.mark.parametrize("sublayers", BLOCKS, ids=len)
def test_neutral_weights_are_the_residual(variant: Any, k: int | None, sublayers: Any) -> None:
    model = fresh(DeepCrossAttentionConfig(variant=variant, k=k), blocks=(sublayers,))
    same(model(toy_tokens()), residual_logits(len(sublayers)))


@cache
def residual_logits(sublayers: int) -> Tensor:
    (block,) = (block for block in BLOCKS if len(block) == sublayers)
    return fresh(ResidualConfig(), blocks=(block,))(toy_tokens()).detach()


@pytest.mark.parametrize("k", [L - 1, L, L + 7])
def test_as_many_columns_as_deltas_are_the_full_method(k: int) -> None:
    full, limited = (perturb(fresh(DeepCrossAttentionConfig(k=k))) for k in (None, k))
    assert torch.equal(full(toy_tokens()), limited(toy_tokens()))


@pytest.mark.parametrize("variant", ["v1", "v2", "dca"])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_equal_weights_of_the_middle_are_one_column(variant: Any, k: int) -> None:
    """Biases alone: the score of a sum of deltas is not the sum of their scores."""
    limited = perturb(fresh(DeepCrossAttentionConfig(variant=variant, k=k)))
    full = perturb(fresh(DeepCrossAttentionConfig(variant=variant)))
    values = dict(limited.named_parameters())
    with torch.no_grad():
        for name, parameter in full.named_parameters():
            if name.endswith("score_weight"):
                parameter.zero_()
                values[name].zero_()
            elif not name.endswith("grn.bias"):
                parameter.copy_(values[name])
            else:
                columns = values[name].shape[1]
                places = [0, *(max(1, columns - age) for age in range(parameter.shape[1] - 1, 0, -1))]
                parameter.copy_(values[name][:, places])
    same(limited(toy_tokens()), full(toy_tokens()))


@pytest.mark.parametrize("k", [1, 2])
def test_dropping_the_middle_is_the_residual_only_while_there_is_none(k: int) -> None:
    for n_layers in range(1, L + 1):
        model, plain = (
            toy_decoder(config, perturbed=False, n_layers=n_layers)
            for config in (DeepCrossAttentionConfig(k=k, middle="drop"), ResidualConfig())
        )
        equal = torch.allclose(model(toy_tokens()), plain(toy_tokens()), rtol=0, atol=1e-12)
        assert equal == (n_layers + 1 <= 2 * k)


def score_gradients(config: DeepCrossAttentionConfig) -> dict[str, float]:
    model = fresh(config)
    logits = model(toy_tokens())
    found = gradients(model, (logits * noise(tuple(logits.shape), "loss")).sum())
    return {name: float(g.abs().max()) for name, g in found.items() if ".score" in name}


@pytest.mark.parametrize("variant", ["v3", "dca"])
@pytest.mark.parametrize("vector", ["shared", "per_source"])
@pytest.mark.parametrize("activation", ["gelu", "silu", "identity"])
def test_scores_are_alive_at_the_start(variant: Any, vector: Any, activation: Any) -> None:
    config = DeepCrossAttentionConfig(variant=variant, score_vector=vector, activation=activation)
    found = score_gradients(config)
    assert len(found) == L + 1 and min(found.values()) > 0
    model = fresh(config)
    assert all(declaration.dead is None for _, _, declaration in declarations(model))
    scores = [p for name, p in model.named_parameters() if name.endswith("score_weight")]
    logits = model(toy_tokens())
    for gradient in torch.autograd.grad((logits * noise(tuple(logits.shape), "loss")).sum(), scores):
        # Every way, every vector, every feature.
        assert (gradient != 0).all()


@pytest.mark.parametrize("norm", ["none", "rms"])
def test_scores_of_the_paper_are_dead_and_say_so(norm: Any) -> None:
    config = DeepCrossAttentionConfig(activation="relu", score_norm=norm)
    assert config.init_equivalence.relation == "exact"
    assert set(score_gradients(config).values()) == {0.0}
    dead = {name: d.dead for name, _, d in declarations(fresh(config)) if d.dead}
    assert dead.keys() == score_gradients(config).keys()
    assert all("relu has slope 0 at 0" in str(reason) for reason in dead.values())


def test_scores_of_the_paper_stay_dead() -> None:
    model = fresh(DeepCrossAttentionConfig(activation="relu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(5):
        optimizer.zero_grad()
        model.loss(toy_tokens(), toy_tokens(seed=1))[0].backward()
        optimizer.step()
    assert all(not p.any() for name, p in model.named_parameters() if name.endswith("score_weight"))


def test_random_scores_of_the_package_are_alive() -> None:
    config = DeepCrossAttentionConfig(activation="relu", score_norm="rms", score_std=0.01)
    assert config.init_equivalence.relation == "none"
    assert min(score_gradients(config).values()) > 0


def test_the_state_keeps_the_embedding_the_middle_and_k_deltas() -> None:
    model = fresh(DeepCrossAttentionConfig(k=2))
    run = trace(model, toy_tokens())
    assert [len(state.sources) for state in run.states[::2]] == [1, 2, 3, 4, 4, 4]
    deltas = [a + b for a, b in zip(run.updates[::2], run.updates[1::2], strict=True)]
    first, middle, *newest = run.states[-1].sources
    assert torch.equal(first, run.states[0].sources[0])
    same(middle, deltas[0] + deltas[1] + deltas[2])
    assert all(torch.equal(a, b) for a, b in zip(newest, deltas[3:], strict=True))


def test_number_of_parameters_is_the_papers_formula() -> None:
    d, blocks = 8, 6
    model, plain = (
        Decoder(decoder_config(config, n_layers=blocks)) for config in (DeepCrossAttentionConfig(k=2), ResidualConfig())
    )
    norms = 2 * d * blocks
    columns = [min(t, 4) for t in range(1, blocks + 2)]
    expected = sum(3 * (d * m + d) for m in columns[:-1]) + d * columns[-1] + d
    counts = [sum(p.numel() for p in m.parameters()) for m in (model, plain)]
    assert counts[0] - counts[1] - norms == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"variant": "v2", "activation": "relu"}, "activation='relu': must be left out, since 'v2' has no scores"),
        ({"variant": "v1", "score_std": 0.1}, "score_std=0.1: must be left out"),
        ({"middle": "drop"}, "middle='drop': must be 'sum' when k is None; set k"),
        ({"k": 0}, "k=0: must be >= 1"),
    ],
)
def test_options_that_exclude_each_other(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DeepCrossAttentionConfig(**options)


def test_separate_reads_need_a_sublayer_that_takes_them() -> None:
    sizes: dict[str, Any] = {"vocab_size": 4, "d_model": 8, "n_layers": 2, "blocks": ((FEED_FORWARD, ATTENTION),)}
    with pytest.raises(
        ConfigError, match="'deep_cross_attention' reads separate q, k and v before 'swiglu' in block 0: must be a mixer"
    ):
        DecoderConfig(**sizes, depth=DeepCrossAttentionConfig())
    Decoder.build(DecoderConfig(**sizes, depth=DeepCrossAttentionConfig(variant="v3")))
