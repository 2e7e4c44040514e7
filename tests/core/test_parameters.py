from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from twoaxis import DEPTH, FEED_FORWARD, LOCAL, SEQUENCE, ConfigError, Decoder, DecoderConfig
from twoaxis.core.parameters import (
    Constant,
    DeclaredModule,
    Normal,
    Striped,
    Uniform,
    Values,
    declarations,
    initialise,
    materialize,
    matrix_std,
)
from twoaxis.depth import AttentionResidualsConfig, DeepDelta, DeepDeltaConfig, DepthAxis, DepthConfig
from twoaxis.local import LocalConfig
from twoaxis.sequence import ShortSWA, ShortSWAConfig
from twoaxis.testing.toy import D_MODEL, decoder_config, toy_site

SIZES = {"vocab_size": 64, "d_model": 32, "n_layers": 2}
ATTENTION = {"kind": "attention", "n_heads": 2}
SHORT = {"kind": "short_swa", "n_heads": 2}


def values(seed: int = 0, **changes: object) -> dict[str, torch.Tensor]:
    config = DecoderConfig.from_data({**SIZES, "blocks": [[ATTENTION, "swiglu"]], **changes})
    return dict(Decoder.build(config, seed).named_parameters())


@pytest.mark.parametrize(
    "changes",
    [
        {"depth": "deep_delta"},
        {"depth": "attention_residuals"},
        {"tie_embeddings": False},
        {"blocks": [[SHORT, ATTENTION, "swiglu"]]},
        {"blocks": [[ATTENTION, "gelu"]]},
        {"blocks": [[{**ATTENTION, "window": 3, "qk_norm": "before_rope"}, "swiglu"]]},
    ],
    ids=str,
)
def test_models_that_share_a_parameter_share_its_start(changes: dict) -> None:
    plain, other = values(), values(**changes)
    shared = plain.keys() & other.keys()
    assert {"embedding.weight", "blocks.1.attention.mixer.qkv.weight", "blocks.0.attention.norm.gain"} <= shared
    assert all(torch.equal(plain[name], other[name]) for name in shared)


def test_the_seed_changes_every_random_value() -> None:
    same, other = values(seed=0), values(seed=1)
    assert all(torch.equal(value, same[name]) for name, value in values(seed=0).items())
    assert {name for name in same if torch.equal(same[name], other[name])} == {name for name in same if name.endswith("gain")}


def test_parameters_of_one_model_differ() -> None:
    start = values()
    assert not torch.equal(start["blocks.0.attention.mixer.qkv.weight"], start["blocks.1.attention.mixer.qkv.weight"])


def test_the_global_generator_is_neither_read_nor_moved() -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = values()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert all(torch.equal(value, first[name]) for name, value in values().items())


@pytest.fixture
def garbage() -> Iterator[None]:
    """Memory that is new holds NaN, so that a value that nobody sets shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def constructed(config: Any) -> nn.Module:
    """What the configuration builds, with the values of its construction."""
    torch.manual_seed(3)
    if isinstance(config, DepthConfig):
        return Decoder(decoder_config(config, n_layers=2))
    return config.build(D_MODEL, toy_site()) if isinstance(config, LocalConfig) else config.build(toy_site())


@pytest.mark.parametrize("row", [*DEPTH, *SEQUENCE, *FEED_FORWARD, *LOCAL], ids=lambda row: row.kind)
def test_a_module_has_the_values_that_it_declares_when_it_is_constructed(row: Any, garbage: None) -> None:
    # Caught: constructors that leave memory as it was.
    for example in row.examples:
        module = constructed(row.example(example))
        again = dict(constructed(row.example(example)).named_parameters())
        first = {name: parameter.clone() for name, parameter in module.named_parameters()}
        initialise(module, seed=0)
        for name, seeded, declaration in declarations(module):
            found, init = first[name], declaration.init
            assert found.isfinite().all() and torch.equal(again[name], found), name
            if isinstance(init, Constant | Values | Striped):
                assert torch.equal(found, seeded), name
            else:
                assert not torch.equal(found, seeded), name
                low, high = sorted((found.square().mean().sqrt().item(), seeded.square().mean().sqrt().item()))
                assert found.numel() < 32 or high < 2 * low, name


def test_what_is_constructed_can_be_used_at_once(garbage: None) -> None:
    x = torch.randn(1, 4, 32)
    delta, swa = DeepDelta(DeepDeltaConfig(), 32), ShortSWA(ShortSWAConfig(n_heads=2), 32)
    axis = DepthAxis(AttentionResidualsConfig(block_size=2), 32, 3)
    state = axis.enter(x)
    for mixer in axis.mixers:
        state = mixer(state, lambda context: context, torch.tanh)
    logits = Decoder(DecoderConfig.from_data(SIZES))(torch.tensor([[1, 2, 3]]))
    for y in (delta(x, torch.tanh, torch.sin), swa(x)[0], axis.leave(state), logits):
        assert isinstance(y, torch.Tensor) and y.isfinite().all() and y.any()


def test_materialized_modules_take_memory_and_no_random_numbers() -> None:
    state = torch.get_rng_state()
    config = DecoderConfig.from_data({**SIZES, "depth": "deep_delta", "tie_embeddings": False})
    model = materialize(lambda: Decoder(config))
    assert torch.equal(torch.get_rng_state(), state) and not any(p.is_meta for p in model.parameters())
    with torch.device("meta"):
        assert all(parameter.is_meta for parameter in Decoder.build(config).parameters())
    Decoder(config)
    assert not torch.equal(torch.get_rng_state(), state)


def test_declared_maps_have_the_exact_class_that_tools_look_for() -> None:
    maps = [module for module in Decoder.build(decoder_config(DeepDeltaConfig())).modules() if isinstance(module, nn.Linear)]
    assert maps and {type(module) for module in maps} == {nn.Linear}


def test_meta_then_materialised_equals_built() -> None:
    config = DecoderConfig.from_data({**SIZES, "blocks": [[ATTENTION, "swiglu"]], "depth": "attention_residuals"})
    with torch.device("meta"):
        model = Decoder(config)
    assert all(parameter.is_meta for parameter in model.parameters())
    model.to_empty(device="cpu")
    initialise(model, seed=0)
    for name, parameter in Decoder.build(config, seed=0).named_parameters():
        assert torch.equal(parameter, model.get_parameter(name))


def test_declared_standard_deviations_and_constants_are_met() -> None:
    model = Decoder.build(DecoderConfig.from_data({**SIZES, "blocks": [[ATTENTION, "swiglu"]], "depth": "deep_delta"}))
    for name, parameter, declaration in declarations(model):
        if isinstance(declaration.init, Constant):
            assert (parameter == declaration.init.value).all(), name
        else:
            assert isinstance(declaration.init, Normal), name
            standardised = parameter / declaration.init.std
            assert abs(standardised.mean()) < 5 / parameter.numel() ** 0.5, name
            assert abs(standardised.std() - 1) < 5 / (2 * parameter.numel()) ** 0.5, name
    assert matrix_std(625) == 0.02


def test_every_parameter_has_a_dimension() -> None:
    # Case A13: a parameter without dimensions cannot be sharded.
    for depth in ("residual", "residual_scalars", "attention_residuals", "deep_delta"):
        assert all(value.ndim >= 1 for value in values(depth=depth).values())


class Careless(DeclaredModule):
    def __init__(self, *, extra: bool) -> None:
        super().__init__()
        known = self.parameter("known", (2,), Normal(1.0), "gate")
        if extra:
            self.known = known
            self.extra = nn.Parameter(torch.empty(3))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (
            True,
            r"^parameter '0.extra' declares no initial value and no tag; create it with self.parameter, which asks for both$",
        ),
        (False, r"^parameter '0.known' is declared but does not exist; assign it to the attribute of its name$"),
    ],
)
def test_parameters_and_declarations_belong_together(extra: bool, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        initialise(nn.Sequential(Careless(extra=extra)), seed=0)


def test_shared_parameters_appear_once() -> None:
    names = [name for name, _, _ in declarations(Decoder(DecoderConfig.from_data({**SIZES, "tie_embeddings": True})))]
    assert len(names) == len(set(names)) and "head.weight" not in names


def test_uniform_and_given_values_are_met() -> None:
    module = DeclaredModule()
    module.spread = module.parameter("spread", (4000,), Uniform(0.5), "mixing")
    module.given = module.parameter("given", (2, 2), Values((1.0, 0.0, 0.0, 1.0)), "mixing")
    initialise(module, seed=0)
    assert module.spread.abs().max() <= 0.5
    assert abs(module.spread.std() - 0.5 / 3**0.5) < 0.01
    assert torch.equal(module.given, torch.eye(2))
