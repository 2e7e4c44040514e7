"""The stages of a pipeline, and the schedule of its microbatches.

Letters: P ranks, V virtual stages of each rank, C = P*V stages, M microbatches. Stage s runs on rank s % P.
"""

from itertools import pairwise
from typing import Literal, Self

from pydantic import Field, model_validator

from twoaxis.core.config import Config
from twoaxis.core.errors import ConfigError, problem
from twoaxis.planner.formulas.crossing import even_cuts
from twoaxis.planner.payload import Forwarding

Schedule = Literal["gpipe", "1f1b", "interleaved"]
Recompute = Literal["off", "block"]


class PipelineConfig(Config):
    """One pipeline.

    Source: GPipe, arXiv:1811.06965; one forward and one backward pass in turn (1F1B), plain and interleaved,
            arXiv:2104.04473, section 2.2; cross-stage caching: Attention Residuals, arXiv:2603.15031, section 4

    Args:
        ranks: P, the processes in the pipeline.
        schedule: `gpipe` runs all forward passes first; `1f1b` and `interleaved` alternate, the latter over V stages on
            each rank.
        virtual: V; above 1 with `interleaved` only.
        microbatches: M, parts of a batch.
        forwarding: the tensors sent over a boundary: the whole state (`naive`); those that the receiving rank has not received
            for an earlier stage, as the paper counts (`cached`); or those that it has neither received nor computed
            (`cached_own`).
        recompute: activation checkpointing of nothing (`off`) or of every `block`.

    Raises:
        ConfigError: numbers that do not fit the schedule.

    Example:
        >>> PipelineConfig(ranks=2, schedule="interleaved", virtual=2, microbatches=4).stages
        4
    """

    ranks: int = Field(ge=1)
    schedule: Schedule = "1f1b"
    virtual: int = Field(default=1, ge=1)
    microbatches: int = Field(ge=1)
    forwarding: Forwarding = "naive"
    recompute: Recompute = "off"

    @model_validator(mode="after")
    def _fits_the_schedule(self) -> Self:
        if self.schedule == "1f1b" and self.microbatches < self.ranks:
            allowed = f"at least ranks={self.ranks} with schedule='1f1b'"
            raise ConfigError(problem("microbatches", self.microbatches, allowed, "raise it or use schedule='gpipe'"))
        if self.schedule != "interleaved":
            if self.virtual != 1:
                allowed = f"1 with schedule={self.schedule!r}"
                raise ConfigError(problem("virtual", self.virtual, allowed, "use schedule='interleaved'"))
        elif self.microbatches % self.rounds:
            allowed = f"a multiple of the {self.rounds} rounds of {self.ranks} or more microbatches"
            raise ConfigError(problem("microbatches", self.microbatches, allowed, f"use a multiple of ranks={self.ranks}"))
        if self.forwarding != "naive" and (self.virtual == 1 or self.ranks == 1):
            name = "virtual" if self.virtual == 1 else "ranks"
            allowed = f"2 or more with forwarding={self.forwarding!r}"
            remedy = "use forwarding='naive', which then sends no tensor twice to a rank"
            raise ConfigError(problem(name, getattr(self, name), allowed, remedy))
        return self

    @property
    def rounds(self) -> int:
        """Rounds of the interleaved schedule: each runs P microbatches through one stage of a rank before the next."""
        return max(1, self.microbatches // self.ranks)

    @property
    def stages(self) -> int:
        """The number of stages, C."""
        return self.ranks * self.virtual

    def blocks(self, n_blocks: int) -> tuple[range, ...]:
        """The blocks of each stage: an equal number, or one more in the earlier stages.

        Raises:
            ConfigError: fewer blocks than stages.

        Example:
            >>> PipelineConfig(ranks=2, microbatches=2).blocks(5)
            (range(0, 3), range(3, 5))
        """
        if self.stages > n_blocks:
            allowed = f"at most the {n_blocks} blocks of the decoder"
            raise ConfigError(problem("stages", self.stages, allowed, "lower ranks or virtual, or raise n_layers"))
        cuts = even_cuts(n_blocks, self.stages)
        return tuple(range(start, stop) for start, stop in pairwise(cuts))
