"""SwiGLU: a feed-forward gated by SiLU.

Letters: D width, F hidden width.
"""

from typing import ClassVar, Literal

from torch import Tensor

from twoaxis.core.position import SublayerPosition
from twoaxis.feed_forward.base import HiddenConfig, HiddenFeedForward
from twoaxis.ops.gated_linear import silu_gate
from twoaxis.ops.precision import Impl


class SwiGLUConfig(HiddenConfig):
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
        input_local: a local mixer of the context, such as `canon` (place C of the Canon paper).
        projected_local: a local mixer of gate and value before the activation (place D).
        update_local: a local mixer of the update before it enters the residual stream, as in Inkling.
        impl: `fused` or `reference`.

    Example:
        >>> SwiGLUConfig().hidden_width(256)
        688
    """

    kind: Literal["swiglu"] = "swiglu"
    ratio: ClassVar[float] = 8 / 3
    projections: ClassVar[int] = 2
    activation_flops: ClassVar[int] = 5
    impl: Impl = "fused"


class SwiGLU(HiddenFeedForward, config=SwiGLUConfig):
    """See `SwiGLUConfig`."""

    def __init__(self, config: SwiGLUConfig, site: SublayerPosition) -> None:
        super().__init__(config, site)
        self.impl: Impl = config.impl
        F, std = config.width_at(site), site.hidden_std(site.d_model)
        self.gate_up = self.linear("gate_up", site.d_model, 2 * F, std=std, rows=(F, F))

    def project(self, context: Tensor) -> Tensor:
        """Returns W_gate c and W_up c."""
        return self.gate_up(context)

    def activate(self, projected: Tensor) -> Tensor:
        """Returns silu(W_gate c) * W_up c."""
        return silu_gate(projected, self.impl)
