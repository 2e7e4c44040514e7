"""What a plan assumes beside the model: the device, how many of them and how arranged, the batch, the precision, the engine."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

from twoaxis.core.errors import ConfigError, problem
from twoaxis.planner.coefficients import Data, Engine
from twoaxis.planner.formulas.step import forward_pass, prefill_state_bytes, training_step
from twoaxis.planner.hardware import Device
from twoaxis.planner.hardware.device import NumberFormat
from twoaxis.planner.layout import ParallelLayout
from twoaxis.planner.payload import Forwarding
from twoaxis.planner.precision import Precision

NUMBER_FORMATS = {2: NumberFormat.BF16, 4: NumberFormat.FP32, 8: NumberFormat.FP64}
"""Of matrix products, by the bytes of an activation."""

Recompute = Literal["off", "block"]
Sharding = Literal["none", "optimizer", "weights"]


@dataclass(frozen=True)
class Setting:
    """Where and how a model runs.

    Attributes:
        device: of which there are `layout.gpus`.
        layout: how they are arranged.
        batch: sequences of one training step over all of them.
        tokens: in each.
        precision: bytes of one number of each sort.
        engine: `fused`: one kernel for each depth read and write, the least traffic; `eager`: one for each operation.
        forwarding: what crosses stage boundaries, see `formulas.crossing`.
        recompute: what the backward pass computes once more.
        sharding: what is spread over the data-parallel ranks.
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
    transfers: Literal["overlapped", "blocking"] = "overlapped"

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ConfigError(problem("tokens", self.tokens, "at least 1", "give the length of one sequence"))
        self.layout.microbatch(self.batch)

    def replace(self, **changes: Any) -> Self:
        """The same with other fields."""
        return replace(self, **changes)

    @property
    def run(self) -> Data:
        """What `formulas.step` calls a run."""
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
        """Of matrix products."""
        return NUMBER_FORMATS[self.precision.activations]

    @property
    def rates(self) -> dict[str, float]:
        """What one device reaches."""
        return self.device.numbers(self.number_format, "eager" if self.engine == "eager" else "compiled")

    @property
    def links(self) -> dict[str, dict[str, float]]:
        """What connects the ranks of each group: tensor ranks are neighbours, then come pipeline ranks, then replicas."""
        layout = self.layout
        reach = {"tensor": layout.tensor, "pipeline": layout.tensor * layout.pipeline, "data": layout.gpus}
        return {group: self.device.link(devices).numbers() if devices > 1 else NO_LINK for group, devices in reach.items()}

    def training_step(self, numbers: Data) -> Data:
        """Seconds and bytes of one training step of a model, given by its `coefficients`."""
        return training_step(numbers, self.run, self.rates, self.links)

    def generation_step(self, numbers: Data, batch: int, context: int) -> Data:
        """Seconds of one more token for each of some sequences behind a context, on the tensor-parallel ranks."""
        work = self._work(batch, 1, context) | {"sequence": "none"}
        return forward_pass(numbers, work, self.rates, self.links["tensor"])

    def prefill(self, numbers: Data, batch: int, tokens: int) -> Data:
        """Seconds until prompts are read, on the tensor-parallel ranks."""
        return forward_pass(numbers, self._work(batch, tokens, 0), self.rates, self.links["tensor"])

    def prefill_state_bytes(self, numbers: Data, batch: int, tokens: int, chunk_tokens: int = 0) -> float:
        """The most bytes of depth state on one rank meanwhile; see `formulas.collectives.stored_bytes`."""
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
"""Between one rank and itself, where nothing is sent."""
