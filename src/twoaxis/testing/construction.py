"""Checks of the configuration, of declared parameters, and of the relation to the plain model at initialisation."""

import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from twoaxis.core.config import Config
from twoaxis.core.design import InitEquivalence
from twoaxis.core.errors import ConfigError
from twoaxis.core.parameters import Normal, declarations, initialise, materialize
from twoaxis.core.position import SublayerInfo
from twoaxis.depth import DepthConfig, ResidualConfig
from twoaxis.local import LocalConfig
from twoaxis.model import Decoder, DecoderConfig
from twoaxis.model.block import sublayer_names
from twoaxis.sequence import SequenceConfig
from twoaxis.testing.conformance import check, close, differs, exactly, identical, require
from twoaxis.testing.measured import gradients
from twoaxis.testing.toy import (
    D_MODEL,
    FEED_FORWARD,
    AxisConfig,
    decoder_config,
    hostile_initialisation,
    noise,
    toy_context,
    toy_decoder,
    toy_layout,
    toy_site,
    toy_tokens,
)

TINY_EPS = 1e-20
"""A norm eps so small that a scale before the norm has no effect."""

Pass = Callable[[nn.Module], None]


@check
def init_equivalence(config: DepthConfig) -> None:
    """The fresh model relates to the plain pre-norm model with the same shared parameters as declared."""
    _depth_relation(config, _nothing)


@check
def init_survives_host(config: DepthConfig) -> None:
    """The declared relation still holds after a host has overwritten every nn.Linear and nn.Embedding."""
    _depth_relation(config, hostile_initialisation)


@check
def sublayer_init_equivalence(config: SequenceConfig) -> None:
    """The fresh model relates to the same model without this sublayer as declared."""
    plain = decoder_config(ResidualConfig(), norm_eps=TINY_EPS, blocks=((FEED_FORWARD,),))
    _relation(config.init_equivalence, plain.replace(blocks=((config, FEED_FORWARD),)), plain, _nothing)


@check
def local_init_equivalence(config: LocalConfig) -> None:
    """The fresh mixer is the identity exactly if it declares so, and trains from there."""
    mixer: Any = config.build(D_MODEL, toy_site()).double()
    initialise(mixer, 0)
    x = toy_context()
    y, _ = mixer(x, toy_layout(x))
    if config.init_equivalence.relation == "none":
        differs("output, with init_equivalence none", y, x, "init_none")
        return
    close("output, with init_equivalence exact", y, x, "init_exact")
    found = gradients(mixer, (y * noise(tuple(y.shape), "loss weights")).sum())
    require(any(float(gradient.abs().max()) > 0 for gradient in found.values()), "gradients: all 0, some must not be")


def _depth_relation(config: DepthConfig, host: Pass) -> None:
    own = decoder_config(config, norm_eps=TINY_EPS)
    _relation(config.init_equivalence, own, own.replace(depth=ResidualConfig()), host)


def _relation(declared: InitEquivalence, own: DecoderConfig, plain: DecoderConfig, host: Pass) -> None:
    require(bool(declared.reason.strip()), "init_equivalence: gives no reason, must give one sentence")
    model = Decoder.build(own).double()
    host(model)
    reference = _reference(plain, host)  # type: ignore[arg-type]
    values = dict(model.named_parameters())
    scaled = _scaled_sublayers(own)
    for name, shared in reference.parameters.items():
        here = _name_here(name, model, may_lack=declared.relation == "none")
        if here is None or (declared.relation == "none" and values[here].shape != shared.shape):
            # A mixer may replace a projection or a norm, and then cannot equal the plain model.
            continue
        if name.startswith(scaled) and shared.ndim > 1:
            got, expected = (nn.functional.normalize(each.detach(), dim=-1) for each in (values[here], shared))
            close(f"rows of {name} at the same seed, up to a factor", got, expected, "same_draws")
            continue
        identical(f"{name} at the same seed", values[here], shared)
    got, got_gradients = _logits_and_gradients(model)
    for name in list(got_gradients):
        # The norms of separate views start equal to one norm, whose gradient is the sum of theirs.
        owner, _, parameter = name.rpartition(".")
        if owner.endswith((".key_norm", ".value_norm")):
            got_gradients[f"{owner.rpartition('.')[0]}.norm.{parameter}"] += got_gradients[name]
    expected, expected_gradients = reference.logits, reference.gradients
    if declared.relation == "none":
        differs("logits, with init_equivalence none", got, expected, "init_none")
        return
    budget = {"exact": "init_exact", "up_to_norm": "init_up_to_norm"}[declared.relation]
    close(f"logits, with init_equivalence {declared.relation}", got, expected, budget)
    for name, gradient in expected_gradients.items():
        here = _name_here(name, model, may_lack=False) or name
        close(f"gradient of {name}", got_gradients[here], gradient, "init_up_to_norm")
    if declared.relation == "up_to_norm":
        _differs_by_scale_only_at_tiny_eps(own, plain)


def _name_here(name: str, model: Decoder, may_lack: bool) -> str | None:
    """The parameter that one of the plain model is; None for a norm before a sublayer that the depth mixer does without."""
    names = {own for own, _ in model.named_parameters()}
    owner = name.removesuffix(".norm.gain")
    if name in names or owner == name or not isinstance(model.get_submodule(f"{owner}.norm"), nn.Identity):
        require(name in names, f"{name}: missing, but the plain model has it")
        return name
    # The norm is part of the depth mixer.
    moved = f"{owner}.depth.input_gain"
    require(may_lack or moved in names, f"{name}: missing, and so is {moved}, but the plain model has the norm")
    return moved if moved in names else None


def _scaled_sublayers(config: DecoderConfig) -> tuple[str, ...]:
    """The prefixes of sublayers whose initial matrices the depth mixer scales."""
    names = (name for block in config.layers for name in sublayer_names(block))
    scaled = ((site, name) for site, name in zip(config.stack.sites, names, strict=True) if _scales(site.slot))
    return tuple(f"blocks.{site.block}.{name}.mixer." for site, name in scaled)


def _scales(slot: SublayerInfo) -> bool:
    return slot.output_scale is not None or slot.hidden_scale != 1


class _Reference(NamedTuple):
    parameters: dict[str, nn.Parameter]
    logits: Tensor
    gradients: dict[str, Tensor]


@lru_cache(maxsize=8)
def _reference(plain: DecoderConfig, host: Pass) -> _Reference:
    """The plain model, which is the same for every mixer of an axis."""
    model = Decoder.build(plain).double()
    host(model)
    logits, found = _logits_and_gradients(model)
    return _Reference(dict(model.named_parameters()), logits.detach(), found)


def _differs_by_scale_only_at_tiny_eps(own: DecoderConfig, plain: DecoderConfig) -> None:
    """With a large eps the models must differ, or `exact` should have been declared."""
    tokens = toy_tokens()
    got, expected = (Decoder.build(config.replace(norm_eps=1e-2)).double()(tokens) for config in (own, plain))
    require(not torch.allclose(got, expected, rtol=0, atol=1e-12), "init_equivalence: up_to_norm, but it is exact at any eps")


def _logits_and_gradients(model: Decoder) -> tuple[Tensor, dict[str, Tensor]]:
    logits = model(toy_tokens())
    exactly("logits: finite", bool(logits.isfinite().all()), True)
    return logits, gradients(model, (logits * noise(tuple(logits.shape), "loss weights")).sum())


def _nothing(model: nn.Module) -> None:
    """Leaves the model unchanged."""


@check
def config_round_trip(config: Config) -> None:
    """A configuration survives JSON, is frozen, and suggests the nearest known key for an unknown one."""
    again = type(config).from_data(json.loads(json.dumps(config.to_data())))
    exactly("configuration read back from JSON", again, config)
    name = list(type(config).model_fields)[-1]
    try:
        setattr(config, name, getattr(config, name))
    except Exception:
        pass
    else:
        require(False, f"setting {name}: accepted, must be frozen")
    try:
        type(config).from_data({**config.to_data(), f"{name}x": 1})
    except ConfigError as error:
        words = f"did you mean {name!r}?"
        require(words in str(error) and "\n" not in str(error), f"unknown key {name}x: says {error}, must say {words}")
    else:
        require(False, f"unknown key {name}x: accepted, must be a ConfigError")


@check
def parameters_are_declared(config: AxisConfig) -> None:
    """Every parameter declares its initial value and tag, and has at least one dimension, so that it can be sharded."""
    model = toy_decoder(config)
    declared = list(declarations(model))
    exactly("declared parameters", len(declared), len(list(model.parameters())))
    for name, parameter, declaration in declared:
        require(parameter.ndim >= 1, f"{name}: ndim {parameter.ndim}, must be at least 1")
        require(declaration.dead is None or bool(declaration.dead.strip()), f"{name}: declared dead without a reason")
    exactly("persistent buffers", sorted(set(model.state_dict()) - {name for name, _, _ in declared}), [])


@check
def deterministic_for_seed(config: AxisConfig) -> None:
    """A seed determines all initial values, another seed changes the random ones, and a second pass equals the first."""
    first = toy_decoder(config, perturbed=False, seed=1)
    torch.rand(3)
    again, other = (toy_decoder(config, perturbed=False, seed=seed) for seed in (1, 2))
    for (name, a, declaration), b, c in zip(declarations(first), again.parameters(), other.parameters(), strict=True):
        identical(f"{name} of the same seed", b, a)
        if isinstance(declaration.init, Normal):
            differs(f"{name} of another seed", c, a)
    tokens = toy_tokens()
    model = toy_decoder(config)
    identical("logits of a second pass", model(tokens), model(tokens))


@check
def meta_init_equals_direct(config: AxisConfig) -> None:
    """A model that is built on the meta device and materialised later has the initial values of a directly built one."""
    decoder = decoder_config(config)
    direct, model = Decoder(decoder), materialize(lambda: Decoder(decoder))
    initialise(direct, seed=3)
    with torch.no_grad():
        # Uninitialised values become NaN.
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(torch.nan if tensor.is_floating_point() else 0)
    initialise(model, seed=3)
    for (name, got), expected in zip(model.named_parameters(), direct.parameters(), strict=True):
        identical(name, got, expected)
    tokens = toy_tokens()
    identical("logits", model(tokens), direct(tokens))


@check
def checkpoint_round_trip(config: AxisConfig) -> None:
    """The weights survive safetensors into a model of another seed, key by key, and a missing key is an error."""
    model = toy_decoder(config)
    state = load(save(model.state_dict()))
    exactly("keys of the checkpoint", sorted(state), sorted(name for name, _, _ in declarations(model)))
    other = toy_decoder(config, perturbed=False, seed=5)
    other.load_state_dict(state, strict=True)
    tokens = toy_tokens()
    identical("logits after loading", other(tokens), model(tokens))
    missing: Any = dict(list(state.items())[1:])
    try:
        other.load_state_dict(missing, strict=True)
    except RuntimeError:
        return
    require(False, "a checkpoint without its first key: loaded, must be an error")
