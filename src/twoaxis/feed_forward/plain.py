"""The feed-forward with one hidden activation: what `gelu` and `relu2` share.

Letters: B batch, T position, D width, F hidden width.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar

from torch import Tensor

from twoaxis.core.site import Site
from twoaxis.feed_forward.base import HiddenConfig, HiddenFeedForward


class PlainConfig(HiddenConfig):
    """Two matrices around an activation."""

    ratio: ClassVar[float] = 4
    activation_flops: ClassVar[int] = 2

    @property
    @abstractmethod
    def activation(self) -> Callable[[Tensor], Tensor]:
        """The function applied to each hidden number."""


class Plain(HiddenFeedForward):
    """W_down activation(W_up c)."""

    def __init__(self, config: PlainConfig, site: Site) -> None:
        super().__init__(config, site)
        self.activation = config.activation
        self.up = self.linear("up", site.d_model, config.width_at(site))

    def project(self, context: Tensor) -> Tensor:
        """Returns W_up c."""
        return self.up(context)

    def activate(self, projected: Tensor) -> Tensor:
        """Applies the activation."""
        return self.activation(projected)
