"""The design of a study: its question, arms, replicates, budget and decision rule, all fixed before the first run."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from twoaxis.core.config import Config
from twoaxis.core.config_file import read_config_file
from twoaxis.core.errors import ConfigError, StudyError, nearest, problem
from twoaxis.core.overrides import apply_overrides
from twoaxis.study.overlay import overlay
from twoaxis.train.recipe import TrainConfig
from twoaxis.train.run_folder import first_difference

DECIDED_BY_THE_STUDY = ("steps", "seed")
"""Keys of a recipe that no arm may set."""

EQUAL_IN_ALL_ARMS = ("data", "batch_size", "validation_tokens", "validate_every")
"""Keys of a recipe without whose equality losses could not be compared in pairs."""

_ARM_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_+.-]*")


class BudgetConfig(Config):
    """What every run may spend: either steps, or tokens rounded up to whole steps.

    Args:
        steps: optimizer steps.
        tokens: tokens read.
    """

    steps: int | None = Field(default=None, ge=1)
    tokens: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.steps is None) == (self.tokens is None):
            got = {"steps": self.steps, "tokens": self.tokens}
            raise ConfigError(problem("budget", got, "either steps or tokens", "give exactly one of them"))
        return self

    def in_steps(self, tokens_per_step: int) -> int:
        """The budget in optimizer steps.

        Example:
            >>> BudgetConfig(tokens=1_000_000).in_steps(4096)
            245
        """
        return self.steps or -(-(self.tokens or 0) // tokens_per_step)


class DecisionConfig(Config):
    """How the verdict is reached; written before the first run and stored with the study.

    Args:
        smallest_effect: the smallest mean difference that would matter, in nats per token; power is computed for it.
        alpha: the accepted chance of any false verdict in the whole study.
        test: `paired_t`, Student's t test of the paired differences.
        correction: `holm`, over all arms but the control.
    """

    smallest_effect: float = Field(gt=0)
    alpha: float = Field(default=0.05, gt=0, lt=0.5)
    test: Literal["paired_t"] = "paired_t"
    correction: Literal["holm"] = "holm"


def _seeds(data: Any) -> Any:
    if isinstance(data, int) and not isinstance(data, bool):
        return tuple(range(max(data, 0)))
    return data


def _recipe_data(data: Any) -> Any:
    return read_config_file(Path(data), "base recipe", StudyError) if isinstance(data, str | Path) else data


class StudyConfig(Config):
    """A comparison of arms with one control at an equal budget.

    Args:
        question: what the study is to answer, in a sentence.
        control: the arm that all others are compared with.
        arms: by name, what each changes in the base recipe: a table, or a list of `key=value`. An empty table is the
            base itself.
        base: the recipe that all arms share, as a table or the path of a file.
        replicates: the seeds, or how many (0, 1, ...). A seed sets the order of the data and the initial values.
        budget: of every run.
        metric: `validation_loss` after the last step, in nats per token.
        decision: the decision rule.

    Raises:
        ConfigError: anything that could not be run or decided, at once and in one line.

    Example:
        >>> study = StudyConfig(
        ...     question="Does Deep Delta Learning lower the loss?",
        ...     control="residual",
        ...     arms={"residual": {}, "deep_delta": {"model": {"depth": "deep_delta"}}},
        ...     base={"model": {"d_model": 64, "n_layers": 2}, "batch_size": 8},
        ...     replicates=2,
        ...     budget={"tokens": 100_000},
        ...     decision={"smallest_effect": 0.02},
        ... )
        >>> study.recipe("deep_delta", seed=1).steps
        49
    """

    question: str = Field(min_length=1)
    control: str
    arms: dict[str, dict[str, Any] | list[str]]
    base: Annotated[dict[str, Any], BeforeValidator(_recipe_data)]
    replicates: Annotated[tuple[int, ...], BeforeValidator(_seeds)]
    budget: BudgetConfig
    metric: Literal["validation_loss"] = "validation_loss"
    decision: DecisionConfig

    @field_validator("replicates")
    @classmethod
    def _enough_different_seeds(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        if len(seeds) < 2 or len(set(seeds)) < len(seeds) or min(seeds) < 0:
            raise ConfigError(
                problem("seeds", list(seeds), "at least 2 different ones >= 0", "one run shows no variation; add a replicate")
            )
        return seeds

    @field_validator("arms")
    @classmethod
    def _named_for_folders(cls, arms: dict[str, Any]) -> dict[str, Any]:
        for name in arms:
            if not _ARM_NAME.fullmatch(name) or len(name) > 64:
                raise ConfigError(
                    problem("arm", name, "up to 64 letters, digits and _ + . -, since it names a folder", "rename it")
                )
        folded = [name.lower() for name in arms]
        if len(set(folded)) < len(folded):
            raise ConfigError(problem("arms", list(arms), "different also when case is ignored", "rename one of them"))
        return arms

    @model_validator(mode="after")
    def _comparable(self) -> Self:
        if self.control not in self.arms:
            known = nearest(self.control, self.arms) if self.arms else "add it to [arms]"
            raise ConfigError(f"control={self.control!r}: must be one of the arms; {known}")
        if len(self.arms) < 2:
            raise ConfigError(problem("arms", list(self.arms), "the control and at least one more", "add an arm to compare"))
        recipes = {name: self._checked(name) for name in self.arms}
        control = recipes[self.control]
        for name, recipe in recipes.items():
            for key in EQUAL_IN_ALL_ARMS:
                if found := first_difference(control[key], recipe[key], key):
                    where, there, here = found
                    raise ConfigError(
                        f"arm {name!r}: {where}={here!r}: must equal the control's {there!r}, since runs are compared in "
                        "pairs; set it in base"
                    )
        seen: dict[str, str] = {}
        for name, recipe in recipes.items():
            text = json.dumps(recipe, sort_keys=True)
            if text in seen:
                raise ConfigError(f"arms {seen[text]!r} and {name!r}: must differ, but are the same recipe; change or drop one")
            seen[text] = name
        return self

    def recipe(self, arm: str, seed: int) -> TrainConfig:
        """The full recipe of one run."""
        # The budget is known only once the batch is; until then no warm-up may be found too long.
        config = TrainConfig.from_data(overlay(self.base, self.arms[arm]) | {"steps": 10**9, "seed": seed})
        return config.replace(steps=self.budget.in_steps(config.batch_size * config.data.seq_len))

    @property
    def treatments(self) -> tuple[str, ...]:
        """The arms that are compared with the control."""
        return tuple(name for name in self.arms if name != self.control)

    @property
    def tokens_per_run(self) -> int:
        """Tokens that every run reads."""
        recipe = self.recipe(self.control, self.replicates[0])
        return recipe.steps * recipe.batch_size * recipe.data.seq_len

    def _checked(self, arm: str) -> dict[str, Any]:
        try:
            laid = overlay({}, self.arms[arm])
            for key in DECIDED_BY_THE_STUDY:
                if key in laid:
                    remedy = "use the study's budget" if key == "steps" else "use the study's replicates"
                    raise ConfigError(problem(key, laid[key], "equal for all arms and so not set by one", remedy))
            return self.recipe(arm, self.replicates[0]).to_data()
        except ConfigError as error:
            raise ConfigError(f"arm {arm!r}: {error}") from None


def read_study(path: Path | str, overrides: Sequence[str] = ()) -> StudyConfig:
    """Reads a study from a TOML or JSON file, with `key=value` overrides; a `base` path is relative to the file.

    Raises:
        StudyError: the file cannot be read or parsed.
        ConfigError: it is not a study that can be run.
    """
    path = Path(path)
    data = read_config_file(path, "study", StudyError)
    if isinstance(data.get("base"), str):
        # Read here, so that overrides reach into it.
        data["base"] = read_config_file(path.parent / data["base"], "base recipe", StudyError)
    return StudyConfig.from_data(apply_overrides(data, overrides))
