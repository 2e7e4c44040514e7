"""The contract of a feed-forward sublayer: token by token, no cache."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal

from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from twoaxis.core.config import Config
from twoaxis.core.cost import Cost, Shape
from twoaxis.core.layout import TokenLayout
from twoaxis.core.parameters import DeclaredModule
from twoaxis.core.site import Site


class FeedForwardConfig(Config, ABC):
    """Configuration of one feed-forward; builds it and states what it costs."""

    # Any, since each mixer narrows it to the one literal that names it.
    kind: Any

    @abstractmethod
    def cost(self, site: Site, shape: Shape) -> Cost:
        """What the feed-forward costs in one forward pass at this site, without its norm."""

    @abstractmethod
    def build(self, site: Site) -> "FeedForward":
        """Builds the module with undefined values; `core.parameters.initialise` sets them."""


class FeedForward(DeclaredModule, ABC):
    """Transforms each token alone."""

    @abstractmethod
    def transform(self, context: Float[Tensor, "B T D"]) -> Float[Tensor, "B T E"]:
        """Returns the update of each token."""

    def new_cache(self) -> None:
        """Nothing is carried from token to token."""

    def forward(self, context: Tensor, layout: TokenLayout, cache: None = None) -> tuple[Float[Tensor, "B T E"], None]:
        """The call of a sublayer, the same as a sequence mixer's."""
        return self.transform(context), None


class WidthConfig(FeedForwardConfig):
    """A feed-forward with one hidden width, the same in every block or growing with depth."""

    ratio: ClassVar[float]
    """Hidden width over model width when `d_ff` is None."""

    d_ff: int | None = Field(default=None, ge=1)
    d_ff_by_depth: Literal["equal", "rising"] = "equal"

    def hidden_width(self, d_model: int) -> int:
        """F at this model width: of every block, or their mean."""
        return self.d_ff or rounded_width(d_model, self.ratio)

    def width_at(self, site: Site) -> int:
        """F of the block of this site."""
        mean = self.hidden_width(site.d_model)
        return mean if self.d_ff_by_depth == "equal" else rising_width(mean, site.block, site.stack.n_blocks)


def rising_width(mean: int, block: int, n_blocks: int) -> int:
    """The hidden width of one block when widths rise from half the mean to one and a half, in steps of 128 and at least 128.

    Equation: F_i = 128 round(F (i/(L - 1) + 0.5) / 128), halves to even; a single block keeps the mean
    Source:   MUDDFormer, arXiv:2502.12170v2, section 3.5; authors' code Caiyun-AI/MUDDFormer, where a width may be 0

    Example:
        >>> [rising_width(256, block, 4) for block in range(4)]
        [128, 256, 256, 384]
    """
    if n_blocks == 1:
        return mean
    return max(128, round(mean * (block / (n_blocks - 1) + 0.5) / 128) * 128)


def rounded_width(d_model: int, ratio: float) -> int:
    """The hidden width d_model * ratio, rounded up to a multiple of 16."""
    return -(-int(d_model * ratio) // 16) * 16
