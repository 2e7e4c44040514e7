"""Retrofits compute what the model did, and say why where they cannot."""

from typing import Any

import pytest
import torch

from twoaxis.checkpoints.retrofit import convert, largest_difference, start_of, target_config, training_recipe, why_blended
from twoaxis.checkpoints.retrofit.convert import patterns
from twoaxis.core.errors import ConfigError
from twoaxis.model import Decoder, DecoderConfig
from twoaxis.train.optim import OptimizerConfig, build_optimizer, parameter_groups

from .hf_folder import random_model

BASE = DecoderConfig.from_data(
    {
        "vocab_size": 31,
        "d_model": 32,
        "n_layers": 3,
        "norm_eps": 1e-5,
        "blocks": [[{"kind": "attention", "n_heads": 4, "n_kv_heads": 2, "bias": "qkv"}, {"kind": "swiglu", "d_ff": 40}]],
    }
)

# Only an eps tells these from the plain model.
NORM = 1e-3
# Products are rounded to float32.
GAINS = 1e-6
DEPTH: list[tuple[Any, float]] = [
    ("attention_residuals", 1e-9),
    ({"kind": "attention_residuals", "block_size": 2}, 1e-9),
    ({"kind": "attention_residuals", "mixture": "mean"}, 0.1),
    ({"kind": "attention_residuals", "key_rank": 4, "schedule": "per_read"}, 1e-9),
    ("delta_attention_residuals", 1e-9),
    ({"kind": "delta_attention_residuals", "gate": "one", "block_size": 2, "running_source": "included"}, NORM),
    ("denseformer", 1e-9),
    ("muddformer", 1e-9),
    ("deep_cross_attention", 1e-9),
    ("hyper_connections", NORM),
    ("mhc", NORM),
    ({"kind": "mhc", "preset": "deepseek_v4"}, NORM),
    ("frac_connections", 1e-9),
    ("laurel", 1e-9),
    ("lime", 1e-9),
    ("value_residual", 1e-9),
    ("depth_value_mixing", 1e-9),
    ("mixture_of_depths_attention", 1e-9),
    ("value_embedding", 1e-9),
    ({"kind": "per_layer_embedding", "d_embedding": 4}, 1e-9),
    ("vertical_attention", 1e-9),
    ("residual_scalars", 1e-9),
    ({"kind": "depth_attention", "n_heads": 2}, 1e-9),
    ("deep_delta", 1e-9),
    ({"kind": "deep_delta", "gate": "two_layer"}, 1e-9),
    ("elc_bert", 1e-9),
    *(
        ({"kind": "norm_placement", "placement": each}, 1e-9)
        for each in ("sandwich", "post", "deepnorm", "keel", "reordered", "mix")
    ),
    ("residual_dual", 1e-9),
    ("siamese_norm", NORM),
    ({"kind": "siamese_norm", "form": "hybrid_pre"}, NORM),
]
SMEAR = {"kind": "smear", "gate_channels": 5}
SEQUENCE: list[Any] = [
    "short_swa",
    {"kind": "short_swa", "window": 4, "n_heads": 2, "head_dim": 8},
    "short_conv",
    "kv_shift",
    "ngram_embedding",
    {"kind": "ngram_embedding", "preset": "engram", "rows": [40], "heads": 2, "row_width": 3},
    {"kind": "ngram_embedding", "preset": "modded", "rows": [40]},
    "canon",
    {"kind": "canon", "places": "BD"},
    "local_swa",
    {"kind": "branch_swa", "places": "AB"},
    "gated_short_conv",
    "dynamic_conv",
    {"kind": "dynamic_conv", "places": "BF", "taps": "per_head", "head_dim": 4, "scale": "unit_variance"},
    # Of 3 taps, since the root of 5 is rounded in float32.
    {"kind": "canon", "places": "FG", "scale": "unit_variance", "taps_init": "identity", "kernel": 3},
    "token_shift",
    SMEAR,
]


def _name(value: Any) -> str:
    return (
        value if isinstance(value, str) else "-".join(str(part) for part in value.values()) if isinstance(value, dict) else ""
    )


@pytest.fixture(scope="module")
def base() -> Decoder:
    return random_model(BASE).double()


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.randint(31, (2, 17), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("depth", "bound"), DEPTH, ids=_name)
def test_a_depth_mixer_leaves_the_model_as_it_was(depth: Any, bound: float, base: Decoder, tokens: torch.Tensor) -> None:
    retrofit = convert(base, target_config(BASE, depth))
    difference, agreement = largest_difference(base, retrofit.model.double(), tokens)
    assert difference <= bound
    assert agreement > 0.9
    assert retrofit.new


def test_gains_make_up_for_a_factor_by_depth(base: Decoder, tokens: torch.Tensor) -> None:
    target = target_config(BASE, {"kind": "norm_placement", "placement": "layer_scaling"})
    retrofit = convert(base, target)
    assert largest_difference(base, retrofit.model.double(), tokens)[0] <= GAINS
    assert (retrofit.new, start_of(target)[0]) == ((), "exact")
    for block, factor in enumerate((1, 2**0.5, 3**0.5)):
        name = f"blocks.{block}.swiglu.norm.gain"
        torch.testing.assert_close(retrofit.model.get_parameter(name), factor * base.get_parameter(name), rtol=1e-6, atol=0)
    # Gains that are adapted already are left alone.
    again = convert(retrofit.model, target_config(target, None, ["short_swa"]))
    assert largest_difference(base, again.model.double(), tokens)[0] <= GAINS


@pytest.mark.parametrize("mixer", SEQUENCE, ids=_name)
def test_a_sequence_mixer_leaves_the_model_as_it_was(mixer: Any, base: Decoder, tokens: torch.Tensor) -> None:
    retrofit = convert(base, target_config(BASE, None, [mixer]))
    difference, agreement = largest_difference(base, retrofit.model.double(), tokens)
    assert difference <= 1e-9
    assert agreement == 1
    assert retrofit.new


def test_each_local_mixer_has_its_usual_places() -> None:
    given = ["dynamic_conv", "token_shift", {"kind": "smear", "gate_channels": 5}]
    target = target_config(BASE, None, given)
    attention, swiglu = target.blocks[0]
    found = [getattr(part, f"{place}_local") for part in (attention, swiglu) for place in ("input", "projected", "update")]
    assert [local and local.kind for local in found] == ["token_shift", "dynamic_conv", None, "token_shift", None, None]
    assert target.embedding_local is not None and target.embedding_local.kind == "smear"


def test_both_axes_at_once(base: Decoder, tokens: torch.Tensor) -> None:
    retrofit = convert(base, target_config(BASE, "muddformer", ["short_swa", "canon"]))
    assert largest_difference(base, retrofit.model.double(), tokens)[0] <= 1e-9


def test_what_is_new_is_counted(base: Decoder) -> None:
    """A DenseFormer row has a weight for each source: 2 + 3 + 4."""
    retrofit = convert(base, target_config(BASE, "denseformer"))
    assert retrofit.new_parameters == 9
    assert retrofit.new == tuple(f"blocks.{layer}.swiglu.depth.weights" for layer in range(3))


@pytest.mark.parametrize("depth", ["deep_delta", "elc_bert"])
def test_a_blend_goes_all_the_way(depth: str, base: Decoder, tokens: torch.Tensor) -> None:
    """At weight 1 the model is the method itself, which computes something else."""
    target = target_config(BASE, depth)
    blended = convert(base, target).model.double()
    unblended = convert(base, target.replace(depth={**target.depth.to_data(), "blend": "none"})).model.double()
    with torch.no_grad():
        for name, parameter in blended.named_parameters():
            if name.endswith(".blend"):
                parameter.fill_(1.0)
    assert largest_difference(unblended, blended, tokens)[0] <= 1e-9
    assert largest_difference(base, blended, tokens)[0] > 0.1
    assert why_blended(target)


def test_what_the_base_has_frozen_stays_frozen() -> None:
    base = Decoder.build(BASE)
    base.embedding.weight.requires_grad_(False)
    made = convert(base, target_config(BASE, "attention_residuals"))
    assert [name for name, parameter in made.model.named_parameters() if not parameter.requires_grad] == ["embedding.weight"]


def test_nothing_is_lost_in_silence(base: Decoder) -> None:
    with pytest.raises(ConfigError, match=r"qkv_bias' is \[64\], but \[48\] in the new model"):
        convert(base, target_config(BASE, {"kind": "value_residual", "variant": "svformer"}))


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="depth='denseformer': must be 'residual' in the model to begin with"):
        target_config(target_config(BASE, "denseformer"), "mhc")
    with pytest.raises(ConfigError, match="did you mean 'short_swa'"):
        target_config(BASE, None, ["short_sw"])
    with pytest.raises(ConfigError, match="places='AX': must be letters of ABCDEFG, each once"):
        target_config(BASE, None, [{"kind": "canon", "places": "AX"}])
    with pytest.raises(ConfigError, match="place A holds 'canon' already: must be free"):
        target_config(BASE, None, ["canon", "token_shift"])
    with pytest.raises(ConfigError, match="place E holds 'smear' already: must be free"):
        target_config(target_config(BASE, None, [SMEAR]), None, [{"kind": "canon", "places": "E"}])
    with pytest.raises(ConfigError, match="mixer=3: must be a kind"):
        target_config(BASE, None, [3])  # type: ignore[list-item]


def test_new_parameters_have_a_group_of_their_own(base: Decoder) -> None:
    retrofit = convert(base, target_config(BASE, "attention_residuals", ["short_swa"]))
    recipe = training_recipe(retrofit, new_lr_scale=7.0, base="frozen", blend_steps=5)
    groups = parameter_groups(retrofit.model, OptimizerConfig.from_data(recipe["optimizer"]))
    scales = {name: group.lr_scale for group in groups for name in group.parameters}
    assert {name for name, scale in scales.items() if scale == 7.0} == set(retrofit.new)
    assert {scale for name, scale in scales.items() if name not in retrofit.new} == {0.0}
    build_optimizer(groups, OptimizerConfig())
    asks = {name for name, parameter in retrofit.model.named_parameters() if parameter.requires_grad}
    assert asks == set(retrofit.new)


def test_a_blend_is_moved_and_not_learned(base: Decoder) -> None:
    recipe = training_recipe(convert(base, target_config(BASE, "deep_delta")), 7.0, "trained", blend_steps=5)
    assert recipe["anneal"] == [{"pattern": "*.blend", "steps": 5}]
    assert not any("blend" in group["pattern"] for group in recipe["optimizer"]["groups"])


def test_patterns_match_nothing_else() -> None:
    assert patterns(["blocks.0.x", "blocks.2.x"], ["blocks.1.x"]) == ["blocks.0.x", "blocks.2.x"]
