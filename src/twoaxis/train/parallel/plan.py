"""What crosses each boundary of a pipeline: found out once, by a pass of the whole decoder on tensors without memory.

Which tensors a depth state holds does not depend on their values, so both sides of a boundary know what travels before
the first step. A tensor that stands in two states is recognised as the same object, whatever the mixer calls it.

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
        """Its size for one microbatch."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta").nbytes

    def placeholder(self) -> Tensor:
        """A tensor without memory that looks like it."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta", requires_grad=self.has_gradient)


@dataclass(frozen=True)
class Boundary:
    """The depth state between two stages.

    Attributes:
        structure: how its leaves are nested.
        leaves: the number of the tensor at each leaf; one that stands at two leaves has one number.
    """

    structure: TreeSpec
    leaves: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """What every stage is sent, takes from what its rank keeps, and keeps itself.

    Attributes:
        blocks: the blocks of each stage.
        tensors: what is carried over any boundary, by number.
        boundaries: the state after each stage but the last.
        ranks: stage s runs on rank s % ranks.
        forwarding: what a boundary sends.
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
        """The tensors that the rank of each stage keeps from its earlier stages when this one begins."""
        return tuple(frozenset(self._kept_before(stage)) for stage in range(self.stages))

    def sent(self, boundary: int) -> tuple[int, ...]:
        """The tensors that travel over a boundary, in order."""
        return tuple(n for n in dict.fromkeys(self.boundaries[boundary].leaves) if n not in self.held[boundary + 1])

    def fetched(self, stage: int) -> tuple[int, ...]:
        """The tensors that a stage takes from what its rank keeps."""
        if stage == 0:
            return ()
        return tuple(n for n in dict.fromkeys(self.boundaries[stage - 1].leaves) if n in self.held[stage])

    def kept(self, stage: int) -> tuple[int, ...]:
        """The tensors that a stage is the first of its rank to have and that a later one fetches."""
        later = {n for other in range(stage + self.ranks, self.stages, self.ranks) for n in self.fetched(other)}
        known = dict.fromkeys(self.sent(stage - 1) if stage else ())
        if self.forwarding == "cached_own" and stage < self.stages - 1:
            known |= dict.fromkeys(self.boundaries[stage].leaves)
        return tuple(n for n in known if n in later and n not in self.held[stage])

    def sent_bytes(self, boundary: int) -> int:
        """Bytes of activations that travel over a boundary for one microbatch."""
        return sum(self.tensors[n].bytes for n in self.sent(boundary))

    def returned_bytes(self, boundary: int) -> int:
        """Bytes of gradients that come back over a boundary for one microbatch."""
        return sum(self.tensors[n].bytes for n in self.sent(boundary) if self.tensors[n].has_gradient)

    def placeholders(self, boundary: int) -> tuple[Tensor, ...]:
        """Tensors without memory that look like what travels over a boundary."""
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
    """Runs the decoder once on the meta device and compares its states.

    Args:
        decoder: the whole model.
        config: how it is cut.
        rows: of a microbatch.
        tokens: in a row.
        dtype: of the parameters.

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
    """The state before each of these blocks; all are alive at once, so that equal ids mean the same tensor."""
    layout = TokenLayout.contiguous(tokens.shape[1], device=tokens.device)
    state, _ = model.ends.enter(model.embedding(tokens), layout)
    found = []
    for start, stop in pairwise([0, *stops]):
        for block in model.blocks[start:stop]:
            state, _ = block(state, layout)
        found.append(state)
    return found
