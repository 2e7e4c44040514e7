"""The position of a sublayer along depth: its layer, its block of sources, and the chain of heads it belongs to."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from twoaxis.core.parameters import matrix_std

HeadStage = Literal["projected", "rotated"]
"""Where a depth mixer works on heads: behind the projections, or behind norm, local mixing and rotation, as they attend."""

KeyNorm = Literal["none", "before_rope", "after_rope"]
"""Whether keys have a norm, and on which side of their rotation."""


@dataclass(frozen=True)
class HeadShape:
    """The heads of a sequence mixer, and the norm of its keys."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    key_norm: KeyNorm = "none"


@dataclass(frozen=True)
class SublayerInfo:
    """The properties of a sublayer that depth mixers depend on; by default unknown.

    Attributes:
        kind: the kind of its mixer.
        takes_views: whether it accepts separate inputs for queries, keys and values.
        heads: its heads if a depth mixer may mix them, or None.
        heads_at: the stage at which a depth mixer mixes them.
        more_keys: whether a depth mixer gives each query one more key, which attention of this library takes alone.
        projects_values: whether it computes its values, which a depth mixer may replace.
        update_extra: numbers per token after its update, for the depth mixer alone.
        window: keys that one query attends to, its own included; None if unbounded or unknown.
        norm: the norm between the read and the sublayer: `rms`, or `none` where it gets what is read.
        norm_scale: constant factor on the result of that norm.
        output_scale: factor on the initial standard deviation of the matrix that makes the update; None is
            1 / sqrt(2 n_blocks).
        hidden_scale: the same for the matrices that make values or hidden features.
        hashed: (smallest number of rows, tables) for each length of n-grams, if it has hashed tables: each has as many rows as
            a prime that no table before it has.
    """

    kind: str = ""
    takes_views: bool = False
    heads: HeadShape | None = None
    heads_at: HeadStage = "projected"
    more_keys: bool = False
    projects_values: bool = True
    update_extra: int = 0
    window: int | None = None
    norm: Literal["rms", "none"] = "rms"
    # Sublayers that differ in this alone cost the same, so that one measurement serves all.
    norm_scale: float = field(default=1.0, compare=False)
    output_scale: float | None = None
    hidden_scale: float = 1.0
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

    def output_std(self, fan_in: int) -> float:
        """The standard deviation of the initial matrix that makes the update.

        By default for two writes per block whatever its sublayers, so that shared parameters start alike in all models.
        """
        scale = self.slot.output_scale
        std = matrix_std(fan_in)
        return std / math.sqrt(2 * self.stack.initial_blocks) if scale is None else scale * std

    def hidden_std(self, fan_in: int) -> float:
        """The standard deviation of initial matrices that make values or hidden features."""
        return self.slot.hidden_scale * matrix_std(fan_in)

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
        update_scale: constant factor of every update.
        base_blocks: number of blocks for which initial values that depend on it are chosen; None means that of the model.
    """

    d_model: int
    norm_eps: float
    block_lengths: tuple[int, ...]
    slots: tuple[SublayerInfo, ...] = ()
    vocab_size: int | None = None
    update_scale: float = 1.0
    base_blocks: int | None = None

    @property
    def n_blocks(self) -> int:
        """Number of blocks."""
        return len(self.block_lengths)

    @property
    def initial_blocks(self) -> int:
        """Number of blocks on which initial values depend."""
        return self.base_blocks or self.n_blocks

    @property
    def n_sublayers(self) -> int:
        """Number of sublayers."""
        return sum(self.block_lengths)

    @cached_property
    def sites(self) -> tuple[SublayerPosition, ...]:
        """Every sublayer in order."""
        places = [(block, place) for block, length in enumerate(self.block_lengths) for place in range(length)]
        return tuple(SublayerPosition(index, block, place, self) for index, (block, place) in enumerate(places))

    def with_slots(self, slot: Callable[[SublayerPosition], SublayerInfo]) -> "LayerStack":
        """The same stack with these properties of its sublayers."""
        return replace(self, slots=tuple(slot(site) for site in self.sites))
