"""Checks of a configuration as data, and of what it builds: declared parameters that survive every way of building."""

import json
from typing import Any

import torch
from safetensors.torch import load, save

from twoaxis.core.config import Config
from twoaxis.core.errors import ConfigError
from twoaxis.core.parameters import Normal, declarations, initialise, materialize
from twoaxis.model import Decoder
from twoaxis.testing.check import check, differs, exactly, identical, require
from twoaxis.testing.toy import AxisConfig, decoder_config, toy_decoder, toy_tokens


@check
def config_round_trip(config: Config) -> None:
    """A configuration survives JSON, cannot be changed, and answers an unknown key with the nearest known one."""
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
    """A seed fixes all initial values whatever ran before, another seed changes the random ones, and a pass repeats."""
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
    """A model built on the meta device and materialised later starts where a directly built one does."""
    decoder = decoder_config(config)
    direct, model = Decoder(decoder), materialize(lambda: Decoder(decoder))
    initialise(direct, seed=3)
    with torch.no_grad():
        # What nobody initialises must show.
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
