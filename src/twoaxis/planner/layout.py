"""How the GPUs of a run are arranged: tensor, pipeline and data parallel."""

from typing import Literal, Self

from pydantic import Field, model_validator

from twoaxis.core.config import Config
from twoaxis.core.errors import ConfigError, problem
from twoaxis.planner.formulas.schedules import schedule_order
from twoaxis.planner.model.shape import ModelShape

SequenceSharding = Literal["none", "tensor"]
"""Whether what lies between sublayers is whole on every tensor-parallel rank, or cut along the sequence over them."""


class ParallelLayout(Config):
    """A grid of GPUs, data x pipeline x tensor.

    Args:
        gpus: all of them.
        tensor: ranks that share every matrix.
        pipeline: ranks that the layers are cut over, P.
        virtual: stages on each of those, V; with more than one they run the interleaved schedule.
        data: ranks that each see other sequences.
        microbatches: that the batch of one data rank is cut into, M.
        sequence: `none`, or `tensor`: sequence parallel over the tensor ranks.
        schedule: the order in which a rank with one stage runs its microbatches.

    Raises:
        ConfigError: a grid of another size, or options that do not fit each other.

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

    def order(self) -> list[list[list]]:
        """The actions of each pipeline rank; see `formulas.schedules`."""
        schedule = "interleaved" if self.virtual > 1 else self.schedule
        return schedule_order(schedule, self.pipeline, self.virtual, self.microbatches)

    def microbatch(self, batch: int) -> int:
        """Sequences in one microbatch when all data ranks together see so many in a step.

        Raises:
            ConfigError: a batch that does not divide.
        """
        parts = self.data * self.microbatches
        if batch < 1 or batch % parts:
            allowed = f"a multiple of data * microbatches = {self.data} * {self.microbatches} = {parts}"
            raise ConfigError(problem("batch", batch, allowed, "change one of them"))
        return batch // parts

    def check(self, model: ModelShape, tokens: int) -> None:
        """Raises ConfigError when a model, or sequences of so many tokens, cannot be cut in this way."""
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
