"""Short causal depthwise convolution, which Canon and the ShortConv sublayer share.

Letters: B batch, T position, C channels, k taps.
"""

import math
from typing import Literal

import torch.nn.functional as F
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from twoaxis.core.config import Config
from twoaxis.core.cost import Cost, Shape
from twoaxis.core.design import InitEquivalence
from twoaxis.core.layout import TokenLayout
from twoaxis.core.parameters import Constant, Init, Uniform, Values
from twoaxis.local.base import HistoryMixer, TokenHistory
from twoaxis.ops.causal_conv import causal_conv
from twoaxis.ops.precision import Impl, runs_plain, statistics_dtype


class ConvOptions(Config):
    """The options of a short convolution; `CanonConfig` and `ShortConvConfig` are its two named placements."""

    kernel: int = Field(default=4, ge=2, le=8)
    form: Literal["residual", "plain"] = "plain"
    activation: Literal["none", "silu"] = "none"
    bias: Literal["none", "channel"] = "none"
    taps_init: Literal["uniform", "zero", "identity"] = "uniform"
    impl: Impl = "fused"

    @property
    def receptive_field(self) -> int:
        """The taps."""
        return self.kernel

    @property
    def factor(self) -> float:
        """The factor of the output."""
        return 1.0

    @property
    def identity_tap(self) -> float:
        """The tap of the current token with which the sum returns the input, all others being zero."""
        return 1 / self.factor - (self.form == "residual")

    @property
    def relation_to_identity(self) -> InitEquivalence:
        """Exact for zero taps added to the input, and for a single tap on the current token without an activation."""
        added = self.form == "residual" and self.factor == 1
        if added and self.taps_init != "uniform":
            return InitEquivalence("exact", "zero taps add nothing to the input")
        if self.taps_init == "identity" and self.activation == "none":
            return InitEquivalence("exact", "the only tap that is not zero, that of the current token, returns the input")
        return InitEquivalence("none", "the taps change the input")

    def conv_cost(self, channels: int, shape: Shape) -> Cost:
        """One multiplication and one addition per tap and channel."""
        per_channel = 2 * self.kernel + (self.form == "residual") + (self.bias == "channel") + 4 * (self.activation == "silu")
        per_channel += self.factor != 1
        return Cost(
            params=channels * (self.kernel + (self.bias == "channel")),
            elementwise_flops=per_channel * shape.total_tokens * channels,
        )

    @property
    def folded(self) -> bool:
        """Whether the input can be added to the tap of the current token: in the residual form without an activation."""
        return self.form == "residual" and self.activation == "none"

    def build_conv(self, channels: int) -> "DepthwiseConv":
        """Builds the convolution."""
        return DepthwiseConv(self, channels)


class DepthwiseConv(HistoryMixer):
    """act(conv(x)), added to x or in its place."""

    def __init__(self, options: ConvOptions, channels: int) -> None:
        super().__init__(options.receptive_field)
        self.options = options
        self.weight = self.parameter("weight", (channels, options.kernel), _taps(options, channels), "mixing")
        self.bias = self.parameter("bias", (channels,), Constant(0.0), "bias") if options.bias == "channel" else None

    def mix(self, x: Tensor, layout: TokenLayout, history: TokenHistory, context: Tensor | None = None) -> Tensor:
        """Convolves the tokens."""
        options, documents = self.options, history.documents(layout)
        # The same sum with two passes over memory less.
        folded = options.folded and not runs_plain(options.impl)
        taps = _with_input(self.weight, options.factor) if folded else self.weight
        y = causal_conv(x, taps, self.bias, history=history.tokens, documents=documents, impl=options.impl)
        if options.activation == "silu":
            y = F.silu(y)
        if options.form == "residual" and not folded:
            y = (x + y) * options.factor if options.factor != 1 else x + y
        return y


def _with_input(weight: Float[Tensor, "C k"], factor: float) -> Float[Tensor, "C k"]:
    """The taps of factor * (x + conv(x)), in a precision that does not round small taps away."""
    wide = weight.to(statistics_dtype(weight))
    return (wide + F.pad(wide.new_ones(1), (weight.shape[1] - 1, 0))) * factor


def _taps(options: ConvOptions, channels: int) -> Init:
    if options.taps_init == "zero":
        return Constant(0.0)
    if options.taps_init == "identity":
        return Values((*(0.0,) * (options.kernel - 1), options.identity_tap) * channels)
    return Uniform(1 / math.sqrt(options.kernel))
