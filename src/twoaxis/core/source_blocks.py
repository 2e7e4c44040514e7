"""Blocks of sublayers as depth sources: equal or uneven, counted by sublayer or by layer."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Annotated, Literal

from pydantic import Field

from twoaxis.core.errors import ConfigError, problem
from twoaxis.core.site import Stack
from twoaxis.core.weighted_sum import span_name

Size = Annotated[int, Field(ge=1)]
BlockSize = Size | Annotated[tuple[Size, ...], Field(min_length=1)]
"""One size for all blocks (the last may be shorter), or the size of each."""

Count = Literal["sublayer", "layer"]
"""The unit of a block size."""


def openings(size: int | Sequence[int], count: Count, stack: Stack) -> tuple[int, ...]:
    """The sublayers that open a source block.

    Example:
        >>> openings(2, "layer", Stack(8, 1e-6, (2, 3, 2)))
        (0, 5)
    """
    depth = stack.n_sublayers if count == "sublayer" else stack.n_blocks
    sizes = (size,) * -(-depth // size) if isinstance(size, int) else size
    begins = (0, *accumulate(sizes))[: len(sizes)]
    if count == "sublayer":
        return begins
    starts = (0, *accumulate(stack.block_lengths))
    return tuple(starts[begin] for begin in begins)


def block_names(starts: Sequence[int], stack: Stack) -> tuple[str, ...]:
    """The names of source blocks that begin at these sublayers, each by all of its sublayers.

    Example:
        >>> block_names((0, 2), Stack(8, 1e-6, (2, 1)))
        ('sublayers 0-1', 'sublayer 2')
    """
    ends = (*starts[1:], stack.n_sublayers)
    return tuple(span_name("sublayer", start, end - 1) for start, end in zip(starts, ends, strict=True))


def check_blocks(size: int | Sequence[int], count: Count, stack: Stack) -> None:
    """Raises a ConfigError if individual sizes do not add up to the depth of the stack."""
    depth = stack.n_sublayers if count == "sublayer" else stack.n_blocks
    if not isinstance(size, int) and sum(size) != depth:
        allowed = f"sizes that add up to the {depth} {count}s of the model"
        raise ConfigError(problem("block_size", tuple(size), allowed, "correct them, or give one size for all blocks"))
