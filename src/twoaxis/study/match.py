"""Changing the steps or one size of an arm until it costs as much as another arm."""

import math
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from twoaxis.core.errors import ConfigError
from twoaxis.core.overrides import apply_overrides
from twoaxis.study.costs import CostOfStep, Costs
from twoaxis.study.report_data import ChangeData
from twoaxis.study.rules import STEPS, MatchConfig
from twoaxis.train.recipe import TrainConfig

MOST_TIMES = 4
"""How many times the present value is the largest that is tried."""

C = TypeVar("C")


def resized(
    arm: str, recipe: TrainConfig, match: MatchConfig, to: TrainConfig, costs: Costs
) -> tuple[TrainConfig, list[ChangeData]]:
    """The recipe with the size at which it costs as much as another, and what changed.

    Raises:
        ConfigError: no size comes near enough, or the recipe has no such size.
    """
    data = recipe.to_data()
    sizes = _sizes(arm, data, match)
    cost = costs.per_step(match.on, [to], [one for _, one in sizes])
    value, best = closest(sizes, lambda one: cost(one[1]), cost(to))
    return best, _changes(arm, data, match, value, cost(to), cost(best))


def with_matched_steps(
    arm: str, recipe: TrainConfig, match: MatchConfig, to: TrainConfig, cost: CostOfStep
) -> tuple[TrainConfig, list[ChangeData]]:
    """The recipe with the steps after which it has cost as much as another, and what changed.

    Raises:
        ConfigError: whole steps do not come near enough.
    """
    wanted = to.steps * cost(to)
    best = with_steps(recipe, affordable_steps(wanted, cost(recipe)))
    return best, _changes(arm, recipe.to_data(), match, best.steps, wanted, best.steps * cost(best))


def closest(candidates: Iterable[C], cost: Callable[[C], float], wanted: float) -> C:
    """The candidate whose cost is nearest to the wanted one; of equally near ones the first."""
    return min(candidates, key=lambda candidate: abs(cost(candidate) - wanted))


def affordable_steps(budget: float, cost_of_step: float) -> int:
    """Whole steps nearest to a budget, at least one.

    Example:
        >>> affordable_steps(10.0, 3.0), affordable_steps(1.0, 3.0)
        (3, 1)
    """
    return max(1, math.floor(budget / cost_of_step + 0.5))


def with_steps(recipe: TrainConfig, steps: int) -> TrainConfig:
    """The recipe with other steps.

    Raises:
        ConfigError: they are too few for its warm-up.
    """
    try:
        return recipe.replace(steps=steps)
    except ConfigError as error:
        raise ConfigError(f"{steps} steps are what the budget leaves: {error}") from None


def _sizes(arm: str, data: dict[str, Any], match: MatchConfig) -> list[tuple[int, TrainConfig]]:
    """Every recipe to choose from with its value, smallest first."""
    most = match.at_most or MOST_TIMES * max(_value(data, path) for path in match.by)
    found = []
    for value in range(match.multiple_of, most + 1, match.multiple_of):
        try:
            found.append((value, TrainConfig.from_data(apply_overrides(data, [f"{path}={value}" for path in match.by]))))
        except ConfigError:
            # A width that no head divides, for example, is no candidate.
            continue
    if not found:
        raise ConfigError(f"arm {arm!r}: match.by={match.by[0]!r}: no value up to {most} can be built; raise match.at_most")
    return found


def _changes(arm: str, data: dict[str, Any], match: MatchConfig, value: int, wanted: float, got: float) -> list[ChangeData]:
    if abs(got / wanted - 1) > match.tolerance:
        raise ConfigError(
            f"arm {arm!r}: {match.on} matched by {', '.join(match.by)} come to {got / wanted:.3f} of the arm to match: must be "
            f"within {match.tolerance:g} of 1; raise match.at_most or match.tolerance, or match by another key"
        )
    to = match.to or "the control"
    return [
        ChangeData(
            path=path,
            before=None if path == STEPS else _value(data, path),
            after=value,
            of=match.on,
            to=to,
            wanted=wanted,
            got=got,
        )
        for path in match.by
    ]


def _value(data: dict[str, Any], path: str) -> int:
    node: Any = data
    for part in path.split("."):
        try:
            node = node[int(part)] if isinstance(node, list) else node[part]
        except (KeyError, IndexError, ValueError, TypeError):
            raise ConfigError(f"match.by={path!r}: must be a key of the recipe; write for example 'model.d_model'") from None
    if not isinstance(node, int) or isinstance(node, bool):
        raise ConfigError(f"match.by={path!r}: holds {node!r} in the arm, must hold a whole number; give the arm one there")
    return node
