"""The feed-forward with one hidden activation: what `gelu` and `relu2` share.

Letters: D width, F hidden width.
"""

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar

from torch import Tensor

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.parameters import matrix_std, with_extra
from twoaxis.core.site import Site
from twoaxis.feed_forward.base import FeedForward, WidthConfig


class PlainConfig(WidthConfig):
    """Two matrices around an activation."""

    ratio: ClassVar[float] = 4

    @property
    @abstractmethod
    def activation(self) -> Callable[[Tensor], Tensor]:
        """The function applied to each hidden number."""

    def cost(self, site: Site, shape: Shape) -> Cost:
        """Two matrices and one activation."""
        F = self.width_at(site)
        params = (2 * site.d_model + site.slot.update_extra) * F
        N = shape.total_tokens
        return Cost(params=params, matmul_flops=2 * N * params, elementwise_flops=2 * N * F)

    def build(self, site: Site) -> "Plain":
        """Builds the feed-forward at this site."""
        return Plain(self, site)


class Plain(FeedForward):
    """W_down activation(W_up c)."""

    def __init__(self, config: PlainConfig, site: Site) -> None:
        super().__init__()
        self.activation = config.activation
        F = config.width_at(site)
        self.up = self.linear("up", site.d_model, F)
        self.down = self.linear("down", F, site.d_model, std=matrix_std(F) / math.sqrt(2 * site.stack.n_blocks))
        self.extra = self.linear("extra", F, site.slot.update_extra) if site.slot.update_extra else None

    def transform(self, context: Tensor) -> Tensor:
        """Returns W_down activation(W_up c)."""
        return with_extra(self.down, self.extra, self.activation(self.up(context)))
