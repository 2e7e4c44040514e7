"""Rules that a study fixes before its first run: budget, decision, matching, companions, search of learning rates."""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from twoaxis.core.config import Config
from twoaxis.core.errors import ConfigError, problem

Unit = Literal["tokens", "flops", "params", "seconds"]
"""The units in which arms can be matched."""

Matched = Literal["flops", "seconds"]
"""The costs at which ShortSWA and a wider stream can equal an arm."""

CompanionMatch = Matched | Literal["params"]
"""The costs at which a companion can equal its arm."""

CompanionKind = Literal[
    "static_weights",
    "write_only",
    "unmixed",
    "softmax_temperature",
    "qk_norm",
    "wider_stream",
    "wider_feed_forward",
    "residual_scalars",
    "short_swa",
]
"""Kinds of generated arms, each ruling out another explanation of a difference."""

TOLERANCE = 0.02
"""The largest relative difference of two costs that count as equal, unless a match says otherwise."""

STEPS = "steps"
"""The key of a recipe that needs no search: it is the budget over the cost of a step."""


class BudgetConfig(Config):
    """The budget of a run of the control, in exactly one unit.

    With steps or tokens, all arms take the same number of steps, rounded up. With FLOPs or seconds, every arm takes the whole
    number of steps that is nearest, an expensive one fewer.

    Args:
        steps: optimizer steps.
        tokens: tokens read.
        flops: of training, by the declared costs.
        seconds: of training steps, measured before the first run.
        ladder: further budgets of the control, as multiples of its own; each run has a whole schedule. At least two are
            needed to compare arms with the control at a cost that the design does not make equal.
    """

    steps: int | None = Field(default=None, ge=1)
    tokens: int | None = Field(default=None, ge=1)
    flops: float | None = Field(default=None, gt=0)
    seconds: float | None = Field(default=None, gt=0)
    ladder: tuple[float, ...] = ()

    @field_validator("ladder")
    @classmethod
    def _other_budgets(cls, budget_multiples: tuple[float, ...]) -> tuple[float, ...]:
        n = len(budget_multiples)
        if n == 1 or len(set(budget_multiples)) < n or any(not 0 < one <= 10 or one == 1 for one in budget_multiples):
            allowed = "at least two different multiples above 0, up to 10, other than 1"
            raise ConfigError(problem("ladder", list(budget_multiples), allowed, "write for example [0.5, 0.75, 1.5, 2.0]"))
        return tuple(sorted(budget_multiples))

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        got = {name: getattr(self, name) for name in ("steps", "tokens", "flops", "seconds")}
        if sum(value is not None for value in got.values()) != 1:
            given = {name: value for name, value in got.items() if value is not None}
            raise ConfigError(problem("budget", given, "one of steps, tokens, flops and seconds", "give exactly one of them"))
        return self

    def in_steps(self, tokens_per_step: int) -> int | None:
        """Converts the budget to optimizer steps; None when they differ between arms.

        Example:
            >>> BudgetConfig(tokens=1_000_000).in_steps(4096)
            245
        """
        return self.steps or (-(-self.tokens // tokens_per_step) if self.tokens else None)


class DecisionConfig(Config):
    """The decision rule, written before the first run and stored with the study.

    Args:
        smallest_effect: the smallest mean difference that would matter, in nats per token; power is computed for it.
        alpha: accepted probability of any false verdict in the family of comparisons.
        charge: the cost at which arm and control are compared: `tokens`, `flops` or `seconds`. The other two are reported
            too.
        test: `paired_t`, Student's t test of the paired differences.
        correction: `holm`, over the family.
    """

    smallest_effect: float = Field(gt=0)
    alpha: float = Field(default=0.05, gt=0, lt=0.5)
    charge: Literal["tokens", "flops", "seconds"] = "tokens"
    test: Literal["paired_t"] = "paired_t"
    correction: Literal["holm"] = "holm"


def _paths(data: Any) -> Any:
    return (data,) if isinstance(data, str) else data


class MatchConfig(Config):
    """The matching of an arm: a setting that is changed until it costs as much as another.

    Args:
        on: the matched cost: tokens, FLOPs of a run, parameters, or seconds of a run.
        by: the key of the recipe to change, or several that get the same value: `steps`, or a dotted path to a whole
            number such as `model.d_model` or `model.blocks.0.0.window`.
        to: the arm to match; None is the control.
        multiple_of: step between the values tried.
        at_most: the largest value tried; None is four times the present one.
        tolerance: the largest relative difference that counts as matched.
    """

    on: Unit
    by: Annotated[tuple[str, ...], BeforeValidator(_paths)] = (STEPS,)
    to: str | None = None
    multiple_of: int = Field(default=1, ge=1)
    at_most: int | None = Field(default=None, ge=1)
    tolerance: float = Field(default=TOLERANCE, gt=0)

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if STEPS in self.by and (len(self.by) > 1 or self.on == "params"):
            raise ConfigError(
                problem("by", list(self.by), f"a size such as 'model.d_model' to match {self.on}", "steps change no size")
            )
        return self


def _match(data: Any) -> Any:
    if not isinstance(data, str):
        return data
    return {"on": data, "by": ["model.d_model"], "multiple_of": 2} if data == "params" else {"on": data}


MatchField = Annotated[MatchConfig | None, BeforeValidator(_match)]
"""A table, or a bare unit: `params` is then matched by the width, everything else by the steps."""


class TuningConfig(Config):
    """A search of the learning rate of every arm, with equally many trials and a seed that is no replicate.

    While the best rate of an arm is the first or last of its grid, further trials extend the grid at that end, by the ratio
    of the two rates there.

    Args:
        lr: the grid of learning rates.
        seed: of the trials.
        tokens: per trial, with a whole schedule; None is as many as a run of the arm.
        widen: the largest number of further trials of an arm.
        arms: grids of single arms, of the same length.
    """

    lr: tuple[float, ...]
    seed: int = Field(default=1_000_003, ge=0)
    tokens: int | None = Field(default=None, ge=1)
    widen: int = Field(default=2, ge=0)
    arms: dict[str, tuple[float, ...]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _equal_trials(self) -> Self:
        for name, grid in (("lr", self.lr), *self.arms.items()):
            # Trials are named by six digits, and grids extended by rates of three.
            if len(grid) < 2 or len({f"{lr:.3g}" for lr in grid}) < len(grid) or min(grid) <= 0:
                allowed = "at least 2 numbers above 0 that differ in their first three digits"
                raise ConfigError(problem(name, list(grid), allowed, "correct the grid"))
            if len(grid) != len(self.lr):
                allowed = f"as long as lr, {len(self.lr)}, since every arm gets equally many trials"
                raise ConfigError(problem(f"arms.{name}", list(grid), allowed, "add or drop learning rates"))
        return self

    def grid(self, arm: str) -> tuple[float, ...]:
        """The grid of learning rates of an arm."""
        return self.arms.get(arm, self.lr)
