"""ShortConv: a short causal depthwise convolution as a sublayer of its own.

Letters: B batch, T position, D width, E emitted numbers.
"""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.design import InitEquivalence, MixingDesign, free_taps
from twoaxis.core.layout import TokenLayout
from twoaxis.core.parameters import extra_output
from twoaxis.core.position import SublayerPosition
from twoaxis.core.views import Views
from twoaxis.local.base import TokenHistory
from twoaxis.local.conv import ConvOptions
from twoaxis.sequence.base import SequenceConfig, SequenceMixer


class ShortConvConfig(ConvOptions, SequenceConfig):
    """Mixes the last `kernel` tokens of each channel with weights of its own: local mixing that does not adapt.

    Equation: y_t = act(b + sum_(s=0..k-1) w_(k-1-s) c_(t-s)), with c_t added in the residual form
    Source:   flash-linear-attention, ShortConvolution; the operator of Mamba, arXiv:2312.00752, figure 3
    Deviates: with documents or padding no tap crosses a border, and the cache holds k - 1 tokens, not k. The reference stands
              inside a branch of another mixer: a sublayer of its own, behind a norm and added to the stream, is ours
    Shapes:   context [B T D] -> update [B T D]; sums in float32 (float64 for float64)
    Init:     taps U(-1/sqrt(k), 1/sqrt(k)): NONE; EXACT with taps_init="zero" in the plain form without activation or with
              SiLU, whose gradient at zero is 1/2, so that it still trains
    Cost:     params k*D; flops about 2*k*D per token; cache k-1 tokens of D numbers
    Args:
        kernel: taps k, the current token's included.
        form: `plain` or `residual` (the context is added once more).
        activation: `silu` (the default of the reference) or `none`.
        bias: `none` or one per `channel`.
        taps_init: `uniform`, `zero` or `identity` (the convolution returns the context).
        impl: `fused` or `reference`.

    Example:
        >>> ShortConvConfig(kernel=4).receptive_field
        4
    """

    kind: Literal["short_conv"] = "short_conv"
    activation: Literal["none", "silu"] = "silu"

    @property
    def design(self) -> MixingDesign:
        """Free taps."""
        return free_taps("c_t", "added to the stream")

    @property
    def init_equivalence(self) -> InitEquivalence:
        """Exact when zero taps leave nothing to add."""
        if self.form == "plain" and self.taps_init == "zero":
            return InitEquivalence("exact", "zero taps add nothing")
        return InitEquivalence("none", "the convolved context is added")

    def check(self, d_model: int) -> None:
        """Accepts any width."""

    def cost(self, site: SublayerPosition, shape: Shape) -> Cost:
        """The cost of the convolution, and of the additional output that the slot asks for."""
        extra = site.d_model * site.slot.update_extra
        return self.conv_cost(site.d_model, shape) + Cost(params=extra, matmul_flops=2 * shape.total_tokens * extra)

    def build(self, site: SublayerPosition) -> "ShortConv":
        """Builds the mixer at this site."""
        return ShortConv(self, site)


class ShortConv(SequenceMixer, config=ShortConvConfig):
    """See `ShortConvConfig`."""

    def __init__(self, config: ShortConvConfig, site: SublayerPosition) -> None:
        super().__init__()
        self.conv = config.build_conv(site.d_model)
        self.extra = extra_output(self, site.d_model, site.slot.update_extra)

    def new_cache(self) -> TokenHistory:
        """An empty history."""
        return self.conv.new_cache()

    def forward(
        self, context: Views, layout: TokenLayout, cache: TokenHistory | None = None
    ) -> tuple[Float[Tensor, "B T E"], TokenHistory | None]:
        """Returns the convolved context and its last tokens."""
        assert isinstance(context, Tensor)
        y, cache = self.conv(context, layout, cache)
        return y if self.extra is None else torch.cat((y, self.extra(context)), dim=-1), cache
