"""The contract of a feed-forward sublayer: token by token, no cache."""

from abc import ABC, abstractmethod
from typing import Any

from jaxtyping import Float
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
    def transform(self, context: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """Returns the update of each token."""

    def new_cache(self) -> None:
        """Nothing is carried from token to token."""

    def forward(self, context: Tensor, layout: TokenLayout, cache: None = None) -> tuple[Float[Tensor, "B T D"], None]:
        """The call of a sublayer, the same as a sequence mixer's."""
        return self.transform(context), None


def rounded_width(d_model: int, ratio: float) -> int:
    """The hidden width d_model * ratio, rounded up to a multiple of 16."""
    return -(-int(d_model * ratio) // 16) * 16
