"""Parallel residual streams: they start as the embeddings, and every sublayer reads, mixes and writes all of them.

Letters: B batch, T position, D width, n streams, m fractions of a stream, P = n m pieces.
"""

from abc import abstractmethod
from typing import Any, NamedTuple

from jaxtyping import Float
from torch import Tensor

from twoaxis.core.views import WeightedSum
from twoaxis.depth.base import DepthEnds, DepthMixer, Explanation, Layout, Read, State, Stream, Views, Write
from twoaxis.ops.precision import Impl
from twoaxis.ops.streams import mean_streams, mix_pieces, stream_sums, sum_streams

Streams = tuple[Stream, ...]
"""The depth state: n streams, which may be one tensor n times at the start. A mixer may add a tensor of its own."""


class Mixing(NamedTuple):
    """The streams and weights that a read passes to its write.

    Attributes:
        streams: as they were read.
        residual: weights between pieces [source, destination]; None is the identity.
        write: weights of the update, one row for the whole of it or one for each of its fractions.
        next_read: the weights with which the next sublayer reads, where the state carries them behind its streams.
    """

    streams: Streams
    residual: Float[Tensor, "P P *each"] | None
    write: Float[Tensor, "rows P *each"]
    next_read: Float[Tensor, "B T n"] | None = None


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

    def write(self, state: State, update: Stream, context: Views, carry: Mixing) -> State:
        """Returns the mixed streams, each with its share of the update, and what the next read needs."""
        streams = mix_pieces(carry.streams, update, carry.residual, carry.write, self.n_fractions, self.impl)
        return streams if carry.next_read is None else (*streams, carry.next_read)

    @abstractmethod
    def read_sum(self, state: State, view: Stream) -> WeightedSum:
        """Returns the weighted sum of the view that `read` returned."""

    def explain(self, done: Read | Write) -> Explanation:
        """Returns the weighted sum of a read, or those of the new streams of a write."""
        if isinstance(done, Read):
            return Explanation((self.read_sum(done.state, done.views),))
        mixing: Mixing = done.carry
        streams = done.next_state[: len(mixing.streams)]
        return Explanation(stream_sums(mixing.streams, done.update, mixing.residual, mixing.write, streams, self.n_fractions))


class ParallelEnds(DepthEnds):
    """The state is n parallel streams that start as the embeddings and end as their sum or mean.

    Args:
        n_streams: n.
        n_fractions: m, where fractions are read and mixed.
        read_out: `sum` or `mean`; mixers with others leave the state themselves.
    """

    def __init__(self, n_streams: int, n_fractions: int = 1, read_out: str = "sum") -> None:
        super().__init__()
        self.n_streams, self.n_fractions, self.read_out = n_streams, n_fractions, read_out

    def enter(self, embeddings: Stream, layout: Layout = None, cache: Any = None) -> tuple[State, Any]:
        """Returns the embeddings n times."""
        return (embeddings,) * self.n_streams, cache

    def leave(self, state: State, layout: Layout = None, cache: Any = None) -> tuple[Stream, Any]:
        """Returns the sum or mean of the streams."""
        streams: Streams = state[: self.n_streams]
        return mean_streams(streams) if self.read_out == "mean" else sum_streams(streams), cache
