"""What a depth state holds and what flows in and out of it, per token: declared by each depth mixer, measured by tests."""

from collections.abc import Iterable
from dataclasses import dataclass, field

STATISTICS_BYTES = 4
"""Of a statistic in a model of half precision; a statistic is never narrower than the model."""


@dataclass(frozen=True)
class Numbers:
    """Numbers per token: those in the dtype of the model, and statistics, which are in float32 at least.

    Example:
        >>> (Numbers(8) + Numbers(8, statistics=1)).bytes(element_bytes=2)
        36
    """

    model: int = 0
    statistics: int = 0

    def bytes(self, element_bytes: int) -> int:
        """Bytes per token when a number of the model has `element_bytes`."""
        return self.model * element_bytes + self.statistics * max(STATISTICS_BYTES, element_bytes)

    @property
    def count(self) -> int:
        """Numbers of either sort."""
        return self.model + self.statistics

    def __add__(self, other: "Numbers") -> "Numbers":
        return Numbers(self.model + other.model, self.statistics + other.statistics)

    def __sub__(self, other: "Numbers") -> "Numbers":
        return Numbers(self.model - other.model, self.statistics - other.statistics)

    def __mul__(self, times: int) -> "Numbers":
        return Numbers(self.model * times, self.statistics * times)


@dataclass(frozen=True)
class Leaf:
    """One tensor of a depth state.

    Attributes:
        name: two leaves of one pass are the same tensor if and only if they have the same name, be it in two states or twice
            in one. A tensor handed on unchanged keeps its name, and what a sublayer makes anew has a name of its own.
        numbers: in it, per token; all of them of the model or all of them statistics.
        kept: whether autograd keeps it for the backward pass, whoever asks for it: the norm behind a read, or a later write.
        keeper: the first sublayer that keeps it; None for the one that the first state with it enters.
    """

    name: str
    numbers: Numbers
    kept: bool = True
    keeper: int | None = None


@dataclass(frozen=True)
class Flow:
    """What the depth operation of one sublayer moves, per token.

    Read, head mixing and write count as one kernel each, which reads every number it depends on once and writes every number
    it makes once: the least that memory has to move, whatever the engine. So a carry that the read makes is written there and
    read by the write, a tensor that a state holds twice is read once, and what a step hands on unchanged costs nothing.
    Parameters are left out, since a pass reads them once for all of its tokens.

    Attributes:
        read: numbers that come from memory: of the state, the heads, the update, the context and the carry.
        written: numbers that go to memory: of the views, the carry, the heads and the next state.
        views: those of the written ones that are views for the sublayer (or, of the ends, for the final norm) and in no state.
        keeps_update: whether autograd keeps the update (or, of the ends, the embeddings) for the depth operation although no
            state holds it.

    Example:
        >>> add = Flow(read=Numbers(2 * 8), written=Numbers(8))
        >>> (add + add).moved
        Numbers(model=48, statistics=0)
    """

    read: Numbers = field(default_factory=Numbers)
    written: Numbers = field(default_factory=Numbers)
    views: Numbers = field(default_factory=Numbers)
    keeps_update: bool = False

    @property
    def moved(self) -> Numbers:
        """Numbers that are read or written."""
        return self.read + self.written

    def __add__(self, other: "Flow") -> "Flow":
        keeps_update = self.keeps_update or other.keeps_update
        return Flow(self.read + other.read, self.written + other.written, self.views + other.views, keeps_update)


def stream(d_model: int, index: int, kept: bool = True) -> Leaf:
    """The stream that enters sublayer `index`: before the first one it is the embedding itself.

    Example:
        >>> stream(8, 0).name, stream(8, 1).name
        ('embedding', 'stream 1')
    """
    return Leaf(f"stream {index}" if index else "embedding", Numbers(d_model), kept)


def total(leaves: Iterable[Leaf]) -> Numbers:
    """All numbers of some leaves."""
    return sum((leaf.numbers for leaf in leaves), Numbers())
