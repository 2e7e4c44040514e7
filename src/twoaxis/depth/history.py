"""Sources in the depth state: which of them are kept, for how long, and what is added inside a unit.

Letters: B batch, T position, D width.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Annotated, Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from twoaxis.core.errors import ConfigError, problem
from twoaxis.core.parameters import DeclaredModule, Values
from twoaxis.core.position import LayerStack, SublayerPosition
from twoaxis.core.views import WeightedSum, per_token, span_name
from twoaxis.depth.base import DepthEnds, DepthMixer, Explanation, Layout, State, Stream, Views
from twoaxis.ops.blend import annealed, blend_parameter
from twoaxis.ops.mix import mix
from twoaxis.ops.precision import outside_autocast, statistics_dtype

Granularity = Literal["block", "sublayer"]
"""One unit of depth."""


class Unit(NamedTuple):
    """The unit of depth of a sublayer, counted from 0, and whether the sublayer opens and closes it."""

    number: int
    opens: bool
    closes: bool


def unit_of(site: SublayerPosition, granularity: Granularity) -> Unit:
    """Returns the block of a sublayer, or the sublayer as a unit of its own.

    Example:
        >>> unit_of(LayerStack(8, 1e-6, (2, 2)).sites[2], "block")
        Unit(number=1, opens=True, closes=False)
    """
    if granularity == "sublayer":
        return Unit(site.index, True, True)
    return Unit(site.block, site.opens_block, site.closes_block)


def n_units(stack: LayerStack, granularity: Granularity) -> int:
    """Counts the units of a stack."""
    return stack.n_blocks if granularity == "block" else stack.n_sublayers


Sums = Mapping[int, tuple[int, ...]]
"""The outputs that are summed after each unit with a sum, oldest first; 0 is the embedding, 1 the output of the first unit."""


def strided_sums(n_units: int, period: int, stride: int, newest: int | None = None) -> Sums:
    """Returns a sum after every `period`-th unit, of every `stride`-th output counted back from the newest.

    Args:
        n_units: of the whole stack.
        period: units between two sums.
        stride: outputs from one source to the next.
        newest: a sum reads the embedding and this many newest outputs; None reads them all.

    Example:
        >>> strided_sums(4, period=2, stride=2), strided_sums(3, 1, 1, newest=1)[3]
        ({2: (0, 2), 4: (0, 2, 4)}, (0, 3))
    """
    sums = {end: tuple(range(end % stride, end + 1, stride)) for end in range(period, n_units + 1, period)}
    if newest is None:
        return sums
    return {end: tuple(source for source in read if source == 0 or source > end - newest) for end, read in sums.items()}


def read_later(sums: Sums, unit: int) -> tuple[int, ...]:
    """Returns the outputs up to this unit that sums after later units read, which the state has to keep."""
    return tuple(sorted({source for end, read in sums.items() if end > unit for source in read if source <= unit}))


class Selection(NamedTuple):
    """Indices into the outputs kept before a unit followed by its own: those that are summed, and those kept after it."""

    read: tuple[int, ...]
    kept: tuple[int, ...]


def selection(sums: Sums, unit: int) -> Selection:
    """Returns which outputs are summed after a unit, and which are kept from there on."""
    held = (*read_later(sums, unit - 1), unit)
    read, kept = sums.get(unit, ()), read_later(sums, unit)
    return Selection(tuple(map(held.index, read)), tuple(map(held.index, kept)))


class History(NamedTuple):
    """A depth state of sources and, inside a unit, of its running tensors.

    Attributes:
        sources: that are still read, oldest first.
        inside: inside a unit the sum of its updates so far, then its input where that is no source; else empty.
    """

    sources: tuple[Stream, ...]
    inside: tuple[Stream, ...] = ()

    def added(self, update: Stream) -> Stream:
        """Returns the sum of the updates of the unit including this one, in the dtype of the state."""
        # Under autocast the update may be narrower than the stream that it joins.
        update = update.to((*self.inside, *self.sources)[0].dtype)
        return self.inside[0] + update if self.inside else update


class HistoryEnds(DepthEnds):
    """The embedding is the first source; the newest source is the final hidden state."""

    def enter(self, embeddings: Stream, layout: Layout = None, cache: Any = None) -> tuple[History, Any]:
        """Returns the embeddings as the only source."""
        return History((embeddings,)), cache

    def leave(self, state: History, layout: Layout = None, cache: Any = None) -> tuple[Stream, Any]:
        """Returns the newest source."""
        return state.sources[-1], cache


class Combination(DeclaredModule):
    """A convex sum: a softmax with one learned logit per source; one source has none, since its weight is 1.

    Args:
        n_sources: summed.
        newest_logit: start of the logit of the newest source, beyond that of the others.
        blends: whether a learned weight interpolates from the plain sum of all sources, at 0, to the convex one.
        update_scale: of updates that have lost it in a norm: the logarithm is the start of the logits after the first one.
    """

    def __init__(self, n_sources: int, newest_logit: float, blends: bool, update_scale: float = 1.0) -> None:
        super().__init__()
        self.logits: Tensor | None = None
        if n_sources > 1:
            later = math.log(update_scale)
            start = (0.0, *(later for _ in range(n_sources - 2)), later + newest_logit)
            self.logits = self.parameter("logits", (n_sources,), Values(start), "mixing")
        self.blend = blend_parameter(self) if blends else None

    def forward(self, sources: tuple[Stream, ...], log_rms: tuple[Float[Tensor, "B T"], ...] = ()) -> Stream:
        """Returns the sum; with the logarithms of their rms, sources weigh less by their rms."""
        if self.logits is None:
            return sources[0]
        return mix(sources, self.weights(self.logits, log_rms).unsqueeze(0))[0]

    @outside_autocast
    def weights(self, logits: Float[Tensor, " n"], log_rms: tuple[Float[Tensor, "B T"], ...] = ()) -> Float[Tensor, "n *each"]:
        """Returns the weights, in the precision of statistics."""
        wide = logits.to(statistics_dtype(logits))
        if log_rms:
            # softmax(w - log rms) is softmax(w) / rms, normalised again.
            wide = wide.reshape(-1, 1, 1) - torch.stack(log_rms)
        convex = torch.softmax(wide, dim=0)
        return convex if self.blend is None else annealed(torch.ones_like(convex), convex, self.blend)

    def explain(self, state: Any, made: Stream, names: tuple[str, ...], finish: Any = None) -> Explanation:
        """Returns the sum over the sources of a state with its weights; nothing with one source."""
        if self.logits is None:
            return Explanation()
        weights = per_token(self.weights(self.logits, getattr(state, "log_rms", ())), made)
        return Explanation((WeightedSum(made, "read", names, state.sources, weights, finish=finish),))


class StreamWrite(DepthMixer):
    """Reads the `stream` of a state and adds to it; the rest of the state is unchanged."""

    def read(self, state: State, layout: Layout = None, cache: Any = None) -> tuple[Views, Any, Any]:
        """Returns the stream."""
        return state.stream, None, cache

    def write(self, state: State, update: Tensor, context: Views, carry: Any) -> State:
        """Returns the state with the update added to its stream."""
        return state._replace(stream=state.stream + update)


Size = Annotated[int, Field(ge=1)]
BlockSize = Size | Annotated[tuple[Size, ...], Field(min_length=1)]
"""One size for all source blocks, of which the last may be shorter, or the size of each."""

Count = Literal["sublayer", "layer"]
"""The unit of a block size."""


class SourceBlocks(NamedTuple):
    """Sublayers whose outputs are summed into one source each.

    Attributes:
        openings: the sublayers that open a block.
        stack: all sublayers.
    """

    openings: tuple[int, ...]
    stack: LayerStack

    def counts(self, index: int) -> tuple[int, ...]:
        """Returns the outputs in each source at sublayer `index`: the embedding, completed blocks, the running one if any."""
        starts = (opening for opening in self.openings if opening < index)
        return (1, *(end - start for start, end in pairwise((*starts, index))))

    def completed(self, site: SublayerPosition) -> int:
        """Counts the sources that are complete when this transformer block opens."""
        opening = site.index - site.place
        return len(self.counts(opening)) - (opening > 0 and opening not in self.openings)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the blocks, each by all of its sublayers, also while it is incomplete."""
        ends = (*self.openings[1:], self.stack.n_sublayers)
        return tuple(span_name("sublayer", start, end - 1) for start, end in zip(self.openings, ends, strict=True))


def source_blocks(size: int | Sequence[int], count: Count, stack: LayerStack) -> SourceBlocks:
    """Groups sublayers into blocks of these sizes.

    Example:
        >>> blocks = source_blocks(2, "layer", LayerStack(8, 1e-6, (2, 3, 2)))
        >>> blocks.openings, blocks.names, blocks.counts(6)
        ((0, 5), ('sublayers 0-4', 'sublayers 5-6'), (1, 5, 1))
    """
    depth = stack.n_sublayers if count == "sublayer" else stack.n_blocks
    sizes = (size,) * -(-depth // size) if isinstance(size, int) else size
    begins = (0, *accumulate(sizes))[: len(sizes)]
    if count == "layer":
        starts = (0, *accumulate(stack.block_lengths))
        begins = tuple(starts[begin] for begin in begins)
    return SourceBlocks(begins, stack)


def check_blocks(size: int | Sequence[int], count: Count, stack: LayerStack) -> None:
    """Raises ConfigError when sizes that are given one by one do not add up to the depth of the stack."""
    depth = stack.n_sublayers if count == "sublayer" else stack.n_blocks
    if not isinstance(size, int) and sum(size) != depth:
        allowed = f"sizes that add up to the {depth} {count}s of the model"
        raise ConfigError(problem("block_size", tuple(size), allowed, "correct them, or give one size for all blocks"))
