"""The cost of a training step in any unit, and the steps or the size at which two arms cost the same."""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from statistics import fmean, linear_regression
from typing import Any, TypeVar

from twoaxis.core.config import apply_overrides
from twoaxis.core.cost import Cost, Shape
from twoaxis.core.errors import ConfigError
from twoaxis.data import prepare
from twoaxis.data.tokenizer import BpeConfig, ByteConfig, ByteTokenizer
from twoaxis.model import DecoderConfig
from twoaxis.model.cost import decoder_cost
from twoaxis.study.design.rules import STEPS, MatchConfig, Unit
from twoaxis.study.report_data import ChangeData
from twoaxis.study.timing import Timer
from twoaxis.train.recipe import TrainConfig

TIMED_SIZES = 5
"""Sizes of one arm that are timed; seconds of the others are interpolated linearly in FLOPs."""

CostOfStep = Callable[[TrainConfig], float]

C = TypeVar("C")


def parameters(recipe: TrainConfig) -> int:
    """Parameters of the model of a recipe, a count."""
    return _cost(recipe, Shape(1, 1)).params


def flops_per_token(recipe: TrainConfig) -> float:
    """Training FLOPs per token: three forward passes, since the backward pass computes twice as much."""
    shape = Shape(recipe.batch_size, recipe.data.seq_len)
    return 3 * _cost(recipe, shape).flops / shape.total_tokens


def _cost(recipe: TrainConfig, shape: Shape) -> Cost:
    decoder: Any = recipe.decoder(vocab_size(recipe))
    return _cost_of(decoder, shape)


@lru_cache(maxsize=4096)
def _cost_of(decoder: DecoderConfig, shape: Shape) -> Cost:
    return decoder_cost(decoder, shape)


def tokens_per_step(recipe: TrainConfig) -> int:
    """Tokens of one step of a recipe."""
    return recipe.batch_size * recipe.data.seq_len


def flops_per_step(recipe: TrainConfig) -> float:
    """Training FLOPs of one step."""
    return tokens_per_step(recipe) * flops_per_token(recipe)


def vocab_size(recipe: TrainConfig) -> int:
    """Size of the vocabulary; for byte-pair encoding, the configured one."""
    tokenizer = recipe.data.tokenizer
    if isinstance(tokenizer, ByteConfig):
        return ByteTokenizer().vocab_size
    if isinstance(tokenizer, BpeConfig):
        return tokenizer.vocab_size
    return prepare(recipe.data.corpus, tokenizer).tokenizer.vocab_size


def cost_per_step(
    unit: Unit, timer: Timer | None, arms: Sequence[TrainConfig], sizes: Sequence[TrainConfig] = ()
) -> CostOfStep:
    """Returns a function from these recipes to the cost of a step, or of the model for `params`.

    Args:
        unit: of the cost.
        timer: measures seconds; None refuses them.
        arms: recipes to time when the unit is seconds; times are relative to the first.
        sizes: of one arm; a few of them are timed, the others interpolated linearly in FLOPs.

    Raises:
        ConfigError: seconds without a timer.
    """
    if unit != "seconds":
        return {"tokens": tokens_per_step, "flops": flops_per_step, "params": parameters}[unit]
    if timer is None:
        raise ConfigError("seconds: must be measured before they are matched or budgeted; match FLOPs, or let them be measured")
    timed = spread_over(sizes)
    recipes = {str(number): recipe for number, recipe in enumerate([*arms, *timed])}
    timing = timer(recipes)
    measured = {_key(recipe): timing.step_seconds(name, "0") for name, recipe in recipes.items()}
    line = straight_line([(flops_per_step(recipe), measured[_key(recipe)]) for recipe in timed or arms])
    return lambda recipe: measured.get(_key(recipe)) or line(flops_per_step(recipe))


def spread_over(items: Sequence[C], n: int = TIMED_SIZES) -> list[C]:
    """Selects at most n items: the first, the last, and evenly spaced ones between."""
    if len(items) <= n:
        return list(items)
    return [items[round(i * (len(items) - 1) / (n - 1))] for i in range(n)]


def straight_line(points: Sequence[tuple[float, float]]) -> Callable[[float], float]:
    """Fits a line by least squares; constant when all points have the same x.

    Example:
        >>> round(straight_line([(1.0, 0.3), (2.0, 0.4), (3.0, 0.5)])(4.0), 6)
        0.6
    """
    xs, ys = zip(*points, strict=True)
    slope, intercept = linear_regression(xs, ys) if len(set(xs)) > 1 else (0.0, fmean(ys))
    return lambda x: intercept + slope * x


def _key(recipe: TrainConfig) -> str:
    """Serialises the settings that seconds of a step depend on."""
    return json.dumps({k: v for k, v in recipe.to_data().items() if k not in ("steps", "seed")}, sort_keys=True)


THE_CONTROL = "the control"
"""In a change: the control is the matched arm."""

LARGEST_MULTIPLE = 4
"""The largest value tried, as a multiple of the present one."""


def match_cost(
    arm: str, recipe: TrainConfig, match: MatchConfig, to: TrainConfig, timer: Timer | None
) -> tuple[TrainConfig, tuple[ChangeData, ...]]:
    """Returns the recipe with the size or the steps at which it costs as much as another, and the changes.

    Raises:
        ConfigError: no size or number of steps is within the tolerance, or the recipe has no such size.
    """
    data = recipe.to_data()
    if STEPS in match.by:
        cost = cost_per_step(match.on, timer, [to, recipe])
        wanted = to.steps * cost(to)
        best = with_steps(recipe, affordable_steps(wanted, cost(recipe)))
        return best, _changes(arm, data, match, best.steps, wanted, best.steps * cost(best))
    sizes = _Sizes(arm, data, match)
    # Seconds are measured, so nothing is known of their order.
    timed = sizes.all() if match.on == "seconds" else []
    cost = cost_per_step(match.on, timer, [to], [sizes.recipe(number) for number in timed])

    def cost_of_size(number: int) -> float | None:
        return cost(recipe) if (recipe := sizes.find(number)) else None

    wanted = cost(to)
    if match.on == "seconds":
        best = closest(timed, lambda number: cost(sizes.recipe(number)), wanted)
    else:
        best = closest_in_order(len(sizes.values), cost_of_size, wanted, match.tolerance * wanted)
    if best is None:
        raise sizes.none()
    found = sizes.recipe(best)
    return found, _changes(arm, data, match, sizes.values[best], wanted, cost(found))


def closest(candidates: Iterable[C], cost: Callable[[C], float], wanted: float) -> C:
    """Returns the first candidate whose cost is nearest to the wanted one."""
    return min(candidates, key=lambda candidate: abs(cost(candidate) - wanted))


PROBES = 9
"""Candidates, evenly spread, of which costs are compared first."""


def closest_in_order(n: int, cost: Callable[[int], float | None], wanted: float, tolerance: float) -> int | None:
    """Returns the first of n candidates whose cost is nearest to the wanted one, from few costs if they rise or fall in order.

    It searches by halves. If costs are seen not to be in order, or none is within the tolerance, it computes them all.

    Args:
        n: number of candidates.
        cost: of a candidate; None for one that cannot be built.
        wanted: cost.
        tolerance: largest difference to it that needs no further search.

    Returns:
        A candidate, or None if none can be built.

    Example:
        >>> closest_in_order(1000, lambda number: float(number // 10), wanted=41.7, tolerance=1.0)
        420
    """
    known: dict[int, float | None] = {}

    def at(number: int) -> float | None:
        return known[number] if number in known else known.setdefault(number, cost(number))

    def in_order() -> list[tuple[int, float]]:
        return sorted((number, found) for number, found in known.items() if found is not None)

    def buildable(numbers: Iterable[int]) -> int | None:
        return next((number for number in numbers if at(number) is not None), None)

    last = buildable(range(n - 1, -1, -1))
    for number in spread_over(range(n), PROBES):
        buildable(range(number, n))
    if last is None:
        return None
    sign = 1 if at(last) == max(found for _, found in in_order()) else -1

    def first_with(least: float) -> int:
        """The first candidate with at least this cost, times the sign; n if there is none."""
        low, high, answer = 0, n, n
        while low < high:
            middle = (low + high) // 2
            number = buildable(range(middle, high))
            if number is not None and sign * (at(number) or 0.0) < least:
                low = number + 1
            else:
                high, answer = middle, answer if number is None else number
        return answer

    above = first_with(sign * wanted)
    below = buildable(range(above - 1, -1, -1))
    if below is not None:
        first_with(sign * (at(below) or 0.0))
    best = closest(in_order(), lambda one: one[1], wanted)
    ordered = all(sign * one <= sign * other for (_, one), (_, other) in pairwise(in_order()))
    if not ordered or abs(best[1] - wanted) > tolerance:
        for number in range(n):
            at(number)
        best = closest(in_order(), lambda one: one[1], wanted)
    return best[0]


def affordable_steps(budget: float, cost_of_step: float) -> int:
    """The whole number of steps nearest to a budget, at least 1.

    Example:
        >>> affordable_steps(10.0, 3.0), affordable_steps(1.0, 3.0)
        (3, 1)
    """
    return max(1, math.floor(budget / cost_of_step + 0.5))


def with_steps(recipe: TrainConfig, steps: int) -> TrainConfig:
    """Returns the recipe with other steps.

    Raises:
        ConfigError: they are too few for its warm-up.
    """
    try:
        return recipe.replace(steps=steps)
    except ConfigError as error:
        raise ConfigError(f"{steps} steps are what the budget leaves: {error}") from None


class _Sizes:
    """The candidates for an arm, smallest first, each built when it is asked for.

    Attributes:
        values: of the key.
    """

    def __init__(self, arm: str, data: dict[str, Any], match: MatchConfig) -> None:
        self._arm, self._data, self._paths = arm, data, match.by
        self._most = match.at_most or LARGEST_MULTIPLE * max(_value(data, path) for path in match.by)
        self.values = range(match.multiple_of, self._most + 1, match.multiple_of)
        self._built: dict[int, TrainConfig | None] = {}

    def find(self, number: int) -> TrainConfig | None:
        """The recipe of a candidate; None if it cannot be built, for example a width that is no multiple of the heads."""
        if number not in self._built:
            try:
                overrides = [f"{path}={self.values[number]}" for path in self._paths]
                self._built[number] = TrainConfig.from_data(apply_overrides(self._data, overrides))
            except ConfigError:
                self._built[number] = None
        return self._built[number]

    def recipe(self, number: int) -> TrainConfig:
        """The recipe of a candidate that can be built."""
        found = self.find(number)
        assert found is not None
        return found

    def all(self) -> list[int]:
        """All candidates that can be built, at least one."""
        if found := [number for number in range(len(self.values)) if self.find(number) is not None]:
            return found
        raise self.none()

    def none(self) -> ConfigError:
        """The error that no candidate can be built."""
        found = f"match.by={self._paths[0]!r}: no value up to {self._most} can be built"
        return ConfigError(f"arm {self._arm!r}: {found}; raise match.at_most")


def _changes(
    arm: str, data: dict[str, Any], match: MatchConfig, value: int, wanted: float, got: float
) -> tuple[ChangeData, ...]:
    if abs(got / wanted - 1) > match.tolerance:
        raise ConfigError(
            f"arm {arm!r}: {match.on} matched by {', '.join(match.by)} come to {got / wanted:.3f} of the arm to match: must be "
            f"within {match.tolerance:g} of 1; raise match.at_most or match.tolerance, or match by another key"
        )
    return tuple(
        ChangeData(
            path=path,
            before=None if path == STEPS else _value(data, path),
            after=value,
            of=match.on,
            to=match.to or THE_CONTROL,
            wanted=wanted,
            got=got,
        )
        for path in match.by
    )


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
