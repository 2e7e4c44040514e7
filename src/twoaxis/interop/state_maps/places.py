"""Where the depth mixers of a model keep their parameters."""

from collections.abc import Sequence
from typing import NamedTuple

from twoaxis.core.site import Stack
from twoaxis.depth import DepthConfig
from twoaxis.model import DecoderConfig
from twoaxis.model.block import sublayer_names


class Places(NamedTuple):
    """The depth mixers of a model by what stands before the names of their parameters.

    Attributes:
        depth: the configuration of all of them.
        stack: the sublayers.
        mixers: what stands before the parameters of each sublayer's mixer.
        ends: what stands before those of the ends.
    """

    depth: DepthConfig
    stack: Stack
    mixers: Sequence[str]
    ends: str = "ends"

    @property
    def d_model(self) -> int:
        """The width D."""
        return self.stack.d_model

    @property
    def n_blocks(self) -> int:
        """The number of blocks."""
        return self.stack.n_blocks

    def before(self, index: int) -> str:
        """What stands before the parameters of the mixer of this sublayer; the ends follow the last one."""
        return self.mixers[index] if index < len(self.mixers) else self.ends


def decoder_places(config: DecoderConfig) -> Places:
    """The depth mixers of a decoder.

    Example:
        >>> decoder_places(DecoderConfig(vocab_size=8, d_model=8, n_layers=1)).mixers
        ('blocks.0.attention.depth', 'blocks.0.swiglu.depth')
    """
    return Places(config.depth, config.stack, tuple(f"{name}.depth" for name in decoder_sublayers(config)))


def decoder_sublayers(config: DecoderConfig) -> tuple[str, ...]:
    """What stands before the parameters of every sublayer of a decoder, in order."""
    return tuple(f"blocks.{index}.{name}" for index, block in enumerate(config.layers) for name in sublayer_names(block))
