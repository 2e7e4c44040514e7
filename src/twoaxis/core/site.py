"""Where a sublayer stands along depth."""

from dataclasses import dataclass


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
    def opens_block(self) -> bool:
        """Whether this is the first sublayer of its block."""
        return self.place == 0

    @property
    def closes_block(self) -> bool:
        """Whether this is the last sublayer of its block."""
        return self.place == self.stack.block_lengths[self.block] - 1


@dataclass(frozen=True)
class Stack:
    """All sublayers of a model: width, norm eps, and how many sublayers each block has."""

    d_model: int
    norm_eps: float
    block_lengths: tuple[int, ...]

    @property
    def n_blocks(self) -> int:
        """Number of blocks."""
        return len(self.block_lengths)

    @property
    def n_sublayers(self) -> int:
        """Number of sublayers."""
        return sum(self.block_lengths)

    @property
    def sites(self) -> tuple[Site, ...]:
        """Every sublayer in order."""
        places = [(block, place) for block, length in enumerate(self.block_lengths) for place in range(length)]
        return tuple(Site(index, block, place, self) for index, (block, place) in enumerate(places))
