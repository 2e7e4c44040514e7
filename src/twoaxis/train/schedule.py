"""Schedules of a recipe, pure functions of the step: learning rates, and parameters that no gradient moves."""

import fnmatch
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from pydantic import BeforeValidator, Field, SerializeAsAny
from torch import nn

from twoaxis.core.config import Config
from twoaxis.core.errors import ConfigError, problem
from twoaxis.core.registry import Row, Table
from twoaxis.train.optim import GroupConfig, check_patterns


class ScheduleConfig(Config, ABC):
    """A learning-rate schedule: a linear warm-up, then the curve of its kind.

    Args:
        warmup_steps: steps until the full learning rate; None is a twentieth of the run.
    """

    warmup_steps: int | None = Field(default=None, ge=0)

    def multiplier(self, step: int, steps: int) -> float:
        """The factor on the learning rate at a step counted from 0, in a run of `steps`.

        Example:
            >>> [round(CosineConfig(warmup_steps=2, min_ratio=0).multiplier(step, 6), 3) for step in range(6)]
            [0.5, 1.0, 1.0, 0.854, 0.5, 0.146]
        """
        warmup = self.warmup(steps)
        return (step + 1) / warmup if step < warmup else self.after_warmup(step, warmup, steps)

    def warmup(self, steps: int) -> int:
        """The length of the warm-up in steps."""
        return math.ceil(steps / 20) if self.warmup_steps is None else self.warmup_steps

    def check(self, steps: int) -> None:
        """Refuses a run that ends before its warm-up.

        Raises:
            ConfigError: the warm-up is longer than the run.
        """
        if self.warmup(steps) > steps:
            raise ConfigError(
                problem("schedule.warmup_steps", self.warmup_steps, f"at most steps={steps}", "warm up for fewer steps")
            )

    @abstractmethod
    def after_warmup(self, step: int, warmup: int, steps: int) -> float:
        """The factor at a step after the warm-up."""


class ConstantConfig(ScheduleConfig):
    """Keeps the full learning rate after the warm-up."""

    kind: Literal["constant"] = "constant"

    def after_warmup(self, step: int, warmup: int, steps: int) -> float:
        """One."""
        del step, warmup, steps
        return 1.0


class CosineConfig(ScheduleConfig):
    """Decays along half a cosine from 1 to `min_ratio` at the end of the run.

    Equation: m = r + (1 - r) (1 + cos(pi (s - w) / (S - w))) / 2 for warm-up w, S steps and min_ratio r
    Source:   SGDR, arXiv:1608.03983, eq. 5, without restarts
    """

    kind: Literal["cosine"] = "cosine"
    min_ratio: float = Field(default=0.1, ge=0, le=1)

    def after_warmup(self, step: int, warmup: int, steps: int) -> float:
        """The cosine."""
        progress = (step - warmup) / max(1, steps - warmup)
        return self.min_ratio + (1 - self.min_ratio) * (1 + math.cos(math.pi * progress)) / 2


class WSDConfig(ScheduleConfig):
    """Warm-up, stable, decay: the full rate, then linear decay to `min_ratio` at the end of the run.

    Args:
        warmup_steps: steps until the full learning rate; None is a twentieth of the run.
        min_ratio: the factor at the end.
        decay_fraction: the fraction of the run that decays.

    Equation: m = r + (1 - r) (S - s) / d in the last d steps of S, 1 before, with min_ratio r
    Source:   MiniCPM, arXiv:2404.06395, section 4.2, with a linear decay
    """

    kind: Literal["wsd"] = "wsd"
    min_ratio: float = Field(default=0.0, ge=0, le=1)
    decay_fraction: float = Field(default=0.2, ge=0, le=1)

    def after_warmup(self, step: int, warmup: int, steps: int) -> float:
        """One, then the linear decay."""
        decay = min(round(steps * self.decay_fraction), steps - warmup)
        return 1.0 if step < steps - decay else self.min_ratio + (1 - self.min_ratio) * (steps - step) / decay


SCHEDULES: Table[ScheduleConfig] = Table(
    "schedule",
    ScheduleConfig,
    "twoaxis.schedules",
    [
        Row(CosineConfig, "warm-up, then half a cosine", {"default": {}}),
        Row(WSDConfig, "warm-up, stable, linear decay", {"default": {}}),
        Row(ConstantConfig, "warm-up, then constant", {"default": {}}),
    ],
)
"""The kinds of schedule; other packages add rows through the entry point `twoaxis.schedules`."""

ScheduleField = Annotated[SerializeAsAny[ScheduleConfig], BeforeValidator(SCHEDULES.parse)]
"""The type of a configuration field that holds a schedule."""


class AnnealConfig(Config):
    """Moves every entry of some parameters linearly from one value to another.

    Args:
        pattern: matches whole parameter names, with `*`, `?` and `[...]`, such as `*.blend`.
        start: the value up to step `begin`.
        stop: the value from step `begin + steps` on.
        begin: steps before the first move.
        steps: from the first value to the last.

    Example:
        >>> [AnnealConfig(pattern="*.blend", steps=2).value(step) for step in range(4)]
        [0.0, 0.5, 1.0, 1.0]
    """

    pattern: str = Field(min_length=1)
    start: float = 0.0
    stop: float = 1.0
    begin: int = Field(default=0, ge=0)
    steps: int = Field(ge=1)

    def value(self, step: int) -> float:
        """The value during the step counted from 0."""
        return self.start + (self.stop - self.start) * min(1.0, max(0, step - self.begin) / self.steps)

    @property
    def group(self) -> GroupConfig:
        """The parameter group that excludes these parameters from the optimizer."""
        return GroupConfig(pattern=self.pattern, lr_scale=0.0)


class Annealing:
    """The annealed parameters of a model. Their values depend on the step alone, so a resumed run restores nothing.

    Args:
        model: or the part of one that this process holds.
        configs: what to anneal.
        names: of all parameters of the whole model; None is those of `model`.

    Raises:
        ConfigError: a pattern that matches no parameter.
    """

    def __init__(self, model: nn.Module, configs: Sequence[AnnealConfig], names: Sequence[str] | None = None) -> None:
        named = dict(model.named_parameters())
        check_patterns("anneal", [config.pattern for config in configs], list(named) if names is None else list(names))
        self._annealed = [
            (config, [parameter for name, parameter in named.items() if fnmatch.fnmatchcase(name, config.pattern)])
            for config in configs
        ]

    @torch.no_grad()
    def set(self, step: int) -> None:
        """Sets the parameters to their values for the step counted from 0."""
        for config, parameters in self._annealed:
            for parameter in parameters:
                parameter.fill_(config.value(step))
