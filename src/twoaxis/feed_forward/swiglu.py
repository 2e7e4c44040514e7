"""SwiGLU: a feed-forward gated by SiLU.

Letters: D width, F hidden width.
"""

import math
from typing import ClassVar, Literal

from torch import Tensor

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.parameters import matrix_std, with_extra
from twoaxis.core.site import Site
from twoaxis.feed_forward.base import FeedForward, WidthConfig
from twoaxis.ops.gated_linear import silu_gate
from twoaxis.ops.precision import Impl


class SwiGLUConfig(WidthConfig):
    """Gates one linear map of the token by the SiLU of another, then projects back.

    Equation: y = W_down (silu(W_gate c) * W_up c)
    Source:   GLU Variants Improve Transformer, arXiv:2002.05202, eq. 6
    Deviates: no biases; W_gate and W_up are the two halves of one matrix
    Shapes:   context [B T D] -> update [B T D]
    Init:     W_gate, W_up ~ N(0, 0.25/D), W_down ~ N(0, 0.25/(F 2 n_layers))
    Cost:     params 3*D*F; matmul flops 6*D*F per token
    Args:
        d_ff: hidden width F; None means 8/3 d_model rounded up to a multiple of 16.
        d_ff_by_depth: `equal` widths, or `rising` from 0.5 d_ff in the first block to 1.5 d_ff in the last (MUDDFormer).
        impl: `fused` or `reference`.

    Example:
        >>> SwiGLUConfig().hidden_width(256)
        688
    """

    kind: Literal["swiglu"] = "swiglu"
    ratio: ClassVar[float] = 8 / 3
    impl: Impl = "fused"

    def cost(self, site: Site, shape: Shape) -> Cost:
        """Three matrices and one gate."""
        F = self.width_at(site)
        params = (3 * site.d_model + site.slot.update_extra) * F
        N = shape.total_tokens
        return Cost(params=params, matmul_flops=2 * N * params, elementwise_flops=5 * N * F)

    def build(self, site: Site) -> "SwiGLU":
        """Builds the feed-forward at this site."""
        return SwiGLU(self, site)


class SwiGLU(FeedForward):
    """See `SwiGLUConfig`."""

    def __init__(self, config: SwiGLUConfig, site: Site) -> None:
        super().__init__()
        self.impl: Impl = config.impl
        F = config.width_at(site)
        self.gate_up = self.linear("gate_up", site.d_model, 2 * F)
        self.down = self.linear("down", F, site.d_model, std=matrix_std(F) / math.sqrt(2 * site.stack.n_blocks))
        self.extra = self.linear("extra", F, site.slot.update_extra) if site.slot.update_extra else None

    def transform(self, context: Tensor) -> Tensor:
        """Returns W_down (silu(W_gate c) * W_up c)."""
        return with_extra(self.down, self.extra, silu_gate(self.gate_up(context), self.impl))
