"""Canon layers: a short causal convolution added to its input, at any of four places inside the two sublayers of a block."""

import math
from typing import Literal, Self

from pydantic import model_validator

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.design import InitEquivalence, MixingDesign, free_taps
from twoaxis.core.errors import ConfigError, problem
from twoaxis.core.position import SublayerPosition
from twoaxis.local.base import LocalConfig
from twoaxis.local.conv import ConvOptions, DepthwiseConv


class CanonConfig(ConvOptions, LocalConfig):
    """Adds to every channel a weighted sum of its own last `kernel` tokens.

    Equation: y_t = x_t + act(b + sum_(s=0..k-1) w_(k-1-s) x_(t-s)), without x_t in the plain form;
              scale="unit_variance" (Inkling-2): y_t = (x_t + sum_s w_(k-1-s) x_(t-s)) / sqrt(k + 1)
    Source:   Physics of Language Models Part 4.1, arXiv:2512.17351, section 3; facebookresearch/PhysicsLM4 at 7580696;
              Inkling and Inkling-2, transformers 5.24.0, models/inkling and models/inkling2
    Deviates: later chunks of a cached sequence see the tokens before them, which the reference code forgets; with documents or
              padding no tap crosses a border. Taps do not decay here; what the authors' training decays is not known to us
    Shapes:   x [B T C] -> y [B T C]; sums in float32 (float64 for float64)
    Init:     taps U(-1/sqrt(k), 1/sqrt(k)), the reference's own: NONE; EXACT with taps_init="zero" in the residual form without
              a scale (still trains), or with taps_init="identity" in any form without an activation: the tap of the current
              token is then 1, 0 or, with a scale, sqrt(k + 1) - 1, and takes the scale in
    Cost:     params k*C; flops about 2*k*C per token; cache k-1 tokens of C numbers. Per block of attention with G of H
              kv-heads and SwiGLU, all four places: k*(2*D + (H+2G)*K + 2*F)
    Places:   A `input_local` of attention, B its `projected_local` (queries, keys and values behind their norm and before
              rotation), C `input_local` of the feed-forward, D its `projected_local` (before the activation). Inkling has it on
              keys and values before their norm, and as `update_local` of attention and feed-forward

    Args:
        kernel: taps k, the current token's included.
        form: `residual` (published default) or `plain`.
        activation: `none` (published default) or `silu`; plain with silu is the ShortConv of Mamba and of linear attention.
        bias: `none` or one per `channel`.
        taps_init: `uniform`, `zero` or `identity` (the mixer returns its input).
        scale: `none`, or `unit_variance` for a sum of k + 1 terms whose variance is that of one.
        impl: `fused` or `reference`.

    Raises:
        ConfigError: a scale of anything but x + conv(x).

    Example:
        >>> from twoaxis.sequence import AttentionConfig
        >>> AttentionConfig(window=8, input_local=CanonConfig(), projected_local=CanonConfig(taps_init="zero")).receptive_field
        14
    """

    kind: Literal["canon"] = "canon"
    form: Literal["residual", "plain"] = "residual"
    scale: Literal["none", "unit_variance"] = "none"

    @model_validator(mode="after")
    def _scale_fits(self) -> Self:
        if self.scale != "none" and (not self.folded or self.bias != "none"):
            allowed = "left out unless form='residual' without activation and bias, a sum of like terms"
            raise ConfigError(problem("scale", self.scale, allowed, "use scale='none'"))
        return self

    @property
    def factor(self) -> float:
        """The factor of the sum of k taps and the input."""
        return 1.0 if self.scale == "none" else 1 / math.sqrt(self.kernel + 1)

    @property
    def channel_group(self) -> int:
        """Each channel by itself."""
        return 1

    @property
    def linear(self) -> bool:
        """Without an activation and a bias."""
        return self.activation == "none" and self.bias == "none"

    @property
    def design(self) -> MixingDesign:
        """Free taps."""
        return free_taps("channels at t", "added to the channels" if self.form == "residual" else "replaces the channels")

    @property
    def init_equivalence(self) -> InitEquivalence:
        """Exact with taps that change nothing."""
        return self.relation_to_identity

    def cost(self, channels: int, site: SublayerPosition, shape: Shape) -> Cost:
        """The cost of the convolution."""
        return self.conv_cost(channels, shape)

    def build(self, channels: int, site: SublayerPosition) -> DepthwiseConv:
        """Builds the convolution."""
        return Canon(self, channels)


class Canon(DepthwiseConv, config=CanonConfig):
    """See `CanonConfig`."""
