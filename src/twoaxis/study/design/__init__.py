"""The design of a study: its question, arms, replicates, budget and decision rule, all fixed before the first run."""

import copy
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BeforeValidator, Field, field_validator, model_validator

from twoaxis.core.config import Config, apply_overrides, drops_keys, read_config_file
from twoaxis.core.errors import ConfigError, StudyError, nearest, problem
from twoaxis.study.design.rules import (
    BudgetConfig,
    CompanionKind,
    DecisionConfig,
    MatchConfig,
    Matched,
    MatchField,
    TuningConfig,
)
from twoaxis.train.recipe import TrainConfig
from twoaxis.train.run_folder import first_difference

DECIDED_BY_THE_STUDY = ("steps", "seed")
"""Keys of a recipe that no arm may set."""

EQUAL_IN_ALL_ARMS = ("data", "batch_size", "validation_tokens", "validate_every", "parallel")
"""Keys of a recipe that must be equal in all arms, so that losses can be compared in pairs."""

OF_THE_ARM = ("why", "match")
"""Keys of an arm that configure the study, not the recipe."""

UNDECIDED_STEPS = 10**9
"""Placeholder for the number of steps until it is planned; long enough for every warm-up."""

_ARM_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_+.-]*")


def _seeds(data: Any) -> Any:
    if isinstance(data, int) and not isinstance(data, bool):
        return tuple(range(max(data, 0)))
    return data


def _recipe_data(data: Any) -> Any:
    return read_config_file(Path(data), "base recipe", StudyError) if isinstance(data, str | Path) else data


def _companions(data: Any) -> Any:
    if isinstance(data, bool):
        return get_args(CompanionKind) if data else ()
    return data


class ContrastConfig(Config):
    """One arm against another that is not the control, corrected in the same family.

    Args:
        arm: whose loss is compared; it is better when the difference is negative.
        against: the arm whose loss is subtracted.
        why: which other explanation the contrast rules out, in one line.
    """

    arm: str
    against: str
    why: str = ""


class StudyConfig(Config):
    """A comparison of arms with one control at an equal budget.

    Args:
        question: the question of the study, in a sentence.
        control: the arm that all others are compared with.
        arms: changes of the base recipe by arm: a table, or a list of `key=value`. An empty table is the base itself. Two
            keys configure the study: `why`, the purpose of the arm in one line, and `match`.
        base: the recipe that all arms share, as a table or the path of a file.
        replicates: the seeds, or their number (0, 1, ...). A seed sets the order of the data and the initial values.
        budget: of every run.
        match: how arms are changed until they cost as much as the control; an arm may override it.
        contrasts: further comparisons of arms with each other; each enlarges the family of comparisons.
        controls: kinds of companions to generate for every arm they apply to; true means all.
        controls_match: the cost at which generated ShortSWA and wider streams equal their arm; wider feed-forwards have as many
            parameters.
        tuning: a search of the learning rate for each arm; without it all use that of the base.
        metric: `validation_loss` after the last step, in nats per token.
        decision: the decision rule.

    Raises:
        ConfigError: the study could not be run or decided.

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
        >>> study.treatments, study.recipe("deep_delta", seed=1).model["depth"]["kind"]
        (('deep_delta',), 'deep_delta')
    """

    question: str = Field(min_length=1)
    control: str
    arms: dict[str, dict[str, Any] | list[str]]
    base: Annotated[dict[str, Any], BeforeValidator(_recipe_data)]
    replicates: Annotated[tuple[int, ...], BeforeValidator(_seeds)]
    budget: BudgetConfig
    match: MatchField = None
    contrasts: tuple[ContrastConfig, ...] = ()
    controls: Annotated[tuple[CompanionKind, ...], BeforeValidator(_companions)] = ()
    controls_match: tuple[Matched, ...] = ("flops",)
    tuning: TuningConfig | None = None
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
        if len(self.arms) < 2 and not self.controls:
            raise ConfigError(problem("arms", list(self.arms), "the control and at least one more", "add an arm to compare"))
        recipes = {name: self._checked(name) for name in self.arms}
        for name, recipe in recipes.items():
            self.check_comparable(name, recipe)
        self._check_matches(recipes)
        self._check_contrasts()
        if self.tuning is not None:
            self._check_tuning(self.tuning)
        return self

    def check_comparable(self, name: str, recipe: Mapping[str, Any]) -> None:
        """Refuses a recipe whose losses could not be compared in pairs with the control's.

        Raises:
            ConfigError: naming the key that differs.
        """
        control = self.recipe(self.control, self.replicates[0]).to_data()
        for key in EQUAL_IN_ALL_ARMS:
            if found := first_difference(control[key], recipe[key], key):
                where, there, here = found
                raise ConfigError(
                    f"arm {name!r}: {where}={here!r}: must equal the control's {there!r}, since runs are compared in "
                    "pairs; set it in base"
                )

    def recipe(self, arm: str, seed: int) -> TrainConfig:
        """The recipe of an arm as it was written; its steps are those of the budget where that is equal for all arms."""
        # The budget is known only once the batch is; until then no warm-up may be found too long.
        config = TrainConfig.from_data(overlay(self.base, self.changes(arm)) | {"steps": UNDECIDED_STEPS, "seed": seed})
        for part in ("pipeline", "tensor"):
            if (found := getattr(config.parallel, part)) > 1:
                allowed = "1 in a study, whose steps are timed with shard and replicate only"
                raise ConfigError(problem(f"parallel.{part}", found, allowed, f"leave out base.parallel.{part}"))
        steps = self.budget.in_steps(config.batch_size * config.data.seq_len)
        return config if steps is None else config.replace(steps=steps)

    @property
    def processes(self) -> int:
        """The processes of every run."""
        return self.recipe(self.control, self.replicates[0]).parallel.ranks

    def changes(self, arm: str) -> dict[str, Any] | list[str]:
        """The changes of the base recipe by an arm."""
        changes = self.arms[arm]
        return {k: v for k, v in changes.items() if k not in OF_THE_ARM} if isinstance(changes, dict) else changes

    def why(self, arm: str) -> str:
        """The purpose of an arm in one line; "" without one."""
        changes = self.arms[arm]
        return str(changes.get("why", "")) if isinstance(changes, dict) else ""

    def match_of(self, arm: str) -> MatchConfig | None:
        """The matching of an arm; None for the control and for an unmatched arm."""
        changes = self.arms[arm]
        own = changes.get("match") if isinstance(changes, dict) else None
        if own is not None:
            return _OwnMatch(match=own).match
        return None if arm == self.control else self.match

    @property
    def treatments(self) -> tuple[str, ...]:
        """The arms that are compared with the control."""
        return tuple(name for name in self.arms if name != self.control)

    def _checked(self, arm: str) -> dict[str, Any]:
        try:
            laid = overlay({}, self.changes(arm))
            for key in DECIDED_BY_THE_STUDY:
                if key in laid:
                    remedy = "use the study's budget" if key == "steps" else "use the study's replicates"
                    raise ConfigError(problem(key, laid[key], "equal for all arms and so not set by one", remedy))
            return self.recipe(arm, self.replicates[0]).to_data()
        except ConfigError as error:
            raise ConfigError(f"arm {arm!r}: {error}") from None

    def _check_matches(self, recipes: Mapping[str, Mapping[str, Any]]) -> None:
        unmatched: dict[str, str] = {}
        for name, recipe in recipes.items():
            match = self.match_of(name)
            if match is None:
                text = json.dumps(recipe, sort_keys=True)
                if text in unmatched:
                    both = f"arms {unmatched[text]!r} and {name!r}"
                    raise ConfigError(f"{both}: must differ, but are the same recipe; change or drop one")
                unmatched[text] = name
                continue
            to = match.to or self.control
            if to not in self.arms:
                raise ConfigError(f"arm {name!r}: match.to={to!r}: must be an arm; {nearest(to, self.arms)}")
            if to == name or (to != self.control and self.match_of(to) is not None):
                allowed = "an arm that is not matched itself"
                raise ConfigError(f"arm {name!r}: {problem('match.to', to, allowed, 'match both to the control')}")

    def _check_contrasts(self) -> None:
        pairs = [frozenset((one.arm, one.against)) for one in self.contrasts]
        for one, pair in zip(self.contrasts, pairs, strict=True):
            for key, name in (("arm", one.arm), ("against", one.against)):
                if name not in self.arms:
                    raise ConfigError(f"contrasts: {key}={name!r}: must be an arm; {nearest(name, self.arms)}")
            if self.control in pair:
                allowed = "two arms other than the control, which every arm is compared with already"
                raise ConfigError(problem("contrasts", [one.arm, one.against], allowed, "drop the contrast"))
            if len(pair) == 1 or pairs.count(pair) > 1:
                allowed = "two different arms, each pair once"
                raise ConfigError(problem("contrasts", [one.arm, one.against], allowed, "drop or correct the contrast"))

    def _check_tuning(self, tuning: TuningConfig) -> None:
        if tuning.seed in self.replicates:
            allowed = "none of the replicates, which it would make look better than they are"
            raise ConfigError(problem("tuning.seed", tuning.seed, allowed, "choose another"))
        for name in tuning.arms:
            if name not in self.arms:
                raise ConfigError(f"tuning.arms.{name}: must be an arm; {nearest(name, self.arms)}")


class _OwnMatch(Config):
    """Parses the `match` of one arm, in the forms allowed for that of the study."""

    match: MatchField


def read_study(path: Path | str, overrides: Sequence[str] = ()) -> StudyConfig:
    """Reads a study from a TOML or JSON file, with `key=value` overrides; a `base` path is relative to the file.

    Raises:
        StudyError: the file cannot be read or parsed.
        ConfigError: it is not a study that can be run.
    """
    path = Path(path)
    data = read_config_file(path, "study", StudyError)
    if "model" in data and "arms" not in data:
        raise StudyError(
            f"{path} is a recipe: must be a study; run it with `twoaxis train {path}`, or make it the base of a study"
        )
    if isinstance(data.get("base"), str):
        # Read here, so that overrides reach into it.
        data["base"] = read_config_file(path.parent / data["base"], "base recipe", StudyError)
    return StudyConfig.from_data(apply_overrides(data, overrides))


Changes = Mapping[str, Any] | Sequence[str]
"""A table of changes, or a list of `key=value`."""


def overlay(base: Mapping[str, Any], changes: Changes) -> dict[str, Any]:
    """Returns a copy of the base with the changes in it.

    Tables are merged key by key, everything else is replaced. A table whose `kind` changes is replaced whole, since
    its other keys belonged to the old kind; kinds of optimizer share theirs.

    Raises:
        ConfigError: a list with something else than `key=value` in it.

    Example:
        >>> base = {"model": {"d_model": 64, "depth": {"kind": "deep_delta", "beta_init": 0.5}}}
        >>> overlay(base, {"model": {"depth": {"kind": "attention_residuals", "block_size": 4}}})
        {'model': {'d_model': 64, 'depth': {'kind': 'attention_residuals', 'block_size': 4}}}
        >>> overlay(base, ["model.depth.beta_init=1.5"])
        {'model': {'d_model': 64, 'depth': {'kind': 'deep_delta', 'beta_init': 1.5}}}
    """
    if isinstance(changes, Mapping):
        return _merged(base, changes)
    if isinstance(changes, str) or not all(isinstance(change, str) for change in changes):
        raise ConfigError(f"overrides={changes!r}: must be a table or a list of 'key=value'; correct the arm")
    return apply_overrides(base, changes)


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    result = copy.deepcopy(dict(base))
    for key, value in changes.items():
        old = result.get(key)
        # A bare string is the short form of a table that only names its kind.
        if isinstance(value, Mapping) and isinstance(old, str):
            old = {"kind": old}
        if not (isinstance(old, Mapping) and isinstance(value, Mapping)):
            result[key] = copy.deepcopy(value)
        elif drops_keys(key, old, value.get("kind", old.get("kind"))):
            result[key] = copy.deepcopy(dict(value))
        else:
            result[key] = _merged(old, value)
    return result
