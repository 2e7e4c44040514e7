"""What a step of a recipe costs, in any unit that arms can be given equally much of."""

import json
from collections.abc import Callable, Sequence
from statistics import fmean, linear_regression
from typing import TypeVar

from twoaxis.core.cost import Shape
from twoaxis.core.errors import ConfigError
from twoaxis.data import prepare
from twoaxis.data.tokenizer import BpeConfig, ByteConfig, ByteTokenizer
from twoaxis.model.cost import decoder_cost
from twoaxis.study.rules import Unit
from twoaxis.study.timing import Timer
from twoaxis.train.recipe import TrainConfig

MEASURED = 5
"""Sizes of one arm that are timed; between them seconds are taken to be linear in FLOPs."""

CostOfStep = Callable[[TrainConfig], float]

C = TypeVar("C")


def parameters(recipe: TrainConfig) -> int:
    """Parameters of the model of a recipe, a count."""
    return decoder_cost(recipe.decoder(vocab_size(recipe)), Shape(1, 1)).params


def flops_per_token(recipe: TrainConfig) -> float:
    """Training FLOPs per token: three forward passes, since the backward pass computes twice as much."""
    shape = Shape(recipe.batch_size, recipe.data.seq_len)
    return 3 * decoder_cost(recipe.decoder(vocab_size(recipe)), shape).flops / shape.total_tokens


def tokens_per_step(recipe: TrainConfig) -> int:
    """Tokens that one step of a recipe reads."""
    return recipe.batch_size * recipe.data.seq_len


def flops_per_step(recipe: TrainConfig) -> float:
    """Training FLOPs of one step."""
    return tokens_per_step(recipe) * flops_per_token(recipe)


def vocab_size(recipe: TrainConfig) -> int:
    """Tokens in the vocabulary; a byte-pair vocabulary is taken to be as large as asked for."""
    tokenizer = recipe.data.tokenizer
    if isinstance(tokenizer, ByteConfig):
        return ByteTokenizer().vocab_size
    if isinstance(tokenizer, BpeConfig):
        return tokenizer.vocab_size
    return prepare(recipe.data.corpus, tokenizer).tokenizer.vocab_size


class Costs:
    """Costs of steps, with a timer for those in seconds.

    Args:
        timer: measures recipes; None refuses seconds.
    """

    def __init__(self, timer: Timer | None) -> None:
        self.timer = timer

    def per_step(self, unit: Unit, arms: Sequence[TrainConfig], sizes: Sequence[TrainConfig] = ()) -> CostOfStep:
        """The cost of a step, or of a model for `params`, of any of these recipes.

        Args:
            unit: of the cost.
            arms: recipes that are timed themselves when the unit is seconds; the first is the one to compare with.
            sizes: of one arm; a few of them are timed, and the others lie on a straight line in FLOPs through these.

        Raises:
            ConfigError: seconds without a timer.
        """
        if unit == "seconds":
            return self._seconds(arms, sizes)
        return {"tokens": tokens_per_step, "flops": flops_per_step, "params": parameters}[unit]

    def _seconds(self, arms: Sequence[TrainConfig], sizes: Sequence[TrainConfig]) -> CostOfStep:
        if self.timer is None:
            raise ConfigError(
                "seconds: must be measured before they are matched or budgeted; match FLOPs, or let them be measured"
            )
        timed = spread_over(sizes)
        recipes = {str(number): recipe for number, recipe in enumerate([*arms, *timed])}
        timing = self.timer(recipes)
        measured = {_key(recipe): timing.step_seconds(name, "0") for name, recipe in recipes.items()}
        line = straight_line([(flops_per_step(recipe), measured[_key(recipe)]) for recipe in timed or arms])
        return lambda recipe: measured.get(_key(recipe)) or line(flops_per_step(recipe))


def spread_over(items: Sequence[C], n: int = MEASURED) -> list[C]:
    """At most n of the items: the first, the last, and evenly spaced ones between."""
    if len(items) <= n:
        return list(items)
    return [items[round(i * (len(items) - 1) / (n - 1))] for i in range(n)]


def straight_line(points: Sequence[tuple[float, float]]) -> Callable[[float], float]:
    """The line of least squares through some points; level when all stand at one place.

    Example:
        >>> round(straight_line([(1.0, 0.3), (2.0, 0.4), (3.0, 0.5)])(4.0), 6)
        0.6
    """
    xs, ys = zip(*points, strict=True)
    slope, intercept = linear_regression(xs, ys) if len(set(xs)) > 1 else (0.0, fmean(ys))
    return lambda x: intercept + slope * x


def _key(recipe: TrainConfig) -> str:
    """What the seconds of a step depend on."""
    return json.dumps({k: v for k, v in recipe.to_data().items() if k not in ("steps", "seed")}, sort_keys=True)
