"""The costs of all methods on one model and one setting, relative to the control, the cheapest first."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from twoaxis.core.design import InitEquivalence
from twoaxis.core.errors import ConfigError
from twoaxis.depth import ResidualConfig
from twoaxis.local import LOCAL
from twoaxis.planner.coefficients import Data, Engine, coefficients_of_both_forms
from twoaxis.planner.formulas.counts import cache_bytes_of, parameter_counts, state_bytes
from twoaxis.planner.methods import Axis, Goal, Method, Refusal, fitted
from twoaxis.planner.model.part import NativeSublayer
from twoaxis.planner.model.shape import ModelShape
from twoaxis.planner.quantities import Precision
from twoaxis.planner.search import RESERVE
from twoaxis.planner.setting import Setting
from twoaxis.sequence import SEQUENCE, SequenceConfig

RELATIONS = ("exact", "up_to_norm", "none")
"""Relations to the plain model at initialisation, the closest first."""


@dataclass(frozen=True)
class Counted:
    """A method on a model, with the coefficients that hold for every setting.

    Attributes:
        method: the method.
        model: with the method.
        numbers: coefficients in training and prefill.
        generating: coefficients in generation.
    """

    method: Method
    model: ModelShape
    numbers: Data
    generating: Data


@dataclass(frozen=True)
class Budget:
    """The limits of a plan; None is no limit.

    Attributes:
        memory_bytes: of one GPU in training.
        latency_seconds: of one token in generation.
    """

    memory_bytes: float | None = None
    latency_seconds: float | None = None


@dataclass(frozen=True)
class MethodCost:
    """The costs of one method; each overhead is relative to the control, 0.1 for 10 % more.

    Attributes:
        name: of the method.
        axis: on which it mixes.
        goal: what it is for.
        kind: of its mixers.
        at_initialisation: relation to the plain model with the same shared parameters.
        params: all parameters.
        added_params: beyond those of the control.
        training_flops_per_token: forward and backward.
        flops_overhead: of these FLOPs.
        step_seconds: of a training step.
        step_overhead: of its seconds.
        depth_seconds: of depth operations, on the mean rank.
        exposed_seconds: of messages between stages that do not overlap with computation.
        bubble: mean share of a step in which a rank is idle.
        memory_bytes: of the fullest GPU in training.
        boundary_bytes: of one microbatch over the stage boundary that carries most.
        data_bytes: of gradients and weights that a rank sends to the others of its data-parallel group in a step.
        prefill_seconds: until the prompts are read.
        prefill_overhead: of these seconds.
        token_seconds: of one more token for each of the sequences that generate.
        token_overhead: of these seconds.
        generation_bytes: weights and caches of one GPU in generation.
        cache_bytes: of one sequence in generation.
        state_bytes: per token, of the largest depth state between blocks.
        over: limits that it exceeds: `device` in training, `generation` where its GPUs do not hold weights and caches, `memory`
            and `latency` of the budget.
    """

    name: str
    axis: Axis
    goal: Goal
    kind: str
    at_initialisation: str
    params: int
    added_params: int
    training_flops_per_token: float
    flops_overhead: float
    step_seconds: float
    step_overhead: float
    depth_seconds: float
    exposed_seconds: float
    bubble: float
    memory_bytes: float
    boundary_bytes: float
    data_bytes: float
    prefill_seconds: float
    prefill_overhead: float
    token_seconds: float
    token_overhead: float
    generation_bytes: float
    cache_bytes: float
    state_bytes: float
    over: tuple[str, ...]

    def to_data(self) -> dict[str, Any]:
        """Plain JSON-ready data."""
        return asdict(self) | {"over": list(self.over)}


@dataclass(frozen=True)
class Comparison:
    """The costs of every method on one setting.

    Attributes:
        control: the plain residual stream.
        methods: the others, by the seconds of a training step.
        refused: methods that do not fit the model or its arrangement, with the reason.
    """

    control: MethodCost
    methods: tuple[MethodCost, ...]
    refused: tuple[Refusal, ...]

    def named(self, name: str) -> MethodCost | None:
        """The costs of one method, if it fits."""
        return next((cost for cost in self.methods if cost.name == name), None)

    def of_goal(self, goal: Goal) -> tuple[MethodCost, ...]:
        """The costs of the methods for one goal."""
        return tuple(cost for cost in self.methods if cost.goal == goal)


def control_of(model: ModelShape) -> ModelShape:
    """The model with the plain residual stream."""
    return model.with_depth(ResidualConfig())


def as_given(model: ModelShape, known: Iterable[Method]) -> tuple[Method, ...]:
    """The depth mixer of the model as given, if it is none of the known methods."""
    control, depth = control_of(model), model.depth
    if any(fitted(method, control) == model for method in known):
        return ()
    return (Method(f"{depth.kind} as given", "depth", "shortcut", depth.kind, lambda other: other.with_depth(depth)),)


def count_methods(
    model: ModelShape,
    known: Iterable[Method],
    precision: Precision,
    engine: Engine = "fused",
    announce: Callable[[str], None] = lambda name: None,
) -> tuple[dict[str, Counted], tuple[Refusal, ...]]:
    """The coefficients of every method that fits the model, by name, and the methods that do not.

    Args:
        model: of the control.
        known: the methods; the first is the control.
        precision: bytes per number.
        engine: of depth operations; `eager` takes seconds per method.
        announce: called before each count that takes long.
    """
    found: dict[str, Counted] = {}
    refused: list[Refusal] = []
    for method in known:
        shape = fitted(method, model)
        if isinstance(shape, Refusal):
            refused.append(shape)
            continue
        if engine == "eager":
            announce(f"eager kernels of {method.name}")
        try:
            found[method.name] = Counted(method, shape, *coefficients_of_both_forms(shape, precision, engine))
        except ConfigError as error:
            refused.append(Refusal(method, str(error)))
    return found, tuple(refused)


def compare(counted: Mapping[str, Counted], setting: Setting, prompts: int, budget: Budget) -> Comparison:
    """Returns the costs of every method on one setting.

    Args:
        counted: the methods; the first is the control.
        setting: the arrangement that was chosen for the control; prompts and contexts are as long as its sequences.
        prompts: sequences that generate at once.
        budget: limits; a cost names those that it exceeds.
    """
    costs: list[MethodCost] = []
    refused: list[Refusal] = []
    for one in counted.values():
        try:
            setting.layout.check(one.model, setting.tokens)
        except ConfigError as error:
            refused.append(Refusal(one.method, str(error)))
            continue
        costs.append(_cost(one, setting, prompts, budget, costs[0] if costs else None))
    control, *others = costs
    return Comparison(control, tuple(sorted(others, key=lambda cost: cost.step_seconds)), tuple(refused))


def _cost(one: Counted, setting: Setting, prompts: int, budget: Budget, control: MethodCost | None) -> MethodCost:
    numbers, tokens = one.numbers, setting.tokens
    step = setting.training_step(numbers)
    prefill = setting.prefill(numbers, prompts, tokens)["seconds"]
    token = setting.generation_step(one.generating, prompts, tokens)["seconds"]
    params = parameter_counts(numbers)["all"]
    flops = step["flops"] / (setting.batch * tokens)
    memory, cache = max(step["memory_bytes"]), cache_bytes_of(one.generating, tokens, 1)
    generation = setting.generation_bytes(one.generating, prompts, tokens)

    def over_control(value: float, name: str) -> float:
        return 0.0 if control is None else value / getattr(control, name) - 1

    return MethodCost(
        name=one.method.name,
        axis=one.method.axis,
        goal=one.method.goal,
        kind=one.method.kind,
        at_initialisation=_at_initialisation(one).relation,
        params=params,
        added_params=0 if control is None else params - control.params,
        training_flops_per_token=flops,
        flops_overhead=over_control(flops, "training_flops_per_token"),
        step_seconds=step["step_seconds"],
        step_overhead=over_control(step["step_seconds"], "step_seconds"),
        depth_seconds=step["depth_seconds"],
        exposed_seconds=step["exposed_seconds"],
        bubble=step["bubble"],
        memory_bytes=memory,
        boundary_bytes=max(step["sent_bytes"], default=0),
        data_bytes=step["data_bytes"],
        prefill_seconds=prefill,
        prefill_overhead=over_control(prefill, "prefill_seconds"),
        token_seconds=token,
        token_overhead=over_control(token, "token_seconds"),
        generation_bytes=generation,
        cache_bytes=cache,
        state_bytes=max(state_bytes(numbers, boundary) for boundary in range(len(numbers["sublayers"]) + 1)),
        over=_over(setting.device.memory_bytes.value * (1 - RESERVE), budget, memory, generation, token),
    )


def _over(limit: float, budget: Budget, memory: float, generation: float, token: float) -> tuple[str, ...]:
    limits = {
        "device": memory > limit,
        "generation": generation > limit,
        "memory": budget.memory_bytes is not None and memory > budget.memory_bytes,
        "latency": budget.latency_seconds is not None and token > budget.latency_seconds,
    }
    return tuple(name for name, exceeded in limits.items() if exceeded)


def _at_initialisation(one: Counted) -> InitEquivalence:
    """The relation that is further from the plain model, of the depth mixer and of added local mixers."""
    found = [one.model.depth.init_equivalence]
    for kind in one.method.kind.split(" + "):
        if kind in LOCAL:
            found.append(LOCAL.parse(kind).init_equivalence)
        elif kind in SEQUENCE:
            configs = [part.config for part in one.model.parts if isinstance(part, NativeSublayer) and part.kind == kind]
            found += [config.init_equivalence for config in configs[:1] if isinstance(config, SequenceConfig)]
    return max(found, key=lambda relation: RELATIONS.index(relation.relation))
