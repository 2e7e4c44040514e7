"""Tables of tokens in the depth axis: where they are, what they train with, and what a pass without token ids says."""

from typing import Any

import pytest
import torch

from twoaxis.core.cost import Shape
from twoaxis.core.errors import ConfigError
from twoaxis.core.parameters import declarations
from twoaxis.depth import DEPTH, DepthAxis, PerLayerEmbedding, PerLayerEmbeddingConfig, ValueEmbedding, ValueEmbeddingConfig
from twoaxis.model import Decoder
from twoaxis.model.trace import sublayer_list
from twoaxis.planner.ledger import ledger
from twoaxis.planner.model.shape import ModelShape
from twoaxis.testing.toy import ATTENTION, FEED_FORWARD, VOCAB, decoder_config, noise, toy_decoder, toy_tokens
from twoaxis.train.optim import OptimizerConfig, parameter_groups

PER_LAYER = PerLayerEmbeddingConfig(d_embedding=3)


def blocks_with_tables(model: Decoder) -> list[int]:
    return [index // 2 for index, one in enumerate(sublayer_list(model)) if isinstance(one.depth, ValueEmbedding)]


@pytest.mark.parametrize(("n_layers", "expected"), [(1, [0]), (2, [1]), (3, [0, 2]), (4, [1, 3]), (5, [0, 2, 4])])
def test_every_other_block_has_a_table_and_the_last_one_always(n_layers: int, expected: list[int]) -> None:
    assert blocks_with_tables(toy_decoder(ValueEmbeddingConfig(), n_layers=n_layers)) == expected


def test_a_list_of_layers_has_the_tables_of_the_speed_run() -> None:
    config = ValueEmbeddingConfig(gate="modded", layers=(1, 2, 5, 6, 7))
    assert blocks_with_tables(toy_decoder(config, n_layers=8)) == [1, 2, 5, 6, 7]
    with pytest.raises(ConfigError, match=r"^layers=\[1, 2, 5, 6, 7\]: must be below the 7 blocks.*use 'alternate'$"):
        toy_decoder(config, n_layers=7)


def test_a_layer_without_heads_has_nothing_to_add_to() -> None:
    with pytest.raises(
        ConfigError, match=r"layers='alternate': must be blocks with a sublayer that has heads; add 'attention'"
    ):
        toy_decoder(ValueEmbeddingConfig(), blocks=((FEED_FORWARD,),))


def test_all_sublayers_with_heads_of_a_layer_have_a_table() -> None:
    model = toy_decoder(ValueEmbeddingConfig(layers=(1,)), blocks=((ATTENTION, ATTENTION, FEED_FORWARD),))
    assert [isinstance(one.depth, ValueEmbedding) for one in sublayer_list(model)] == [False] * 3 + [True, True] + [False] * 4


@torch.no_grad()
def test_rows_of_zeros_are_the_stream_alone() -> None:
    model = toy_decoder(ValueEmbeddingConfig(stream="residual_scalars"))  # type: ignore[arg-type]
    plain = toy_decoder(DEPTH.parse("residual_scalars"))
    plain.load_state_dict(
        {
            name.replace(".stream.", "."): value
            for name, value in model.state_dict().items()
            if "table" not in name and "gate_weight" not in name
        }
    )
    assert not torch.allclose(model(toy_tokens()), plain(toy_tokens()), rtol=0, atol=1e-6)
    for one in sublayer_list(model):
        if isinstance(one.depth, ValueEmbedding):
            one.depth.table.zero_()
    torch.testing.assert_close(model(toy_tokens()), plain(toy_tokens()), rtol=0, atol=1e-14)


@pytest.mark.parametrize("config", [ValueEmbeddingConfig(), PER_LAYER], ids=lambda config: config.kind)
def test_vectors_without_token_ids_are_refused_with_a_remedy(config: ValueEmbeddingConfig) -> None:
    """Gemma 4 in transformers searches its embedding for them instead, and stops where it finds none."""
    model, tokens = toy_decoder(config), toy_tokens()
    expected = model(tokens)
    embeddings = model.embed(tokens)
    with pytest.raises(ConfigError, match=rf"^{config.kind}: the layout has no token ids: must have them; pass input ids"):
        model.hidden(embeddings)
    assert torch.equal(model.logits(model.hidden(embeddings, tokens=tokens)[0]), expected)


@pytest.mark.parametrize("kind", ["value_embedding", "per_layer_embedding"])
def test_outside_a_decoder_the_tokens_are_unknown(kind: str) -> None:
    with pytest.raises(ConfigError, match=rf"^vocab_size=None: must be known to depth mixer '{kind}'; use it in a Decoder"):
        DepthAxis(kind, 8, 2)


def test_built_alone_they_take_the_size_of_the_vocabulary() -> None:
    alone = ValueEmbedding(d_model=16, n_heads=4, n_kv_heads=2, vocab_size=7)
    assert alone.table.shape == (7, 2, 4) and alone.gate_weight.shape == (2, 12)
    vectors: Any = PerLayerEmbedding(d_model=16, d_embedding=3, vocab_size=7)
    assert {name: tuple(one.shape) for name, one in vectors.named_parameters()} == {
        "table": (7, 3),
        "context_map": (3, 16),
        "gate": (3, 16),
        "output": (16, 3),
        "gain": (16,),
        "scale": (1,),
        "ends.context_gain": (3,),
    }
    with pytest.raises(ConfigError, match="per_layer_embedding: no layout, and so no token ids"):
        vectors.read(vectors.ends.enter(noise((1, 2, 16), "x"))[0])


@pytest.mark.parametrize("stream", ["hyper_connections", "denseformer", "value_residual", "residual_scalars"])
def test_a_vector_is_added_to_one_stream_only(stream: str) -> None:
    with pytest.raises(
        ConfigError, match=f"stream='{stream}': must be a depth mixer whose state is one stream; use 'residual'"
    ):
        decoder_config(PerLayerEmbeddingConfig(stream=stream))  # type: ignore[arg-type]


def test_one_mixer_around_another_around_a_third() -> None:
    """Rows of a table for values and a vector for every layer, each as it would be alone."""
    inner = ValueEmbeddingConfig(stream="laurel_gemma3n")  # type: ignore[arg-type]
    model, tokens = toy_decoder(PER_LAYER.replace(stream=inner)), toy_tokens()
    logits = model(tokens)
    logits.square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())
    mixers = [one.depth for one in sublayer_list(model)]
    assert [one.mixes_heads for one in mixers] == [True, False] * 1 + [False, False] + [True, False]


@pytest.mark.parametrize(
    ("config", "lr_scale"),
    [(ValueEmbeddingConfig(), 0.5), (ValueEmbeddingConfig(gate="modded"), 1.0), (PER_LAYER, 1.0)],
    ids=["nanochat", "modded", "per_layer_embedding"],
)
def test_tables_train_in_a_group_of_their_own_and_nothing_beside_matrices_decays(
    config: ValueEmbeddingConfig, lr_scale: float
) -> None:
    model = toy_decoder(config)
    tags = {name: declared.tag for name, _, declared in declarations(model)}
    groups = parameter_groups(model, OptimizerConfig(weight_decay=0.1))
    (tables,) = [group for group in groups if "table" in group.tags]
    assert tables.tags == ("table",) and (tables.lr_scale, tables.weight_decay) == (lr_scale, 0.0)
    assert set(tables.parameters) == {name for name in tags if name.endswith(".depth.table")}
    decayed = {tags[name] for group in groups if group.weight_decay for name in group.parameters}
    assert decayed == {"matrix", "embedding"}
    slower = OptimizerConfig.from_data({"groups": [{"pattern": "*.depth.table", "lr_scale": 0.25, "weight_decay": 0.01}]})
    (tables,) = [group for group in parameter_groups(model, slower) if "table" in group.tags]
    assert (tables.lr_scale, tables.weight_decay) == (0.25, 0.01)


@pytest.mark.parametrize("config", [ValueEmbeddingConfig(), PER_LAYER], ids=lambda config: config.kind)
def test_tables_are_counted_apart(config: ValueEmbeddingConfig) -> None:
    """All parameters, and those without tables: what a model computes with grows less than what it stores."""
    whole = decoder_config(config)
    model, stack = Decoder(whole), whole.stack
    tables = sum(p.numel() for name, p in model.named_parameters() if name.endswith(".depth.table"))
    assert tables == sum(whole.depth.cost(site, Shape(1, 1)).table_params for site in stack.sites)
    assert tables % VOCAB == 0
    counts = ledger(ModelShape.of_decoder(whole), tokens=8).params
    assert counts["all"] == sum(p.numel() for p in model.parameters())
    assert counts["tables"] == tables
    assert counts["non_embedding"] == counts["all"] - tables - model.embedding.weight.numel()
