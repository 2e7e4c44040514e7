"""Measures seconds of a step of every arm, in rounds in which each arm takes a turn.

Drift of the machine affects all arms of a round alike, so only ratios within a round are used. The timed steps run no
validation, checkpoints, metrics or trackers.

`python -m twoaxis.study.timing RECIPES OUT` measures in a separate process, so that its memory is freed.
"""

import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from scipy.special import stdtrit

from twoaxis.core.config import Config
from twoaxis.core.files import replacing
from twoaxis.core.measure import saved_bytes
from twoaxis.data import PackedSampler, PreparedData, prepare
from twoaxis.train.environment import describe_environment
from twoaxis.train.optim import NUMBERS, build_optimizer, parameter_groups
from twoaxis.train.parallel.placement import placement_of
from twoaxis.train.parallel.ranks import Ranks, joined
from twoaxis.train.recipe import TrainConfig
from twoaxis.train.step import take_step
from twoaxis.train.token_loss import choose_device, rows_at_once

WARMUP_STEPS = 2
STEPS_IN_A_TURN = 2
ROUNDS = 15

NORMAL_MAD, NORMAL_MEDIAN = 1.4826, 1.2533
"""For normal noise: standard deviation over median deviation, and standard error of a median over that of a mean."""

BYTES = 4
"""Of a number in float32."""

DISAGREE = 0.05
"""Probability that two timings of the same arms disagree by chance alone."""

SAME_MACHINE = ("platform", "device", "device_name", "threads")

_ROUNDING = 1e-9


class Timing(Config):
    """Measured seconds and memory of all arms.

    Attributes:
        warmup_steps: of every arm, not counted.
        steps_in_a_turn: steps timed together.
        seconds: of a step, by arm and round.
        state_bytes: parameters, gradients and optimizer state in the fullest process, by arm.
        saved_bytes: saved for backward by one micro-batch, by arm.
        environment: in which they were measured.
    """

    warmup_steps: int
    steps_in_a_turn: int
    seconds: dict[str, tuple[float, ...]]
    state_bytes: dict[str, int]
    saved_bytes: dict[str, int]
    environment: dict[str, Any]

    @property
    def rounds(self) -> int:
        """Turns of every arm."""
        return len(next(iter(self.seconds.values())))

    def log_ratio(self, arm: str, to: str) -> tuple[float, float]:
        """The logarithm of the ratio of seconds of two arms, and its standard error.

        Equation: e_a = median_r (log t_ar - median_b log t_br); e_arm - e_to, with 1.2533 * 1.4826 * MAD / sqrt(rounds) as the
        standard error of a median. The median over arms removes drift, the median over rounds disturbed turns. The error is
        that of e_arm and e_to as if independent, or that of median_r (log t_arm,r - log t_to,r) if it is larger: of two arms,
        both effects have the same noise with opposite signs.

        Example:
            >>> timing = Timing(warmup_steps=1, steps_in_a_turn=1, state_bytes={}, saved_bytes={}, environment={},
            ...                 seconds={"a": (1.0, 2.0, 4.0), "b": (2.0, 4.0, 8.0)})
            >>> log_ratio, error = timing.log_ratio("b", "a")
            >>> round(math.exp(log_ratio), 6), round(error, 6)
            (2.0, 0.0)
        """
        if arm == to:
            return 0.0, 0.0
        (effect, error), (other, its_error) = (self._effect(name) for name in (arm, to))
        own = [math.log(one / its) for one, its in zip(self.seconds[arm], self.seconds[to], strict=True)]
        return effect - other, max(math.hypot(error, its_error), _middle(own)[1])

    def ratio(self, arm: str, to: str) -> float:
        """Seconds of a step of one arm over those of another."""
        return math.exp(self.log_ratio(arm, to)[0])

    def step_seconds(self, arm: str, control: str) -> float:
        """Seconds of a step: the control's median times the ratio to it, which drift does not affect."""
        return statistics.median(self.seconds[control]) * self.ratio(arm, control)

    def _effect(self, arm: str) -> tuple[float, float]:
        """The logarithm of an arm's seconds over the median arm of each round: median over rounds, and its standard error."""
        middles = [statistics.median(map(math.log, times)) for times in zip(*self.seconds.values(), strict=True)]
        return _middle([math.log(own) - middle for own, middle in zip(self.seconds[arm], middles, strict=True)])

    def is_of_machine_of(self, other: "Timing") -> bool:
        """Whether both were measured on the same machine, as far as their environments tell."""
        here, there = ([one.environment.get(key) for key in SAME_MACHINE] for one in (self, other))
        return here == there

    def memory_bytes(self, arm: str) -> int:
        """Bytes of training state and saved activations, without those of the libraries."""
        return self.state_bytes[arm] + self.saved_bytes[arm]


def _middle(values: Sequence[float]) -> tuple[float, float]:
    """The median, and its standard error from the median deviation."""
    middle = statistics.median(values)
    spread = statistics.median(abs(value - middle) for value in values)
    return middle, NORMAL_MEDIAN * NORMAL_MAD * spread / math.sqrt(len(values))


def disagreement(before: Timing, after: Timing, control: str) -> dict[str, float]:
    """Finds arms whose ratio to the control changed from before to after the runs by more than their errors.

    Returns:
        The factors of change, by arm.

    Equation: |r_after - r_before| > t sqrt(e_before^2 + e_after^2) with r the logarithm of the ratio, e its standard error, and
    t the quantile of Student's t at 1 - 0.05 / (2 m) for m arms, with one degree of freedom fewer than rounds.
    """
    arms = [arm for arm in before.seconds if arm != control and arm in after.seconds]
    found = {}
    for arm in arms:
        (first, error), (second, other) = before.log_ratio(arm, control), after.log_ratio(arm, control)
        df = max(1, min(before.rounds, after.rounds) - 1)
        limit = float(stdtrit(df, 1 - DISAGREE / (2 * len(arms)))) * math.hypot(error, other)
        if abs(second - first) > limit + _ROUNDING:
            found[arm] = math.exp(second - first)
    return found


def pooled(before: Timing, after: Timing) -> Timing:
    """Joins the rounds of both timings; of two machines, the first alone counts."""
    if not after.is_of_machine_of(before):
        return before
    seconds = {arm: (*times, *after.seconds.get(arm, ())) for arm, times in before.seconds.items()}
    return before.replace(seconds=seconds)


def timing_words(before: Timing | None, after: Timing | None, control: str) -> tuple[bool | None, str]:
    """Whether the timings before and after the runs agree, with a sentence; None while there is only one."""
    if before is None:
        return None, "seconds were not measured"
    if after is None:
        return None, "seconds were measured before the runs only; run the study again to measure them after the runs"
    if not before.is_of_machine_of(after):
        return False, (
            "seconds before and after the runs were measured on different machines; run the study again to measure them here"
        )
    found = disagreement(before, after, control)
    if found:
        changed = ", ".join(f"{arm} by a factor of {factor:.3f}" for arm, factor in found.items())
        return False, f"seconds before and after the runs disagree by more than their error: {changed}"
    return True, "seconds before and after the runs agree within their error"


Timer = Callable[[Mapping[str, TrainConfig]], Timing]
"""Measures recipes by name."""


def measure(recipes: Mapping[str, TrainConfig], ranks: Ranks | None = None) -> Timing:
    """Measures in this process, or in all processes of the recipes together, with all models in memory.

    Raises:
        ConfigError: a recipe cannot be run here.
        DataError: a corpus cannot be used.
    """
    data, ranks = dict[str, PreparedData](), ranks or Ranks()
    arms = {name: _Arm(recipe, data, ranks) for name, recipe in recipes.items()}
    saved = {name: arm.warm_up() for name, arm in arms.items()}
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    names = list(arms)
    for number in range(ROUNDS):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            begin = time.perf_counter()
            for _ in range(STEPS_IN_A_TURN):
                arms[name].step()
            seconds[name].append((time.perf_counter() - begin) / STEPS_IN_A_TURN)
    first = next(iter(arms.values()))
    return Timing(
        warmup_steps=WARMUP_STEPS,
        steps_in_a_turn=STEPS_IN_A_TURN,
        seconds={name: tuple(values) for name, values in seconds.items()},
        state_bytes={name: ranks.largest(arm.state_bytes) for name, arm in arms.items()},
        saved_bytes=saved,
        environment=describe_environment(first.token_loss.device, first.token_loss.dtype),
    )


class _Arm:
    """The model, data and optimizer of one recipe."""

    def __init__(self, recipe: TrainConfig, prepared: dict[str, PreparedData], ranks: Ranks) -> None:
        key = json.dumps(recipe.data.to_data(), sort_keys=True)
        if key not in prepared:
            prepared[key] = ranks.in_turn(lambda: prepare(recipe.data.corpus, recipe.data.tokenizer))
        data = prepared[key]
        self.recipe, self.rows, self.placement = recipe, rows_at_once(recipe), placement_of(ranks)
        self.sampler = PackedSampler(
            data.train, recipe.batch_size, recipe.data.seq_len, recipe.seed, recipe.data.packing, data.answer_cues
        )
        torch.manual_seed(recipe.seed)
        device = ranks.device or choose_device(recipe.device)
        self.model = self.placement.build(recipe, recipe.decoder(data.tokenizer.vocab_size), device)
        groups = parameter_groups(self.placement.whole(self.model), recipe.parameter_options)
        self.groups = self.placement.local(groups, self.model)
        self.optimizer = build_optimizer(self.groups, recipe.optimizer, self.placement.of_wholes)
        self.token_loss = self.placement.losses(self.model, recipe)

    @property
    def state_bytes(self) -> int:
        """Bytes of parameters, gradients and optimizer."""
        return BYTES * sum(
            (2 + NUMBERS[group.rule] if group.lr_scale else 1) * parameter.numel()
            for group in self.groups
            for parameter in group.parameters.values()
        )

    def step(self) -> None:
        """Takes one step and waits for the device."""
        take_step(
            self.placement,
            self.token_loss,
            self.optimizer,
            self.sampler.next(),
            rows=self.rows,
            multiplier=1e-3,
            clip_norm=self.recipe.optimizer.clip_norm,
        )

    def warm_up(self) -> int:
        """Takes the first steps, and returns the bytes saved for backward by one micro-batch."""
        for _ in range(WARMUP_STEPS):
            self.step()
        part = next(iter(self.placement.rows(self.sampler.next()).micro_batches(self.rows)))
        parameters = list(self.model.parameters())
        # Eager, since a compiled graph may recompute and save less.
        with torch.compiler.set_stance("force_eager"):
            saved = saved_bytes(lambda: self.token_loss(part), lambda loss: [*parameters, loss])
        self.placement.end_validation(self.model)
        return saved


def main(recipes: Path, out: Path) -> None:
    """Measures the recipes of a JSON file and writes the timing."""
    data = json.loads(recipes.read_text(encoding="utf-8"))
    arms = {name: TrainConfig.from_data(recipe) for name, recipe in data.items()}
    first = next(iter(arms.values()))
    with joined(first.parallel, first.device) as ranks, ranks.watched():
        timing = measure(arms, ranks)
        if ranks.is_first:
            with replacing(out) as file:
                file.write(json.dumps(timing.to_data(), indent=1).encode() + b"\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
