"""The squared-ReLU feed-forward of Primer."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from twoaxis.core.site import Site
from twoaxis.feed_forward.plain import Plain, PlainConfig


class ReLU2Config(PlainConfig):
    """Applies the squared rectifier between two matrices.

    Equation: y = W_down max(W_up c, 0)^2
    Source:   Primer, arXiv:2109.08668, section 3.1
    Deviates: no biases
    Shapes:   context [B T D] -> update [B T D]
    Init:     W_up ~ N(0, 0.25/D), W_down ~ N(0, 0.25/(F 2 n_layers))
    Cost:     params 2*D*F; matmul flops 4*D*F per token
    Args:
        d_ff: hidden width F; None means 4 d_model rounded up to a multiple of 16.
        d_ff_by_depth: `equal` widths, or `rising` from 0.5 d_ff in the first block to 1.5 d_ff in the last (MUDDFormer).
        input_local: a local mixer of the context, such as `canon` (place C of the Canon paper).
        projected_local: a local mixer of the hidden numbers before the activation (place D).

    Example:
        >>> ReLU2Config(d_ff=64).hidden_width(16)
        64
    """

    kind: Literal["relu2"] = "relu2"
    # The rectified numbers before they are squared.

    @property
    def activation(self) -> Callable[[Tensor], Tensor]:
        """The squared rectifier."""
        return _squared_relu

    def build(self, site: Site) -> Plain:
        """Builds the module at this site."""
        return ReLU2(self, site)


class ReLU2(Plain, config=ReLU2Config):
    """See `ReLU2Config`."""


def _squared_relu(x: Tensor) -> Tensor:
    return torch.relu(x).square()
