"""Coefficients and the ledger say what parts declare and the meter finds, for every mixer, batch and length."""

from pathlib import Path

import pytest
import torch

from twoaxis.core.cost import Shape
from twoaxis.core.errors import ConfigError
from twoaxis.core.parameters import declarations
from twoaxis.depth import DEPTH, DepthConfig, ResidualConfig
from twoaxis.feed_forward import FEED_FORWARD, FeedForwardConfig
from twoaxis.ledger import lines
from twoaxis.ledger.decoder_memory import decoder_cache_bytes, decoder_saved_bytes, decoder_trace, recomputing_peak_bytes
from twoaxis.model import Decoder, DecoderConfig
from twoaxis.model.cost import decoder_cost
from twoaxis.planner import ModelShape, Precision, ledger, read_model
from twoaxis.planner.coefficients import Data, coefficients
from twoaxis.planner.formulas import counts, training_step
from twoaxis.planner.hardware import read_device
from twoaxis.planner.setting import ParallelLayout, Setting, Sharding
from twoaxis.sequence import SEQUENCE, SequenceConfig
from twoaxis.testing.toy import decoder_config

# What the planner takes from the meter, which the conformance checks hold to real passes: some of the later examples.
DEPTHS = [
    pytest.param(row.example(name), id=f"{row.kind}-{name}")
    for row in DEPTH
    for index, name in enumerate(row.examples)
    if index % 6 == 0
]
MIXERS = [
    pytest.param(row.example(name), id=f"{row.kind}-{name}")
    for table in (SEQUENCE, FEED_FORWARD)
    for row in table
    for index, name in enumerate(row.examples)
    if index % 4 == 0
]
REMEMBERED = 3
"""Tokens that the depth mixers remember at most."""

PRECISION = Precision(activations=4, cache=4)
SHAPES = [(1, 1), (1, 2), (3, 7), (2, 33), (1, 200)]


def holds(config: DecoderConfig, numbers: Data) -> None:
    """Every count of the coefficients equals what is declared or measured."""
    assert counts.parameter_counts(numbers)["all"] == decoder_cost(config, Shape(1, 1)).params
    for batch, tokens in SHAPES:
        declared = decoder_cost(config, Shape(batch, tokens, 4))
        flops = counts.forward_counts(numbers, batch, tokens)
        assert flops["all"] == declared.flops
        assert flops["pairs"] == declared.pair_flops
        # What depth mixers remember of a few tokens is counted as full from the first one on.
        if tokens >= REMEMBERED:
            assert batch * counts.cache_bytes_of(numbers, tokens, 1) == decoder_cache_bytes(config, Shape(batch, tokens, 4))


@pytest.mark.parametrize("mixer", MIXERS)
def test_counts_of_mixers_are_made_of_tokens_and_visible_pairs(mixer: SequenceConfig | FeedForwardConfig) -> None:
    config = decoder_config(mixer)
    holds(config, coefficients(ModelShape.of_decoder(config), PRECISION))


@pytest.mark.parametrize("depth", DEPTHS)
def test_counts_states_and_saved_bytes_of_depth_mixers_are_the_measured_ones(depth: DepthConfig) -> None:
    config = decoder_config(depth)
    numbers = coefficients(ModelShape.of_decoder(config), PRECISION)
    holds(config, numbers)
    states_are_measured(config, numbers)
    saved_bytes_are_measured(config, numbers)


def states_are_measured(config: DecoderConfig, numbers: Data) -> None:
    """At every boundary, and between any two."""
    states = decoder_trace(config, Shape(1, 1, 4)).states
    for index, state in enumerate(states):
        once = {tensor.number: tensor.bytes for tensor in state}
        assert counts.state_bytes(numbers, index) == sum(once.values())
        for earlier in range(index):
            before = {tensor.number for tensor in states[earlier]}
            new = sum(size for name, size in once.items() if name not in before)
            assert counts.new_state_bytes(numbers, earlier, index) == new


def saved_bytes_are_measured(config: DecoderConfig, numbers: Data) -> None:
    """But for rotation tables, and at a length behind which engines no longer pad."""
    batch, tokens = 2, 4096
    shape, last = Shape(batch, tokens, 4), config.stack.n_sublayers
    found = counts.saved_bytes_of(numbers, 0, last, batch * tokens) + counts.ends_saved_bytes(numbers, batch * tokens, 1)
    tables = {table for part in config.parts for table in part.rotations(config.d_model)}
    measured = decoder_saved_bytes(config, shape) - sum(table.saved_bytes(shape) for table in tables)
    assert found == pytest.approx(measured, rel=1e-3)


def test_the_ledger_of_a_model_is_the_sum_of_its_parts() -> None:
    config = decoder_config(DEPTH.parse("attention_residuals"), d_model=16)
    found = ledger(ModelShape.of_decoder(config), batch=2, tokens=40)
    shape = Shape(2, 40, 2)
    assert found.saved_bytes == decoder_saved_bytes(config, shape)
    assert found.recomputed_saved_bytes == recomputing_peak_bytes(config, shape)
    assert found.training_flops_per_token == 3 * decoder_cost(config, shape).flops / 80
    assert found.optimizer_bytes == 12 * found.params["all"]
    assert found.cache_bytes == decoder_cache_bytes(config, Shape(1, 40, 2))
    assert len(found.state_bytes) == config.n_layers + 1


@pytest.mark.parametrize("depth", ["residual", "mhc", "depth_attention"])
def test_muon_has_one_number_less_for_each_parameter_of_a_matrix(depth: str) -> None:
    config = decoder_config(DEPTH.parse(depth), d_model=16, tie_embeddings=False)
    with torch.device("meta"):
        tagged = [(one.numel(), declared.tag) for _, one, declared in declarations(Decoder(config))]
    matrices = sum(size for size, tag in tagged if tag == "matrix")
    adamw = ModelShape.of_decoder(config)
    muon = adamw.with_optimizer("muon")
    assert ledger(adamw, tokens=8).optimizer_bytes - ledger(muon, tokens=8).optimizer_bytes == 4 * matrices
    shardings: dict[Sharding, int] = {"none": 1, "optimizer": 2}
    for sharding, shards in shardings.items():
        layout = ParallelLayout(gpus=2 * 3, pipeline=3, data=2, microbatches=3)
        setting = Setting(read_device("h100"), layout, batch=6, tokens=8, sharding=sharding)
        run = setting.run
        before, after = (training_step.stage_memory(coefficients(one), run) for one in (adamw, muon))
        saved = sum(before["fixed"]) - sum(after["fixed"])
        assert saved == pytest.approx(4 * matrices / shards), sharding


def test_a_recipe_says_by_what_it_trains(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text('[model]\nd_model = 16\nn_layers = 2\nvocab_size = 32\n[optimizer]\nkind = "muon"\n')
    assert read_model(path).optimizer == "muon"
    path.write_text(path.read_text().replace("muon", "mouon"))
    with pytest.raises(ConfigError, match=r"optimizer='mouon': must be one of adamw, muon; correct it"):
        read_model(path)


def test_factors_of_completep_are_counted() -> None:
    heads = [[{"kind": "attention", "n_heads": 4, "head_dim": 4}, "swiglu"]]
    standard = decoder_config(ResidualConfig(), d_model=16, blocks=heads)
    config = standard.replace(parametrization="completep", base_d_model=8, base_n_layers=1)
    numbers = [coefficients(ModelShape.of_decoder(one), PRECISION) for one in (standard, config)]
    holds(config, numbers[1])
    plain, scaled = (counts.forward_counts(one, 1, 1)["all"] for one in numbers)
    assert scaled - plain == 16 * (config.stack.n_sublayers + 1)


def test_an_empty_batch_or_length_is_refused() -> None:
    model = ModelShape.of_decoder(decoder_config(ResidualConfig()))
    for batch, tokens, message in ((1, 0, "tokens=0: must be at least 1"), (0, 4, "batch=0: must be at least 1")):
        with pytest.raises(ConfigError, match=message):
            ledger(model, batch, tokens)


def test_activations_and_caches_of_one_byte_are_counted() -> None:
    model = read_model("gpt-124m")
    one, two = (ledger(model, tokens=64, precision=Precision(activations=n, cache=n)) for n in (1, 2))
    assert [2 * each for each in one.state_bytes] == list(two.state_bytes)
    assert 2 * one.cache_bytes == two.cache_bytes
    # Statistics of norms, of attention and of the loss stay in float32.
    assert one.saved_bytes < two.saved_bytes < 2 * one.saved_bytes


@pytest.mark.parametrize(
    ("weights", "activations", "expected"), [(2, 1, "bf16"), (1, 1, "fp8"), (2, 2, "bf16"), (4, 4, "fp32")]
)
def test_products_run_in_one_byte_where_weights_have_one_too(weights: int, activations: int, expected: str) -> None:
    precision = Precision(weights=weights, activations=activations)
    setting = Setting(read_device("h100"), ParallelLayout(gpus=1), batch=1, tokens=64, precision=precision)
    assert setting.number_format == expected
    assert setting.rates["flops_per_second"] > 0


def test_an_eager_form_that_is_not_counted_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ModelShape.of_decoder(decoder_config(DEPTH.parse("hyper_connections")))
    counted = ledger(model, engine="eager").depth
    assert (counted.eager_refused, ledger(model, engine="fused").depth.eager_refused) == (None, None)
    monkeypatch.setattr("twoaxis.ledger.stack.MOST_KERNELS", 10)
    lines._lines.cache_clear()
    refused = ledger(model, engine="eager").depth
    lines._lines.cache_clear()
    assert (refused.fused_bytes, refused.eager_kernels) == (counted.fused_bytes, None)
    assert refused.eager_refused is not None
    assert "'hyper_connections' must take at most 10 operations in sublayer 0" in refused.eager_refused
