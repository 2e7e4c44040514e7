"""Models and settings that several papers' tables are predicted with."""

from dataclasses import replace
from functools import lru_cache
from typing import Any

from twoaxis.depth import DEPTH
from twoaxis.planner.coefficients import Data, Engine, coefficients
from twoaxis.planner.formulas.counts import forward_counts, parameter_counts
from twoaxis.planner.hardware import read_device
from twoaxis.planner.model import read_model
from twoaxis.planner.model.shape import ModelShape
from twoaxis.planner.setting import ParallelLayout, Setting

PLAIN: dict[str, Any] = {"kind": "residual"}


def numbers(model: ModelShape, depth: dict[str, Any], engine: Engine = "fused") -> Data:
    """The coefficients of a model with a depth mixer, counted once."""
    mixer: Any = DEPTH.parse(depth)
    return _numbers(model, mixer, engine)


@lru_cache(maxsize=128)
def _numbers(model: ModelShape, depth: Any, engine: Engine) -> Data:
    return coefficients(model.with_depth(depth), engine=engine)


def repeated(model: Data, n_layers: int) -> Data:
    """The coefficients of a deeper model for seconds and parameters, from one of two blocks.

    Its later blocks are like the second, so the depth operation must not depend on depth.
    """
    blocks = [[sub for sub in model["sublayers"] if sub["block"] == block] for block in (0, 1)]
    sublayers = [{**sub, "block": block} for block in range(n_layers) for sub in blocks[min(block, 1)]]
    return {**model, "n_layers": n_layers, "sublayers": sublayers}


def preset(name: str, n_layers: int | None = None) -> ModelShape:
    """A shipped model, or the same with another number of its blocks."""
    model = read_model(name)
    return model if n_layers is None else replace(model, blocks=model.blocks[:1] * n_layers)


def one(device: str, batch: int, tokens: int, engine: Engine = "fused") -> Setting:
    """A single device."""
    return Setting(read_device(device), ParallelLayout(gpus=1), batch, tokens, engine=engine, sharding="none")


def step_seconds(setting: Setting, model: Data) -> float:
    """Seconds of a training step."""
    return setting.training_step(model)["step_seconds"]


def step_bytes(setting: Setting, model: Data) -> float:
    """The most bytes on one rank in training."""
    return max(setting.training_step(model)["memory_bytes"])


def prefill_seconds(setting: Setting, model: Data) -> float:
    """Seconds of one forward pass over the batch."""
    return setting.prefill(model, setting.batch, setting.tokens)["seconds"]


def params(model: Data, part: str = "all") -> int:
    """Parameters, see `parameter_counts`."""
    return parameter_counts(model)[part]


def flops(model: Data, tokens: int) -> float:
    """FLOPs of one forward pass over one sequence."""
    return forward_counts(model, 1, tokens)["all"]
