"""The plan of a model: an arrangement of GPUs, the costs of every method in it, and a recommendation."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from twoaxis.ledger.kept import announcing
from twoaxis.planner.advice import Case, Recommendation, methods_for, recommend
from twoaxis.planner.coefficients import coefficients
from twoaxis.planner.comparison import Budget, Comparison, MethodCost, as_given, compare, control_of, count_methods
from twoaxis.planner.ledger import Ledger, ledger
from twoaxis.planner.methods import Goal
from twoaxis.planner.model.shape import ModelShape
from twoaxis.planner.search import RESERVE, Request, find_setting
from twoaxis.planner.setting import Setting

FORMAT = "twoaxis.plan/1"

BUDGETED = ("memory", "latency")
"""Limits of the budget, among those that a method may exceed."""

PROMPTS = 8
"""Default number of sequences that generate at once."""


@dataclass(frozen=True)
class ModelPlan:
    """A plan.

    Attributes:
        model: as it was read.
        setting: where the control trains fastest.
        prompts: sequences that generate at once.
        budget: limits of the reader.
        ledger: the counts of the model as it was read, of one sequence.
        comparison: costs of every method.
        recommendation: for the goal; None without a goal.
    """

    model: ModelShape
    setting: Setting
    prompts: int
    budget: Budget
    ledger: Ledger
    comparison: Comparison
    recommendation: Recommendation | None

    @property
    def costs(self) -> tuple[MethodCost, ...]:
        """The costs of the control, then of every method."""
        return (self.comparison.control, *self.comparison.methods)

    @property
    def fits_budget(self) -> bool:
        """Whether any method, the control included, is within the budget."""
        return any(not set(BUDGETED) & set(cost.over) for cost in self.costs)

    @property
    def flops_share(self) -> float:
        """Model FLOPs utilisation of the control: its FLOPs over the peak of all GPUs, without recomputation."""
        setting, control = self.setting, self.comparison.control
        peak = setting.device.peak_flops_per_second[setting.number_format].value
        flops = control.training_flops_per_token * setting.batch * setting.tokens
        return flops / control.step_seconds / (peak * setting.layout.gpus)

    def to_data(self) -> dict[str, Any]:
        """Plain JSON-ready data."""
        setting, comparison = self.setting, self.comparison
        names = ("batch", "tokens", "engine", "forwarding", "recompute", "sharding", "transfers")
        return {
            "format": FORMAT,
            "model": self.model.name,
            "not_counted": list(self.model.not_counted),
            "setting": {
                "device": setting.device.name,
                **{name: getattr(setting, name) for name in names},
                "precision": setting.precision.to_data(),
                "prompts": self.prompts,
                "memory_limit_bytes": setting.device.memory_bytes.value * (1 - RESERVE),
                "budget": asdict(self.budget),
            },
            "layout": {**setting.layout.to_data(), "schedule": setting.run["schedule"]},
            "ledger": self.ledger.to_data(),
            "control": comparison.control.to_data() | {"flops_share_of_peak": self.flops_share},
            "fits_budget": self.fits_budget,
            "methods": [cost.to_data() for cost in comparison.methods],
            "refused": [
                {"name": each.method.name, "goal": each.method.goal, "reason": each.reason} for each in comparison.refused
            ],
            "recommendation": None if self.recommendation is None else self.recommendation.to_data(),
        }


def plan_model(
    model: ModelShape,
    request: Request,
    goal: Goal | None = None,
    budget: Budget | None = None,
    prompts: int = PROMPTS,
    announce: Callable[[str], None] = lambda name: None,
) -> ModelPlan:
    """Plans a model: finds a setting for its control, and compares all methods in it.

    Args:
        model: with any depth mixer.
        request: what is fixed of the arrangement.
        goal: of the reader.
        budget: limits of every method.
        prompts: sequences that generate at once.
        announce: called with the name of each count.

    Raises:
        ConfigError: no arrangement is possible, or none fits the device.

    Example:
        >>> from twoaxis.planner import read_model
        >>> from twoaxis.planner.hardware import read_device
        >>> planned = plan_model(read_model("gpt-124m"), Request(read_device("h100"), gpus=8, tokens=1024))
        >>> planned.comparison.control.params
        123587328
    """
    budget = budget or Budget()
    control, known = control_of(model), methods_for(goal)
    known = (*known, *as_given(model, known))
    with announcing(announce):
        setting = find_setting(control, coefficients(control, request.precision, request.engine), request)
        counted, refused = count_methods(control, known, request.precision, request.engine, announce)
    found = compare(counted, setting, prompts, budget)
    comparison = Comparison(found.control, found.methods, refused + found.refused)
    case = Case(control, request, setting, counted, comparison, prompts, budget)
    return ModelPlan(
        model=model,
        setting=setting,
        prompts=prompts,
        budget=budget,
        ledger=ledger(model, tokens=request.tokens, precision=request.precision, engine=request.engine),
        comparison=comparison,
        recommendation=recommend(goal, case, announce) if goal is not None else None,
    )
