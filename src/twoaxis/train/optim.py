"""AdamW, with parameter groups derived from the declared tag of each parameter."""

import fnmatch
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import Field, field_validator
from torch import nn

from twoaxis.core.config import Config
from twoaxis.core.errors import ConfigError, nearest, problem
from twoaxis.core.parameters import Tag, declarations

DECAYED: frozenset[Tag] = frozenset({"matrix", "embedding"})
"""Tags with weight decay; norms, biases, gates, queries and mixing weights have none, and parameters may decline it."""


class GroupConfig(Config):
    """Options for the parameters whose name matches a pattern; the last match wins.

    Args:
        pattern: matches whole parameter names, with `*`, `?` and `[...]`, such as `*.pseudo_query`.
        lr_scale: factor on the learning rate in place of the declared one; None leaves it; 0 freezes: no gradient and no
            optimizer state.
        weight_decay: replaces the default one; None leaves it.
    """

    pattern: str = Field(min_length=1)
    lr_scale: float | None = Field(default=None, ge=0)
    weight_decay: float | None = Field(default=None, ge=0)


class OptimizerConfig(Config):
    """AdamW.

    Args:
        lr: learning rate after the warm-up.
        betas: decay rates of the two moments.
        eps: added to the root of the second moment.
        weight_decay: of matrices and embeddings, times the learning rate per step.
        clip_norm: largest norm of the whole gradient; None or infinity does not clip.
        groups: options by parameter name.

    Source: Decoupled Weight Decay Regularization, arXiv:1711.05101, algorithm 2.
    """

    lr: float = Field(default=1e-3, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    clip_norm: float | None = Field(default=1.0, gt=0, allow_inf_nan=True)
    groups: tuple[GroupConfig, ...] = ()

    @field_validator("clip_norm")
    @classmethod
    def _finite(cls, clip_norm: float | None) -> float | None:
        # JSON has no infinity.
        return None if clip_norm == math.inf else clip_norm

    @field_validator("betas")
    @classmethod
    def _decay_rates(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ConfigError(problem("betas", betas, "at least 0 and below 1", "write for example [0.9, 0.95]"))
        return betas


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters by full name with the same optimizer options, and their declared tags, sorted."""

    lr_scale: float
    weight_decay: float
    tags: tuple[Tag, ...]
    parameters: dict[str, nn.Parameter]


def parameter_groups(model: nn.Module, config: OptimizerConfig) -> list[ParameterGroup]:
    """Puts every parameter of the model into exactly one group.

    A parameter that requires no gradient stays frozen.

    Raises:
        ConfigError: a pattern that matches no parameter.
    """
    declared = list(declarations(model))
    check_patterns("optimizer.groups", [change.pattern for change in config.groups], [name for name, _, _ in declared])
    members: dict[tuple[float, float], dict[str, nn.Parameter]] = {}
    tags: dict[tuple[float, float], set[Tag]] = {}
    for name, parameter, declaration in declared:
        decays = declaration.tag in DECAYED and declaration.decays
        lr_scale, weight_decay = declaration.lr_scale, config.weight_decay if decays else 0.0
        for change in config.groups:
            if fnmatch.fnmatchcase(name, change.pattern):
                lr_scale = lr_scale if change.lr_scale is None else change.lr_scale
                weight_decay = weight_decay if change.weight_decay is None else change.weight_decay
        lr_scale = lr_scale if parameter.requires_grad else 0.0
        members.setdefault((lr_scale, weight_decay), {})[name] = parameter
        tags.setdefault((lr_scale, weight_decay), set()).add(declaration.tag)
    return [ParameterGroup(*key, tuple(sorted(tags[key])), members[key]) for key in members]


def group_table(groups: Iterable[ParameterGroup]) -> str:
    """The groups as text, one line each."""
    lines = [f"{'weight decay':>12}  {'lr scale':>8}  {'tensors':>7}  {'parameters':>12}  what"]
    for group in groups:
        count = sum(parameter.numel() for parameter in group.parameters.values())
        sizes = f"{group.weight_decay:>12g}  {group.lr_scale:>8g}  {len(group.parameters):>7}  {count:>12,}"
        lines.append(f"{sizes}  {', '.join(group.tags)}")
    return "\n".join(lines)


def build_optimizer(groups: Iterable[ParameterGroup], config: OptimizerConfig) -> torch.optim.AdamW:
    """Builds AdamW over the groups, fused where the device and the dtype support it.

    Groups with an `lr_scale` of 0 are frozen: their parameters no longer require a gradient.

    Raises:
        ConfigError: all groups are frozen.
    """
    groups = list(groups)
    trained = [group for group in groups if group.lr_scale]
    if not trained:
        raise ConfigError(
            "optimizer: every parameter is frozen: must leave one to train; give some an lr_scale above 0 in optimizer.groups, "
            "or let them require gradients"
        )
    for group in groups:
        if not group.lr_scale:
            for parameter in group.parameters.values():
                parameter.requires_grad_(False)
    options: list[dict[str, Any]] = []
    for group in trained:
        lr = config.lr * group.lr_scale
        parameters = list(group.parameters.values())
        options.append({"params": parameters, "lr": lr, "weight_decay": group.weight_decay, "full_lr": lr})
    every = (parameter for group in trained for parameter in group.parameters.values())
    fused = all(parameter.is_floating_point() and parameter.device.type in ("cpu", "cuda") for parameter in every)
    return torch.optim.AdamW(options, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)


def set_learning_rate(optimizer: torch.optim.Optimizer, multiplier: float) -> None:
    """Sets the learning rate of every group to its full value times the multiplier."""
    for group in optimizer.param_groups:
        group["lr"] = group["full_lr"] * multiplier


def check_patterns(where: str, patterns: Iterable[str], names: list[str]) -> None:
    """Refuses patterns without a match.

    Raises:
        ConfigError: a pattern that matches no parameter.
    """
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ConfigError(
                f"{where} pattern {pattern!r} matches no parameter of this model; {nearest(pattern, _endings(names))}"
            )


def _endings(names: list[str]) -> set[str]:
    """Patterns that match: the last one or two parts of each name."""
    parts = [name.split(".") for name in names]
    return {"*." + ".".join(part[-length:]) for part in parts for length in (1, 2) if len(part) > length}
