"""Feed-forwards with one hidden activation: the GELU of GPT-2 and the squared ReLU of Primer.

Letters: B batch, T position, D width, F hidden width.
"""

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from twoaxis.core.position import SublayerPosition
from twoaxis.feed_forward.base import HiddenConfig, HiddenFeedForward


class PlainConfig(HiddenConfig):
    """Configuration of two matrices around an activation."""

    ratio: ClassVar[float] = 4
    activation_flops: ClassVar[int] = 2


class Plain(HiddenFeedForward):
    """Two matrices around an activation: W_down activation(W_up c)."""

    def __init__(self, config: PlainConfig, site: SublayerPosition) -> None:
        super().__init__(config, site)
        self.up = self.linear("up", site.d_model, config.width_at(site), std=site.hidden_std(site.d_model))

    def project(self, context: Tensor) -> Tensor:
        """Returns W_up c."""
        return self.up(context)


class GELUConfig(PlainConfig):
    """Applies the Gaussian error linear unit (GELU) between two matrices.

    Equation: y = W_down gelu(W_up c),  gelu(z) = z Phi(z), or its tanh approximation
    Source:   Gaussian Error Linear Units, arXiv:1606.08415, section 2
    Deviates: no biases
    Shapes:   context [B T D] -> update [B T D]
    Init:     W_up ~ N(0, 0.25/D), W_down ~ N(0, 0.25/(F 2 n_layers))
    Cost:     params 2*D*F; matmul flops 4*D*F per token
    Args:
        d_ff: hidden width F; None means 4 d_model rounded up to a multiple of 16.
        d_ff_by_depth: `equal` widths, or `rising` from 0.5 d_ff in the first block to 1.5 d_ff in the last (MUDDFormer).
        input_local: a local mixer of the context, such as `canon` (place C of the Canon paper).
        projected_local: a local mixer of the hidden features before the activation (place D).
        update_local: a local mixer of the update before it enters the residual stream, as in Inkling.
        form: `erf` (exact) or `tanh` (GPT-2).

    Example:
        >>> GELUConfig().hidden_width(256)
        1024
    """

    kind: Literal["gelu"] = "gelu"
    form: Literal["erf", "tanh"] = "erf"


class GELU(Plain, config=GELUConfig):
    """See `GELUConfig`."""

    def __init__(self, config: GELUConfig, site: SublayerPosition) -> None:
        super().__init__(config, site)
        self.approximation = "tanh" if config.form == "tanh" else "none"

    def activate(self, projected: Tensor) -> Tensor:
        """Returns gelu(W_up c)."""
        return F.gelu(projected, approximate=self.approximation)


class ReLU2Config(PlainConfig):
    """Applies the squared ReLU between two matrices.

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
        projected_local: a local mixer of the hidden features before the activation (place D).
        update_local: a local mixer of the update before it enters the residual stream, as in Inkling.

    Example:
        >>> ReLU2Config(d_ff=64).hidden_width(16)
        64
    """

    kind: Literal["relu2"] = "relu2"


class ReLU2(Plain, config=ReLU2Config):
    """See `ReLU2Config`."""

    def activate(self, projected: Tensor) -> Tensor:
        """Returns max(W_up c, 0)^2."""
        return torch.relu(projected).square()
