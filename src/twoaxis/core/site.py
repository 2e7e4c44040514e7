"""Where a sublayer stands along depth, and what a depth mixer may know of it."""

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class HeadShape:
    """How a sequence mixer cuts its projections into heads."""

    n_heads: int
    n_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Slot:
    """What a sublayer is, as far as depth mixers depend on it; the default knows nothing and offers nothing.

    Attributes:
        kind: the kind of its mixer.
        takes_views: whether it takes separate inputs for queries, keys and values.
        heads: its heads when a depth mixer may mix them, or None.
        projects_values: whether it computes values of its own; a depth mixer may take that over.
        update_extra: numbers per token that it emits after its update, for the depth mixer alone.
        window: keys that one query meets, its own included; None without a bound, or where nothing is known.
    """

    kind: str = ""
    takes_views: bool = False
    heads: HeadShape | None = None
    projects_values: bool = True
    update_extra: int = 0
    window: int | None = None


@dataclass(frozen=True)
class Site:
    """The place of one sublayer: its index along depth, its block, and the width around it.

    Attributes:
        index: the sublayer, counted from 0 over the whole model.
        block: the block, counted from 0.
        place: the sublayer within its block, counted from 0.
        stack: the whole stack this sublayer belongs to.
    """

    index: int
    block: int
    place: int
    stack: "Stack"

    @property
    def d_model(self) -> int:
        """Width of the model."""
        return self.stack.d_model

    @property
    def norm_eps(self) -> float:
        """The eps of every RMSNorm of the model."""
        return self.stack.norm_eps

    @property
    def slot(self) -> Slot:
        """What stands here."""
        return self.stack.slots[self.index] if self.stack.slots else Slot()

    @property
    def opens_block(self) -> bool:
        """Whether this is the first sublayer of its block."""
        return self.place == 0

    @property
    def closes_block(self) -> bool:
        """Whether this is the last sublayer of its block."""
        return self.place == self.stack.block_lengths[self.block] - 1


@dataclass(frozen=True)
class Stack:
    """All sublayers of a model.

    Attributes:
        d_model: width of the model.
        norm_eps: the eps of every RMSNorm.
        block_lengths: sublayers of each block.
        slots: what each sublayer is, or empty when that is not known.
    """

    d_model: int
    norm_eps: float
    block_lengths: tuple[int, ...]
    slots: tuple[Slot, ...] = ()

    @property
    def n_blocks(self) -> int:
        """Number of blocks."""
        return len(self.block_lengths)

    @property
    def n_sublayers(self) -> int:
        """Number of sublayers."""
        return sum(self.block_lengths)

    @cached_property
    def sites(self) -> tuple[Site, ...]:
        """Every sublayer in order."""
        places = [(block, place) for block, length in enumerate(self.block_lengths) for place in range(length)]
        return tuple(Site(index, block, place, self) for index, (block, place) in enumerate(places))
