"""Parameters that follow a schedule instead of a gradient."""

import fnmatch
from collections.abc import Sequence

import torch
from pydantic import Field
from torch import nn

from twoaxis.core.config import Config
from twoaxis.train.optim import GroupConfig, check_patterns


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

    Raises:
        ConfigError: a pattern that matches no parameter.
    """

    def __init__(self, model: nn.Module, configs: Sequence[AnnealConfig]) -> None:
        named = dict(model.named_parameters())
        check_patterns("anneal", [config.pattern for config in configs], list(named))
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
