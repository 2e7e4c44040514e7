"""Searches the arrangement of GPUs in which a model trains fastest within the memory of the device."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from math import gcd, lcm
from typing import Any, Literal, Self, get_args

from twoaxis.core.errors import ConfigError, problem
from twoaxis.display.numbers import bytes_text
from twoaxis.planner.coefficients import Data, Engine
from twoaxis.planner.formulas.training_step import estimated_step
from twoaxis.planner.hardware import Device
from twoaxis.planner.ledger import Forwarding
from twoaxis.planner.model.shape import ModelShape
from twoaxis.planner.quantities import Precision
from twoaxis.planner.setting import ParallelLayout, Recompute, SequenceSharding, Setting, Sharding, check_words

BATCH_TOKENS = 4 * 2**20
"""Default tokens of a training step, as in the training of models of 7B to 70B parameters."""

RESERVE = 0.1
"""Share of a device's memory that a plan leaves free, for fragmentation, message buffers and what the formulas omit."""

MICROBATCH_SEQUENCES = (1, 2, 4)
SIMULATED = 4
MOST_DOUBLINGS = 6


@dataclass(frozen=True)
class Request:
    """The request of a plan; None leaves a choice to the search.

    Attributes:
        device: of which there are `gpus`.
        gpus: all of them.
        tokens: of one sequence.
        batch: sequences of a training step; None takes about `BATCH_TOKENS` tokens.
        precision: bytes per number.
        engine: of the depth operations.
        tensor: ranks that share every matrix.
        pipeline: ranks that the layers are cut over.
        virtual: stages on each of those.
        data: replicas.
        microbatches: of a step on one replica.
        sequence: `none` or `tensor`, see `setting.SequenceSharding`; None takes `tensor` if the tokens divide.
        schedule: of a rank with one stage.
        recompute: what the backward pass recomputes.
        sharding: what is sharded over replicas; the search tries `optimizer` and `weights`.
        forwarding: what stage boundaries send.

    Raises:
        ConfigError: an unknown word, a number below 1, or one that does not divide the GPUs.
    """

    device: Device
    gpus: int
    tokens: int
    batch: int | None = None
    precision: Precision = field(default_factory=Precision)
    engine: Engine = "fused"
    tensor: int | None = None
    pipeline: int | None = None
    virtual: int = 1
    data: int | None = None
    microbatches: int | None = None
    sequence: SequenceSharding | None = None
    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    recompute: Recompute | None = None
    sharding: Sharding | None = None
    forwarding: Forwarding = "naive"

    def __post_init__(self) -> None:
        check_words(self)
        for name in ("gpus", "tokens", "batch", "tensor", "pipeline", "virtual", "data", "microbatches"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(
                    problem(name, value, "at least 1", "leave it out to have it chosen" if name != "gpus" else "name more")
                )
        for name in ("tensor", "pipeline", "data"):
            value = getattr(self, name)
            if value is not None and self.gpus % value:
                raise ConfigError(problem(name, value, f"a divisor of gpus={self.gpus}", "change one of them"))
        # Raises if the file of the device connects fewer.
        if self.gpus > 1:
            self.device.link(self.gpus)

    @classmethod
    def fixed(cls, setting: Setting) -> Self:
        """The request that fixes all of a setting."""
        layout = setting.layout.to_data()
        own = {name: getattr(setting, name) for name in _names(cls) & _names(Setting)}
        return cls(**own, **{name: value for name, value in layout.items() if name in _names(cls)})

    def replace(self, **changes: Any) -> Self:
        """The same with other fields."""
        return replace(self, **changes)

    @property
    def sequences(self) -> int:
        """Sequences of a training step: as given, else about `BATCH_TOKENS`, divisible by the GPUs or the given parts."""
        if self.batch is not None:
            return self.batch
        wanted = max(1, round(BATCH_TOKENS / self.tokens))
        if self.data is not None or self.microbatches is not None:
            unit = (self.data or 1) * (self.microbatches or 1)
            unit = lcm(unit, self.gpus) if lcm(unit, self.gpus) <= wanted else unit
            return unit * max(1, round(wanted / unit))
        return self.gpus * round(wanted / self.gpus) if wanted >= self.gpus else wanted

    @property
    def memory_limit_bytes(self) -> float:
        """Memory of one device that a plan may fill."""
        return self.device.memory_bytes.value * (1 - RESERVE)


@dataclass(frozen=True)
class _Estimate:
    """A setting with estimates of its step."""

    setting: Setting
    seconds: float
    memory_bytes: float


def find_setting(model: ModelShape, numbers: Data, request: Request) -> Setting:
    """The setting of least predicted step time that fits the memory of the device.

    All arrangements are estimated in closed form; the best few are simulated, and the fastest is returned.

    Args:
        model: what is trained, the control of a plan.
        numbers: its coefficients.
        request: what is fixed, and what is left open.

    Raises:
        ConfigError: no arrangement is possible, or none fits; the message names the least memory found and a remedy.

    Example:
        >>> from twoaxis.planner import read_model
        >>> from twoaxis.planner.coefficients import coefficients
        >>> from twoaxis.planner.hardware import read_device
        >>> model = read_model("gpt-124m")
        >>> found = find_setting(model, coefficients(model), Request(read_device("h100"), gpus=8, tokens=1024))
        >>> found.layout.data, found.layout.tensor, found.layout.pipeline
        (8, 1, 1)
    """
    estimates = sorted(_estimates(model, numbers, request), key=lambda found: found.seconds)
    fitting = [found for found in estimates if found.memory_bytes <= request.memory_limit_bytes]
    best: tuple[float, Setting] | None = None
    for index, found in enumerate(fitting):
        if best is not None and index >= SIMULATED:
            break
        step = found.setting.training_step(numbers)
        fits = max(step["memory_bytes"]) <= request.memory_limit_bytes
        if fits and (best is None or step["step_seconds"] < best[0]):
            best = step["step_seconds"], found.setting
    if best is None:
        raise ConfigError(_too_large(model, numbers, request, estimates))
    return best[1]


def _estimates(model: ModelShape, numbers: Data, request: Request) -> list[_Estimate]:
    """Estimates every possible arrangement.

    Raises:
        ConfigError: there is none; the reason of the first that was tried.
    """
    found: list[_Estimate] = []
    refused: list[ConfigError] = []
    for tensor, pipeline, data in _grids(model, request):
        per_replica, rest = divmod(request.sequences, data)
        if rest and not refused:
            refused.append(ConfigError(problem("batch", request.sequences, f"a multiple of data={data}", "change one of them")))
        for microbatches in [] if rest else _microbatches(request, per_replica):
            try:
                layout = _layout(request, tensor, pipeline, data, microbatches)
                layout.check(model, request.tokens)
                found += [_estimate(numbers, setting) for setting in _settings(request, layout)]
            except ConfigError as error:
                refused.append(error)
    if not found:
        raise refused[0] if refused else ConfigError(f"gpus={request.gpus}: {_no_grid(model, request)}")
    return found


def _no_grid(model: ModelShape, request: Request) -> str:
    names = ("tensor", "pipeline", "data", "virtual", "microbatches")
    given = " * ".join(f"{name}={value}" for name in names if (value := getattr(request, name)) is not None)
    return f"no arrangement of {model.name} has {given}; leave some of them out"


def _estimate(numbers: Data, setting: Setting) -> _Estimate:
    step = estimated_step(numbers, setting.run, setting.rates, setting.links)
    return _Estimate(setting, step["step_seconds"], step["memory_bytes"])


def _grids(model: ModelShape, request: Request) -> Iterator[tuple[int, int, int]]:
    """Yields (tensor, pipeline, data), the simplest first; tensor ranks stay within the fast link unless given."""
    fast = request.device.fast_link
    near = request.gpus if fast is None else int(fast.devices.value) if fast.devices is not None else request.gpus
    for tensor in [request.tensor] if request.tensor else [n for n in _divisors(request.gpus) if n <= near]:
        rest = request.gpus // tensor
        pipelines = [n for n in _divisors(rest) if n * request.virtual <= model.n_layers]
        for pipeline in [request.pipeline] if request.pipeline else pipelines:
            data = request.data or rest // pipeline
            # A grid that is given whole is passed on, so that the layout reports what is wrong with it.
            if tensor * pipeline * data == request.gpus or (request.tensor and request.pipeline):
                yield tensor, pipeline, data


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _microbatches(request: Request, per_replica: int) -> list[int]:
    if request.microbatches:
        return [request.microbatches]
    return [per_replica // size for size in MICROBATCH_SEQUENCES if per_replica % size == 0]


def _layout(request: Request, tensor: int, pipeline: int, data: int, microbatches: int) -> ParallelLayout:
    shared = tensor > 1 and gcd(request.tokens, tensor) == tensor
    return ParallelLayout(
        gpus=request.gpus,
        tensor=tensor,
        pipeline=pipeline,
        virtual=request.virtual,
        data=data,
        microbatches=microbatches,
        sequence=request.sequence or ("tensor" if shared else "none"),
        schedule=request.schedule,
    )


def _settings(request: Request, layout: ParallelLayout) -> Iterator[Setting]:
    recomputes: Sequence[Recompute] = [request.recompute] if request.recompute else get_args(Recompute)
    shardings: Sequence[Sharding] = [request.sharding] if request.sharding else ["optimizer", "weights"]
    own = {name: getattr(request, name) for name in ("device", "tokens", "precision", "engine", "forwarding")}
    for recompute, sharding in itertools.product(recomputes, shardings if layout.data > 1 else shardings[:1]):
        yield Setting(layout=layout, batch=request.sequences, recompute=recompute, sharding=sharding, **own)


def _too_large(model: ModelShape, numbers: Data, request: Request, estimates: list[_Estimate]) -> str:
    least = min(estimates, key=lambda found: found.memory_bytes)
    layout = least.setting.layout
    how = f"tensor={layout.tensor}, pipeline={layout.pipeline}, data={layout.data}, recompute={least.setting.recompute!r}"
    limit = f"{bytes_text(request.memory_limit_bytes)}, {1 - RESERVE:.0%} of {request.device.name}"
    return (
        f"{model.name} on {request.gpus} x {request.device.name}: the least memory found is "
        f"{bytes_text(least.memory_bytes)} per GPU ({how}, sharding={least.setting.sharding!r}), must be at most {limit}; "
        f"{_remedy(model, numbers, request)}"
    )


def _remedy(model: ModelShape, numbers: Data, request: Request) -> str:
    """The number of GPUs that would suffice, else the fixed options that could be left open."""
    for doubling in range(1, MOST_DOUBLINGS + 1):
        try:
            more = request.replace(gpus=request.gpus * 2**doubling)
            if any(found.memory_bytes <= more.memory_limit_bytes for found in _estimates(model, numbers, more)):
                return f"use {more.gpus} GPUs, or shorter sequences"
        except ConfigError:
            break
    given = [name for name in ("tensor", "pipeline", "data", "microbatches", "recompute", "sharding") if getattr(request, name)]
    return f"leave {', '.join(given)} to the search" if given else "use shorter sequences, or a device with more memory"


def _names(kind: type) -> set[str]:
    return {each.name for each in fields(kind)}
