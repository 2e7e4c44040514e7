"""How a decoder is cut into pipeline stages, and what crosses each boundary, found by one pass on the meta device.

Letters: P ranks, V virtual stages of each rank, C = P*V stages, M microbatches, B rows of a microbatch, T position. Stage s
runs on rank s % P, and boundary s lies between stage s and stage s + 1.

The tensors of a depth state do not depend on their values, so both sides of a boundary agree before the first step. A tensor
that belongs to two states is identified as the same object.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten

from twoaxis.core.config import Config
from twoaxis.core.errors import ConfigError, problem
from twoaxis.core.layout import TokenLayout
from twoaxis.ledger.meter import placed, without_memory
from twoaxis.model import Decoder, DecoderConfig
from twoaxis.planner.formulas.collectives import even_cuts
from twoaxis.planner.ledger import Forwarding
from twoaxis.train.parallel.spread import Recompute, Schedule


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


@dataclass(frozen=True)
class Carried:
    """A tensor of the depth state at one or more boundaries."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    has_gradient: bool

    @property
    def bytes(self) -> int:
        """The size for one microbatch."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta").nbytes

    def placeholder(self) -> Tensor:
        """A meta tensor with the same shape and dtype."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta", requires_grad=self.has_gradient)


@dataclass(frozen=True)
class Boundary:
    """The depth state between two stages.

    Attributes:
        structure: the nesting of its leaves.
        leaves: the number of the tensor at each leaf; the same tensor at two leaves has one number.
    """

    structure: TreeSpec
    leaves: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """The tensors that every stage receives, sends, fetches from the cache of its rank, and adds to it.

    Attributes:
        blocks: the blocks of each stage.
        tensors: all tensors that cross a boundary, by number.
        boundaries: the state after each stage but the last.
        ranks: stage s runs on rank s % ranks.
        forwarding: the tensors sent over a boundary; see `PipelineConfig`.
    """

    blocks: tuple[range, ...]
    tensors: tuple[Carried, ...]
    boundaries: tuple[Boundary, ...]
    ranks: int
    forwarding: Forwarding

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.blocks)

    @cached_property
    def held(self) -> tuple[frozenset[int], ...]:
        """The tensors that the rank of each stage has cached when the stage begins."""
        return tuple(frozenset(self._kept_before(stage)) for stage in range(self.stages))

    def sent(self, boundary: int) -> tuple[int, ...]:
        """The tensors sent over a boundary, in order."""
        return tuple(n for n in dict.fromkeys(self.boundaries[boundary].leaves) if n not in self.held[boundary + 1])

    def fetched(self, stage: int) -> tuple[int, ...]:
        """The tensors that a stage takes from the cache of its rank."""
        if stage == 0:
            return ()
        return tuple(n for n in dict.fromkeys(self.boundaries[stage - 1].leaves) if n in self.held[stage])

    def kept(self, stage: int) -> tuple[int, ...]:
        """The tensors that a stage caches: new on its rank, and fetched by a later stage."""
        later = {n for other in range(stage + self.ranks, self.stages, self.ranks) for n in self.fetched(other)}
        known = dict.fromkeys(self.sent(stage - 1) if stage else ())
        if self.forwarding == "cached_own" and stage < self.stages - 1:
            known |= dict.fromkeys(self.boundaries[stage].leaves)
        return tuple(n for n in known if n in later and n not in self.held[stage])

    def sent_bytes(self, boundary: int) -> int:
        """Bytes of activations sent over a boundary for one microbatch."""
        return sum(self.tensors[n].bytes for n in self.sent(boundary))

    def returned_bytes(self, boundary: int) -> int:
        """Bytes of gradients returned over a boundary for one microbatch."""
        return sum(self.tensors[n].bytes for n in self.sent(boundary) if self.tensors[n].has_gradient)

    def placeholders(self, boundary: int) -> tuple[Tensor, ...]:
        """Meta tensors like those sent over a boundary."""
        return tuple(self.tensors[n].placeholder() for n in self.sent(boundary))

    def _kept_before(self, stage: int) -> set[int]:
        found: set[int] = set()
        for earlier in range(stage % self.ranks, stage, self.ranks) if self.forwarding != "naive" else ():
            if earlier:
                found.update(self.boundaries[earlier - 1].leaves)
            if self.forwarding == "cached_own":
                found.update(self.boundaries[earlier].leaves)
        return found


def make_plan(
    decoder: DecoderConfig, config: PipelineConfig, rows: int, tokens: int, dtype: torch.dtype, autocast: bool = False
) -> Plan:
    """Runs the decoder once without memory and compares its states, for microbatches of `rows` rows.

    Args:
        decoder: the whole model.
        config: its stages.
        rows: of a microbatch.
        tokens: of a row.
        dtype: of the parameters.
        autocast: whether the stages run under bfloat16 autocast.

    Example:
        >>> decoder = DecoderConfig(vocab_size=16, d_model=8, n_layers=4, depth={"kind": "denseformer"})
        >>> plan = make_plan(decoder, PipelineConfig(ranks=2, microbatches=2), rows=1, tokens=3, dtype=torch.float32)
        >>> plan.sent_bytes(0)  # the embedding, two block outputs and the mixture of the three: 4 * 3 * 8 numbers
        384
    """
    blocks = config.blocks(decoder.n_layers)
    with torch.device("meta"):
        model = Decoder(decoder).to(dtype)
    with without_memory("autocast" if autocast else "eager"):
        placed(model, dtype)
        states = _states(model, torch.empty(rows, tokens, dtype=torch.int64), [part.stop for part in blocks[:-1]])
    numbers: dict[int, int] = {}
    carried: list[Carried] = []
    boundaries = []
    for state in states:
        leaves, structure = tree_flatten(state)
        for leaf in leaves:
            if id(leaf) not in numbers:
                numbers[id(leaf)] = len(carried)
                carried.append(Carried(tuple(leaf.shape), leaf.dtype, leaf.requires_grad))
        boundaries.append(Boundary(structure, tuple(numbers[id(leaf)] for leaf in leaves)))
    return Plan(blocks, tuple(carried), tuple(boundaries), config.ranks, config.forwarding)


def _states(model: Decoder, tokens: Tensor, stops: Sequence[int]) -> list[Any]:
    """The state before each of these blocks; all are alive at once, so equal ids mean the same tensor."""
    layout = TokenLayout.contiguous(tokens.shape[1], device=tokens.device).of(tokens)
    state, _ = model.ends.enter(model.embedding(tokens), layout)
    found = []
    for start, stop in pairwise([0, *stops]):
        for block in model.blocks[start:stop]:
            state, _ = block(state, layout)
        found.append(state)
    return found
