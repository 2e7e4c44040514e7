"""The plan of a study: every arm with its full recipe and costs, made before the first run."""

from typing import Any, Literal

from twoaxis.core.config import Config
from twoaxis.study.design.rules import TOLERANCE, CompanionMatch
from twoaxis.study.planning.equal_cost import THE_CONTROL, tokens_per_step, with_steps
from twoaxis.study.report_data import UNITS, ChangeData, Charge, Role
from twoaxis.study.timing import Timing
from twoaxis.train.recipe import TrainConfig

EQUAL = 1e-9
"""Costs that differ by less than this fraction are equal."""


class PlannedArm(Config):
    """One arm with the recipe of its runs.

    Attributes:
        name: generated names contain `~` or `@`, which designs may not use.
        role: in the study.
        why: its purpose in one line.
        recipe: of the first seed.
        seeds: one run each.
        changes: made to match another arm.
        tuned_as: the arm whose tuned learning rate it takes; "" when nothing is tuned.
        parameters: a count.
        training_flops_per_token: by the declared costs.
    """

    name: str
    role: Role
    why: str = ""
    recipe: dict[str, Any]
    seeds: tuple[int, ...]
    changes: tuple[ChangeData, ...] = ()
    tuned_as: str = ""
    parameters: int
    training_flops_per_token: float

    def train_config(self, seed: int, lr: float | None = None) -> TrainConfig:
        """The recipe of one run, with a tuned learning rate if there is one."""
        # A plan written by an older version may lack keys.
        recipe = TrainConfig.from_record({**self.recipe, "seed": seed})
        return recipe if lr is None else recipe.replace(optimizer=recipe.optimizer.replace(lr=lr))

    def as_trial(self, lr: float, seed: int, tokens: int | None) -> "PlannedArm":
        """A trial of a learning rate, over these tokens; None is as many as a run of this arm."""
        recipe = self.train_config(seed, lr)
        if tokens is not None:
            recipe = with_steps(recipe, -(-tokens // tokens_per_step(recipe)))
        return self.replace(
            name=f"{self.name}@lr={lr:g}",
            role="trial",
            why=f"a trial of learning rate {lr:g}",
            recipe=recipe.to_data(),
            seeds=(seed,),
        )

    @property
    def steps(self) -> int:
        """Optimizer steps of a run."""
        return self.recipe["steps"]

    @property
    def tokens(self) -> int:
        """Tokens of a run."""
        return self.steps * tokens_per_step(self.train_config(self.seeds[0]))

    @property
    def flops(self) -> float:
        """Training FLOPs of a run."""
        return self.tokens * self.training_flops_per_token


class PlannedContrast(Config):
    """A comparison of an arm with one of its companions, or with another arm.

    Attributes:
        arm: whose loss is compared; it is better when the difference is negative.
        against: the other.
        matched: the cost made equal by design; "" for none.
        why: which other explanation it rules out.
    """

    arm: str
    against: str
    matched: CompanionMatch | Literal[""] = ""
    why: str = ""


class StudyPlan(Config):
    """All arms of a study, in this order: control and treatments, companions, the control at other budgets, trials.

    Attributes:
        arms: to run.
        contrasts: of treatments with companions or each other.
        notes: on what was left out.
        timing: measured seconds of steps; None when nothing was measured.
    """

    arms: tuple[PlannedArm, ...]
    contrasts: tuple[PlannedContrast, ...] = ()
    notes: tuple[str, ...] = ()
    timing: Timing | None = None

    def arm(self, name: str) -> PlannedArm:
        """One arm by name."""
        return next(arm for arm in self.arms if arm.name == name)

    def of_role(self, *roles: Role) -> tuple[PlannedArm, ...]:
        """The arms of these roles, in order."""
        return tuple(arm for arm in self.arms if arm.role in roles)

    @property
    def control(self) -> PlannedArm:
        """The arm with which all are compared."""
        return self.of_role("control")[0]

    @property
    def runs(self) -> int:
        """Number of all runs."""
        return sum(len(arm.seeds) for arm in self.arms)

    @property
    def tokens(self) -> int:
        """Tokens of all runs."""
        return sum(len(arm.seeds) * arm.tokens for arm in self.arms)

    @property
    def flops(self) -> float:
        """Training FLOPs of all runs, without validation."""
        return sum(len(arm.seeds) * arm.flops for arm in self.arms)

    @property
    def seconds(self) -> float | None:
        """Seconds of all training steps, one run after another; None without a timing."""
        if self.timing is None:
            return None
        return sum(len(arm.seeds) * (self.seconds_of(arm) or 0.0) for arm in self.arms)

    def cost_of(self, arm: PlannedArm, charge: Charge) -> float | None:
        """The cost of one run of an arm; None for seconds that were not measured."""
        return {"tokens": float(arm.tokens), "flops": arm.flops, "seconds": self.seconds_of(arm)}[charge]

    def cost_ratio(self, arm: PlannedArm, charge: Charge) -> float | None:
        """The cost of one run of an arm over that of the control; None for seconds that were not measured."""
        cost, budget = self.cost_of(arm, charge), self.cost_of(self.control, charge)
        return cost / budget if cost is not None and budget else None

    def is_matched(self, arm: PlannedArm, charge: Charge) -> bool:
        """Whether an arm costs as much as the control: exactly, or by design and, for seconds, by their later measurement."""
        ratio = self.cost_ratio(arm, charge)
        by_design = [
            one.got / one.wanted for one in arm.changes if one.of == charge and one.to in (THE_CONTROL, self.control.name)
        ]
        return ratio is not None and (abs(ratio - 1) < EQUAL or any(abs(ratio / one - 1) <= TOLERANCE for one in by_design))

    def unequal(self, contrast: PlannedContrast, charge: Charge) -> str:
        """The reason why losses of two arms are not compared at equal cost, or "".

        They are compared as they are, so the arms have to cost the same; a companion is compared at what it was matched by.
        """
        arm, against = self.arm(contrast.arm), self.arm(contrast.against)
        matched = all(one.role == "control" or self.is_matched(one, charge) for one in (arm, against))
        if charge == "tokens" or against.role == "companion" or matched:
            return ""
        cost, other = self.cost_of(arm, charge), self.cost_of(against, charge)
        if cost is None or not other:
            return f"{UNITS[charge]} were not measured"
        ratio = cost / other
        same = abs(ratio - 1) <= TOLERANCE
        return "" if same else f"takes {ratio:.3f} times the {UNITS[charge]} of {against.name}; losses are compared as they are"

    def seconds_of(self, arm: PlannedArm) -> float | None:
        """Seconds of the steps of one run of an arm; None without a timing."""
        step_seconds = self.step_seconds(arm)
        return None if step_seconds is None else arm.steps * step_seconds

    def step_seconds(self, arm: PlannedArm) -> float | None:
        """Seconds of a step of an arm; None without a timing."""
        return None if self.timing is None else self.timing.step_seconds(self._timed_as(arm), self.control.name)

    def memory_bytes(self, arm: PlannedArm) -> int | None:
        """Training state and saved activations of an arm; None without a timing."""
        return None if self.timing is None else self.timing.memory_bytes(self._timed_as(arm))

    def log_seconds_error(self, arm: PlannedArm) -> float:
        """The standard error of the logarithm of an arm's seconds over the control's."""
        return 0.0 if self.timing is None else self.timing.log_ratio(self._timed_as(arm), self.control.name)[1]

    def _timed_as(self, arm: PlannedArm) -> str:
        """The timed arm with the same steps: the control for its other budgets, the arm for its trials."""
        return {"rung": self.control.name, "trial": arm.tuned_as}.get(arm.role, arm.name)
