"""Token shift of RWKV: every channel is blended with the same channel of the token before.

Letters: B batch, T position, C channels.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.design import InitEquivalence, MixingDesign, free_taps
from twoaxis.core.layout import TokenLayout
from twoaxis.core.parameters import Constant, Values
from twoaxis.core.position import SublayerPosition
from twoaxis.local.base import HistoryMixer, LocalConfig, TokenHistory
from twoaxis.ops.causal_conv import causal_conv
from twoaxis.ops.precision import Impl, statistics_dtype


class TokenShiftConfig(LocalConfig):
    """Moves each channel towards the token before, by a learned share.

    Equation: y_t = x_t + mu * (x_(t-1) - x_t), with x_(-1) = 0 before the first token of a document
    Source:   RWKV-7, arXiv:2503.14456; fla-org/flash-linear-attention at bc3b101, modules/token_shift.py and
              ops/rwkv7/fused_addcmul.py
    Deviates: one mu for all that reads the input; RWKV has one for each reader. As `projected_local` every branch has a mu of
              its own channels, but behind the projection, and the start runs over the branches side by side: one start for each
              is projected_over="branch" of `gated_delta_net`. mu does not depend on the token, as it does in RWKV-6
    Shapes:   x [B T C] -> y [B T C]; sums in float32 (float64 for float64)
    Init:     mu_c = 1 - (c/C)^(power (1 - l/L)) in block l of L: NONE; EXACT with mu_init="zero" (still trains)
    Cost:     params C; flops 3*C per token; cache one token of C numbers
    Places:   the published one is `input_local` of every sublayer

    Args:
        mu_init: `by_depth`, as published, or `zero`.
        power: of the start by depth: 0.7 for keys and values, 0.2 for receptance and gate, 0.9 for decay and learning rate.
        impl: `fused` or `reference`.

    Example:
        >>> TokenShiftConfig().receptive_field
        2
    """

    kind: Literal["token_shift"] = "token_shift"
    mu_init: Literal["by_depth", "zero"] = "by_depth"
    power: float = Field(default=0.7, gt=0)
    impl: Impl = "fused"

    @property
    def design(self) -> MixingDesign:
        """Free shares of two tokens."""
        return free_taps("channels at t", "replaces the channels", window="last 2 tokens", normaliser="sum 1")

    @property
    def channel_group(self) -> int:
        """Each channel by itself."""
        return 1

    @property
    def linear(self) -> bool:
        """A convolution of two taps."""
        return True

    @property
    def receptive_field(self) -> int:
        """The token and the one before."""
        return 2

    @property
    def init_equivalence(self) -> InitEquivalence:
        """Exact without a share."""
        if self.mu_init == "zero":
            return InitEquivalence("exact", "a share of zero returns the input")
        return InitEquivalence("none", "the token before has a share")

    def cost(self, channels: int, site: SublayerPosition, shape: Shape) -> Cost:
        """One share per channel."""
        return Cost(params=channels, elementwise_flops=3 * shape.total_tokens * channels)

    def build(self, channels: int, site: SublayerPosition) -> "TokenShift":
        """Builds the mixer."""
        return TokenShift(self, channels, site)


class TokenShift(HistoryMixer, config=TokenShiftConfig):
    """See `TokenShiftConfig`."""

    around = {"n_layers": 1, "index": 0}  # noqa: RUF012, as the base declares it

    def __init__(self, config: TokenShiftConfig, channels: int, site: SublayerPosition) -> None:
        super().__init__(config.receptive_field)
        self.impl: Impl = config.impl
        exponent = config.power * (1 - site.block / site.stack.n_blocks)
        shares = Values(tuple(1 - (channel / channels) ** exponent for channel in range(channels)))
        self.mu = self.parameter("mu", (channels,), Constant(0.0) if config.mu_init == "zero" else shares, "mixing")

    def mix(self, x: Tensor, layout: TokenLayout, history: TokenHistory, context: Tensor | None = None) -> Tensor:
        """Blends each token with the one before."""
        mu = self.mu.to(statistics_dtype(self.mu))
        taps = torch.stack((mu, 1 - mu), dim=1)
        return causal_conv(x, taps, history=history.tokens, documents=history.documents(layout), impl=self.impl)
