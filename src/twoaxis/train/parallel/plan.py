"""The tensors that cross each boundary of a pipeline, found by one pass of the whole decoder on the meta device.

The tensors of a depth state do not depend on their values, so both sides of a boundary agree before the first step. A tensor
that belongs to two states is identified as the same object.

Letters: B rows of a microbatch, T position; boundary s lies between stage s and stage s + 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten

from twoaxis.core.layout import TokenLayout
from twoaxis.model import Decoder, DecoderConfig
from twoaxis.planner.payload import Forwarding
from twoaxis.train.parallel.config import PipelineConfig


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


def make_plan(decoder: DecoderConfig, config: PipelineConfig, rows: int, tokens: int, dtype: torch.dtype) -> Plan:
    """Runs the decoder once on the meta device and compares its states, for microbatches of `rows` rows.

    Example:
        >>> decoder = DecoderConfig(vocab_size=16, d_model=8, n_layers=4, depth={"kind": "denseformer"})
        >>> plan = make_plan(decoder, PipelineConfig(ranks=2, microbatches=2), rows=1, tokens=3, dtype=torch.float32)
        >>> plan.sent_bytes(0)  # the embedding, two block outputs and the mixture of the three: 4 * 3 * 8 numbers
        384
    """
    blocks = config.blocks(decoder.n_layers)
    with torch.device("meta"):
        model = Decoder(decoder).to(dtype)
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
    layout = TokenLayout.contiguous(tokens.shape[1], device=tokens.device)
    state, _ = model.ends.enter(model.embedding(tokens), layout)
    found = []
    for start, stop in pairwise([0, *stops]):
        for block in model.blocks[start:stop]:
            state, _ = block(state, layout)
        found.append(state)
    return found
