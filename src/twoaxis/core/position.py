"""The position of a sublayer along depth: its layer, its block of sources, and the chain of heads it belongs to."""

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class HeadShape:
    """The heads of a sequence mixer."""

    n_heads: int
    n_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class SublayerInfo:
    """The properties of a sublayer that depth mixers depend on; by default unknown.

    Attributes:
        kind: the kind of its mixer.
        takes_views: whether it accepts separate inputs for queries, keys and values.
        heads: its heads if a depth mixer may mix them, or None.
        projects_values: whether it computes its values, which a depth mixer may replace.
        update_extra: numbers per token after its update, for the depth mixer alone.
        window: keys that one query attends to, its own included; None if unbounded or unknown.
        hashed: (smallest number of rows, tables) for each length of n-grams, if it has hashed tables: each has as many rows as
            a prime that no table before it has.
    """

    kind: str = ""
    takes_views: bool = False
    heads: HeadShape | None = None
    projects_values: bool = True
    update_extra: int = 0
    window: int | None = None
    hashed: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class SublayerPosition:
    """The position of one sublayer.

    Attributes:
        index: the sublayer, counted from 0 over the whole model.
        block: the block, counted from 0.
        place: the sublayer within its block, counted from 0.
        stack: all sublayers of the model.
    """

    index: int
    block: int
    place: int
    stack: "LayerStack"

    @property
    def d_model(self) -> int:
        """Width of the model."""
        return self.stack.d_model

    @property
    def norm_eps(self) -> float:
        """The eps of every RMSNorm of the model."""
        return self.stack.norm_eps

    @property
    def slot(self) -> SublayerInfo:
        """The properties of the sublayer."""
        return self.stack.slots[self.index] if self.stack.slots else SublayerInfo()

    @property
    def opens_block(self) -> bool:
        """Whether this is the first sublayer of its block."""
        return self.place == 0

    @property
    def closes_block(self) -> bool:
        """Whether this is the last sublayer of its block."""
        return self.place == self.stack.block_lengths[self.block] - 1


@dataclass(frozen=True)
class LayerStack:
    """All sublayers of a model.

    Attributes:
        d_model: width of the model.
        norm_eps: the eps of every RMSNorm.
        block_lengths: sublayers of each block.
        slots: the properties of each sublayer, or empty if unknown.
        vocab_size: ids of tokens are below this; None if unknown.
    """

    d_model: int
    norm_eps: float
    block_lengths: tuple[int, ...]
    slots: tuple[SublayerInfo, ...] = ()
    vocab_size: int | None = None

    @property
    def n_blocks(self) -> int:
        """Number of blocks."""
        return len(self.block_lengths)

    @property
    def n_sublayers(self) -> int:
        """Number of sublayers."""
        return sum(self.block_lengths)

    @cached_property
    def sites(self) -> tuple[SublayerPosition, ...]:
        """Every sublayer in order."""
        places = [(block, place) for block, length in enumerate(self.block_lengths) for place in range(length)]
        return tuple(SublayerPosition(index, block, place, self) for index, (block, place) in enumerate(places))
