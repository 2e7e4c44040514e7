"""Parallel residual streams: they start as the embeddings, and every sublayer reads, mixes and writes all of them.

Letters: B batch, T position, D width, n streams, m fractions of a stream, P = n m pieces.
"""

from abc import abstractmethod
from typing import Any, NamedTuple

from jaxtyping import Float
from torch import Tensor

from twoaxis.core.views import WeightedSum
from twoaxis.depth.base import DepthEnds, DepthMixer, Explanation, Layout, Read, Stream, Views, Write
from twoaxis.ops.precision import Impl
from twoaxis.ops.streams import mix_pieces, stream_sums, sum_streams

Streams = tuple[Stream, ...]
"""The depth state: n streams, which may be one tensor n times at the start."""


class Mixing(NamedTuple):
    """The streams and weights that a read passes to its write.

    Attributes:
        streams: as they were read.
        residual: weights between pieces [source, destination]; None is the identity.
        write: weights of the update, one row for the whole of it or one for each of its fractions.
    """

    streams: Streams
    residual: Float[Tensor, "P P *each"] | None
    write: Float[Tensor, "rows P *each"]


class StreamsMixer(DepthMixer):
    """Writes with the weights that its read computed.

    Args:
        impl: `fused` or `reference`.
        n_fractions: m.
    """

    def __init__(self, impl: Impl, n_fractions: int = 1) -> None:
        super().__init__()
        self.impl: Impl = impl
        self.n_fractions = n_fractions

    def write(self, state: Streams, update: Stream, context: Views, carry: Mixing) -> Streams:
        """Returns the mixed streams, each with its share of the update."""
        return mix_pieces(carry.streams, update, carry.residual, carry.write, self.n_fractions, self.impl)

    @abstractmethod
    def read_sum(self, state: Streams, view: Stream) -> WeightedSum:
        """Returns the weighted sum of the view that `read` returned."""

    def explain(self, done: Read | Write) -> Explanation:
        """Returns the weighted sum of a read, or those of the new streams of a write."""
        if isinstance(done, Read):
            return Explanation((self.read_sum(done.state, done.views),))
        mixing: Mixing = done.carry
        return Explanation(
            stream_sums(mixing.streams, done.update, mixing.residual, mixing.write, done.next_state, self.n_fractions)
        )


class ParallelEnds(DepthEnds):
    """The state is n parallel streams that start as the embeddings and end as their sum.

    Args:
        n_streams: n.
        n_fractions: m, where fractions are read and mixed.
    """

    def __init__(self, n_streams: int, n_fractions: int = 1) -> None:
        super().__init__()
        self.n_streams, self.n_fractions = n_streams, n_fractions

    def enter(self, embeddings: Stream, layout: Layout = None, cache: Any = None) -> tuple[Streams, Any]:
        """Returns the embeddings n times."""
        return (embeddings,) * self.n_streams, cache

    def leave(self, state: Streams, layout: Layout = None, cache: Any = None) -> tuple[Stream, Any]:
        """Returns the sum of the streams."""
        return sum_streams(state), cache
