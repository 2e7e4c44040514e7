"""What a study fixes before its first run: budget, decision rule, matching, companions and the search for learning rates."""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from twoaxis.core.config import Config
from twoaxis.core.errors import ConfigError, problem

Unit = Literal["tokens", "flops", "params", "seconds"]
"""What arms can be given equally much of."""

CompanionKind = Literal["static_weights", "write_only", "wider_stream", "residual_scalars", "short_swa"]
"""The generated arms that rule out another explanation of a difference."""

STEPS = "steps"
"""The key of a recipe that needs no search: dividing what may be spent by what a step costs gives it."""


class BudgetConfig(Config):
    """What a run of the control may spend, in exactly one unit, rounded up to whole steps.

    Steps and tokens give every arm the same number of steps. FLOPs and seconds give every arm the steps that it can
    afford, so a more expensive arm reads fewer tokens.

    Args:
        steps: optimizer steps.
        tokens: tokens read.
        flops: of training, by the declared costs.
        seconds: of training steps, measured before the first run.
        ladder: other budgets of the control, as multiples of its own; each is a whole schedule of its own. At least two
            of them let the control be compared at any cost between, which equal FLOPs and seconds need.
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
        """The budget in optimizer steps, the same for every arm; None when each arm has its own.

        Example:
            >>> BudgetConfig(tokens=1_000_000).in_steps(4096)
            245
        """
        return self.steps or (-(-self.tokens // tokens_per_step) if self.tokens else None)


class DecisionConfig(Config):
    """How the verdict is reached; written before the first run and stored with the study.

    Args:
        smallest_effect: the smallest mean difference that would matter, in nats per token; power is computed for it.
        alpha: the accepted chance of any false verdict in a family: the arms against the control, or against companions.
        charge: what the control is given as much of as the arm: `tokens`, `flops` or `seconds`. The other two are
            reported beside it.
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
    """How an arm is changed until it costs as much as another.

    Args:
        on: what both have equally much of: tokens, FLOPs of a run, parameters, or seconds of a run.
        by: the key of the recipe that is changed, or several that get the same value: `steps`, or a dotted path to a
            whole number such as `model.d_model` or `model.blocks.0.0.window`.
        to: the arm to match; None is the control.
        multiple_of: values that are tried are multiples of it.
        at_most: the largest value that is tried; None is four times the present one.
        tolerance: the largest relative difference that still counts as matched.
    """

    on: Unit
    by: Annotated[tuple[str, ...], BeforeValidator(_paths)] = (STEPS,)
    to: str | None = None
    multiple_of: int = Field(default=1, ge=1)
    at_most: int | None = Field(default=None, ge=1)
    tolerance: float = Field(default=0.02, gt=0)

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
    """A learning rate for every arm from a grid, with equally many trials for each and with a seed that is no replicate.

    An arm whose best rate is the first or the last of its grid gets further trials beyond that end, each by the ratio of the
    two rates at that end, until the best rate has a worse one on either side.

    Args:
        lr: the learning rates that are tried.
        seed: of the trials.
        tokens: that a trial reads, with a whole schedule of its own; None is what a run of the arm reads.
        widen: most further trials of an arm.
        arms: for an arm, a grid of its own of the same length.
    """

    lr: tuple[float, ...]
    seed: int = Field(default=1_000_003, ge=0)
    tokens: int | None = Field(default=None, ge=1)
    widen: int = Field(default=2, ge=0)
    arms: dict[str, tuple[float, ...]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _equal_trials(self) -> Self:
        for name, grid in (("lr", self.lr), *self.arms.items()):
            if len(grid) < 2 or len(set(grid)) < len(grid) or min(grid) <= 0:
                raise ConfigError(problem(name, list(grid), "at least 2 different numbers above 0", "correct the grid"))
            if len(grid) != len(self.lr):
                allowed = f"as long as lr, {len(self.lr)}, since every arm gets equally many trials"
                raise ConfigError(problem(f"arms.{name}", list(grid), allowed, "add or drop learning rates"))
        return self

    def grid(self, arm: str) -> tuple[float, ...]:
        """The learning rates that are tried for an arm."""
        return self.arms.get(arm, self.lr)
