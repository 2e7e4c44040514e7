"""The setting of a plan: device, arrangement of GPUs, batch, precision, recomputation."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self, get_args

from pydantic import Field, model_validator

from twoaxis.core.config import Config
from twoaxis.core.errors import ConfigError, nearest, problem
from twoaxis.planner.coefficients import Data, Engine
from twoaxis.planner.formulas.counts import cache_bytes_of
from twoaxis.planner.formulas.training_step import forward_pass, prefill_state_bytes, stage_memory, training_step
from twoaxis.planner.hardware import Device
from twoaxis.planner.hardware.device import NumberFormat
from twoaxis.planner.ledger import Forwarding
from twoaxis.planner.model.shape import ModelShape
from twoaxis.planner.quantities import Precision

SequenceSharding = Literal["none", "tensor"]
"""Whether activations between sublayers are whole on every tensor-parallel rank, or sharded along the sequence."""


class ParallelLayout(Config):
    """A grid of GPUs, data x pipeline x tensor.

    Args:
        gpus: all of them.
        tensor: ranks that share every matrix.
        pipeline: ranks that the layers are cut over, P.
        virtual: stages on each of those, V; with more than one they run the interleaved schedule.
        data: replicas, each with its own sequences.
        microbatches: of the batch of one data rank, M.
        sequence: `none`, or `tensor`: sequence parallel over the tensor ranks.
        schedule: the order in which a rank with one stage runs its microbatches.

    Raises:
        ConfigError: a grid of another size, or options that exclude each other.

    Example:
        >>> ParallelLayout(gpus=16, tensor=2, pipeline=4, data=2, microbatches=8).stages
        4
    """

    gpus: int = Field(ge=1)
    tensor: int = Field(default=1, ge=1)
    pipeline: int = Field(default=1, ge=1)
    virtual: int = Field(default=1, ge=1)
    data: int = Field(default=1, ge=1)
    microbatches: int = Field(default=1, ge=1)
    sequence: SequenceSharding = "none"
    schedule: Literal["1f1b", "gpipe"] = "1f1b"

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        grid = self.data * self.pipeline * self.tensor
        if self.gpus != grid:
            parts = f"data * pipeline * tensor = {self.data} * {self.pipeline} * {self.tensor} = {grid}"
            raise ConfigError(problem("gpus", self.gpus, parts, "change one of them"))
        if self.virtual > 1 and self.pipeline == 1:
            raise ConfigError(problem("virtual", self.virtual, "1 with pipeline=1", "use more pipeline ranks"))
        if self.virtual > 1 and self.schedule == "gpipe":
            raise ConfigError(problem("schedule", "gpipe", "'1f1b' with virtual > 1", "use virtual=1"))
        if self.virtual > 1 and self.microbatches % self.pipeline:
            allowed = f"a multiple of pipeline={self.pipeline} with virtual > 1"
            raise ConfigError(problem("microbatches", self.microbatches, allowed, "change one of them, or use virtual=1"))
        if self.sequence == "tensor" and self.tensor == 1:
            raise ConfigError(problem("sequence", "tensor", "'none' with tensor=1", "use more tensor ranks"))
        return self

    @property
    def stages(self) -> int:
        """Stages of the pipeline, C."""
        return self.pipeline * self.virtual

    def microbatch(self, batch: int) -> int:
        """Sequences of one microbatch, given those of a step over all data ranks.

        Raises:
            ConfigError: a batch that does not divide.
        """
        parts = self.data * self.microbatches
        if batch < 1 or batch % parts:
            allowed = f"a multiple of data * microbatches = {self.data} * {self.microbatches} = {parts}"
            raise ConfigError(problem("batch", batch, allowed, "change one of them"))
        return batch // parts

    def check(self, model: ModelShape, tokens: int) -> None:
        """Raises ConfigError if a model, or sequences of this length, cannot be divided in this way."""
        if self.stages > model.n_layers:
            allowed = f"at most the {model.n_layers} layers of {model.name}"
            raise ConfigError(problem("pipeline * virtual", self.stages, allowed, "use fewer stages"))
        for slot in model.stack.slots:
            heads = slot.heads
            if heads is None:
                continue
            if heads.n_heads % self.tensor:
                allowed = f"a divisor of the {heads.n_heads} heads of {slot.kind!r}"
                raise ConfigError(problem("tensor", self.tensor, allowed, "use fewer tensor ranks"))
            # With more ranks than key-value heads, each head lies on several ranks.
            if heads.n_kv_heads % self.tensor and self.tensor % heads.n_kv_heads:
                allowed = f"a divisor or a multiple of the {heads.n_kv_heads} key-value heads of {slot.kind!r}"
                raise ConfigError(problem("tensor", self.tensor, allowed, "use another number of tensor ranks"))
        if self.sequence == "tensor" and tokens % self.tensor:
            raise ConfigError(problem("tokens", tokens, f"a multiple of tensor={self.tensor}", "use sequence='none'"))


NUMBER_FORMATS = {1: NumberFormat.FP8, 2: NumberFormat.BF16, 4: NumberFormat.FP32, 8: NumberFormat.FP64}
"""The number format of matrix products, by the bytes of an activation."""

Recompute = Literal["off", "block"]
Sharding = Literal["none", "optimizer", "weights"]
Transfers = Literal["overlapped", "blocking"]

WORDS: dict[str, tuple[str, ...]] = {
    "sequence": get_args(SequenceSharding),
    "schedule": ("1f1b", "gpipe"),
    "recompute": get_args(Recompute),
    "sharding": get_args(Sharding),
    "forwarding": get_args(Forwarding),
    "engine": get_args(Engine),
    "transfers": get_args(Transfers),
}
"""The values of each option that is a word."""


def check_words(given: Any) -> None:
    """Raises ConfigError when an option of a request or a setting has none of its `WORDS`; None leaves it open."""
    for name, known in WORDS.items():
        value = getattr(given, name, None)
        if value is not None and value not in known:
            raise ConfigError(problem(name, value, f"one of {', '.join(known)}", nearest(str(value), known)))


@dataclass(frozen=True)
class Setting:
    """The setting in which a model runs.

    Attributes:
        device: of which there are `layout.gpus`.
        layout: how they are arranged.
        batch: sequences of one training step over all of them.
        tokens: in each.
        precision: bytes per number.
        engine: `fused`: one kernel for each depth read and write, the least traffic; `eager`: one for each operation.
        forwarding: what stage boundaries send, see `formulas.collectives.hop_bytes`.
        recompute: what the backward pass recomputes.
        sharding: what is sharded over the data-parallel ranks.
        transfers: `overlapped` with computation, or `blocking`.
    """

    device: Device
    layout: ParallelLayout
    batch: int
    tokens: int
    precision: Precision = field(default_factory=Precision)
    engine: Engine = "fused"
    forwarding: Forwarding = "naive"
    recompute: Recompute = "off"
    sharding: Sharding = "optimizer"
    transfers: Transfers = "overlapped"

    def __post_init__(self) -> None:
        check_words(self)
        if self.tokens < 1:
            raise ConfigError(problem("tokens", self.tokens, "at least 1", "give the length of one sequence"))
        if self.precision.activations not in NUMBER_FORMATS:
            allowed = f"one of {', '.join(map(str, NUMBER_FORMATS))} bytes"
            raise ConfigError(problem("precision.activations", self.precision.activations, allowed, "use 2 for bfloat16"))
        self.layout.microbatch(self.batch)

    def replace(self, **changes: Any) -> Self:
        """The same with other fields."""
        return replace(self, **changes)

    @property
    def run(self) -> Data:
        """The `run` of `formulas.training_step`."""
        layout = self.layout
        return {
            "batch": layout.microbatch(self.batch),
            "tokens": self.tokens,
            "microbatches": layout.microbatches,
            "pipeline": layout.pipeline,
            "virtual": layout.virtual,
            "schedule": "interleaved" if layout.virtual > 1 else layout.schedule,
            "transfers": self.transfers,
            "forwarding": self.forwarding,
            "data": layout.data,
            "sharding": self.sharding,
            "recompute": self.recompute,
            "tensor": layout.tensor,
            "sequence": layout.sequence,
            "engine": self.engine,
        }

    @property
    def number_format(self) -> NumberFormat:
        """The number format of matrix products."""
        activations = self.precision.activations
        # Products of activations of one byte with wider weights run in 16 bits.
        return NUMBER_FORMATS[2 if activations == 1 < self.precision.weights else activations]

    @property
    def rates(self) -> dict[str, float]:
        """The rates that one device reaches."""
        return self.device.numbers(self.number_format, "eager" if self.engine == "eager" else "compiled")

    @property
    def links(self) -> dict[str, dict[str, float]]:
        """The link of each group of ranks; tensor ranks are adjacent, then pipeline ranks, then replicas."""
        layout = self.layout
        reach = {"tensor": layout.tensor, "pipeline": layout.tensor * layout.pipeline, "data": layout.gpus}
        return {group: self.device.link(devices).numbers() if devices > 1 else NO_LINK for group, devices in reach.items()}

    def training_step(self, numbers: Data) -> Data:
        """Seconds and bytes of one training step of a model, given by its `coefficients`."""
        return training_step(numbers, self.run, self.rates, self.links)

    def generation_step(self, numbers: Data, batch: int, context: int) -> Data:
        """Seconds of one more token per sequence after a context, on the tensor-parallel ranks."""
        work = self._work(batch, 1, context) | {"sequence": "none"}
        return forward_pass(numbers, work, self.rates, self.links["tensor"])

    def generation_bytes(self, numbers: Data, batch: int, tokens: int) -> float:
        """Weights, and caches of so many sequences after `tokens`, on one of the tensor-parallel ranks."""
        ranks = self.layout.tensor
        whole = stage_memory(numbers, self.run | {"pipeline": 1, "virtual": 1})
        return whole["params"][0] * numbers["weights_bytes"] + batch * cache_bytes_of(numbers, tokens, ranks)

    def prefill(self, numbers: Data, batch: int, tokens: int) -> Data:
        """Seconds of a prefill, on the tensor-parallel ranks."""
        return forward_pass(numbers, self._work(batch, tokens, 0), self.rates, self.links["tensor"])

    def prefill_state_bytes(self, numbers: Data, batch: int, tokens: int, chunk_tokens: int = 0) -> float:
        """Peak bytes of depth state on one rank during a prefill; see `formulas.collectives.stored_bytes`."""
        return prefill_state_bytes(numbers, self._work(batch, tokens, 0), chunk_tokens)

    def _work(self, batch: int, tokens: int, context: int) -> Data:
        layout = self.layout
        return {
            "batch": batch,
            "tokens": tokens,
            "context": context,
            "tensor": layout.tensor,
            "sequence": layout.sequence,
            "engine": self.engine,
        }


NO_LINK = {"bytes_per_second": 1.0, "pair_bytes_per_second": 1.0, "latency_seconds": 0.0}
"""The link of a single rank, over which nothing is sent."""
