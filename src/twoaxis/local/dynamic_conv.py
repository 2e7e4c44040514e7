"""Dynamic short convolution: the taps of every token are made from the token itself.

Letters: B batch, T position, C channels, D width of the context, k taps, R rank, H heads.
"""

import math
from typing import Literal, Self

import torch
import torch.nn.functional as F
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.design import InitEquivalence, MixingDesign
from twoaxis.core.errors import ConfigError, problem
from twoaxis.core.layout import TokenLayout
from twoaxis.core.parameters import Constant, Init, Uniform, Values
from twoaxis.core.position import SublayerPosition
from twoaxis.local.base import HistoryMixer, LocalConfig, TokenHistory
from twoaxis.ops.precision import Impl, statistics_dtype
from twoaxis.ops.token_taps import low_rank_conv, per_head_conv


class DynamicConvConfig(LocalConfig):
    """Adds to every channel a weighted sum of its own last `kernel` tokens, with weights that depend on the current token.

    Equation: y_t = f (sum_(s=0..k-1) (K_t[s] + S[s]) * x_(t-s) + x_t), without the last x_t in the plain form;
              low_rank: K_t[s] = (Z n_t)^T U[s];  per_head: K_t[s, c] = (A n_t)[head(c), s];  n_t the context of the sublayer;
              f = 1, or with scale="unit_variance" 1 / sqrt(2k + 1), in the plain form 1 / sqrt(2k)
    Source:   arXiv:2606.03825; OliverSieberling/dynamic-conv1d at 245e0d9; per_head with
              scale="unit_variance": Inkling-2, transformers 5.24.0, models/inkling2
    Deviates: side by side in one place, all branches share the factors Z n_t; the paper has one set for each. No tap crosses a
              document border. Tap 0 is the current token's, as in the reference and unlike `canon`
    Shapes:   x [B T C], context [B T D] -> y [B T C]; sums in float32 (float64 for float64), rounded once
    Init:     U and A zero, Z ~ N(0, 0.25/D); static taps S ~ U(-1/sqrt(k), 1/sqrt(k)), the paper's: NONE; EXACT with
              static_init="zero" in the residual form without a scale, or with static_init="identity" in every form: S[0] then
              takes the scale in, so that a trained model goes on as it is. U and A have gradients at zero
    Cost:     low_rank: params D*R + (R+1)*k*C; matmul flops 2 per weight and token. per_head: params D*H*k + k*C. Both 2*k*C
              flops more, cache k-1 tokens of C numbers
    Places:   the published one is `projected_local` of attention, before norm and rotation (qk_norm="after_local"), on queries,
              keys and values in the paper, on keys and values in Inkling-2 (projected_branches=["k", "v"])

    Args:
        kernel: taps k, the current token's included.
        taps: `low_rank` or `per_head`.
        rank: R of `low_rank`.
        head_dim: channels of one head of `per_head`, a divisor of the channels.
        form: `residual` or `plain`.
        scale: `none` or `unit_variance`.
        static_init: `uniform`, `zero` or `identity` (the mixer returns its input).
        impl: `fused` or `reference`.

    Raises:
        ConfigError: an option of the other taps, or heads that do not divide the channels.

    Example:
        >>> from twoaxis.sequence import AttentionConfig
        >>> AttentionConfig(window=8, projected_local=DynamicConvConfig(static_init="zero")).receptive_field
        11
    """

    kind: Literal["dynamic_conv"] = "dynamic_conv"
    kernel: int = Field(default=4, ge=2, le=8)
    taps: Literal["low_rank", "per_head"] = "low_rank"
    rank: int = Field(default=15, ge=1)
    head_dim: int = Field(default=64, ge=1)
    form: Literal["residual", "plain"] = "residual"
    scale: Literal["none", "unit_variance"] = "none"
    static_init: Literal["uniform", "zero", "identity"] = "uniform"
    impl: Impl = "fused"

    @model_validator(mode="after")
    def _options_are_read(self) -> Self:
        other = {"low_rank": "head_dim", "per_head": "rank"}[self.taps]
        self.refuse_options([other], f" with taps={self.taps!r}", "remove it")
        return self

    @property
    def design(self) -> MixingDesign:
        """Taps made from the reader."""
        return MixingDesign(
            query="none",
            key="n_t",
            value="channels at t",
            normaliser="none",
            window="last k tokens",
            sharing="sublayer",
            injection="added to the channels" if self.form == "residual" else "replaces the channels",
            weights="input and reader",
            position=True,
        )

    @property
    def factor(self) -> float:
        """The factor of the sum."""
        return 1.0 if self.scale == "none" else 1 / math.sqrt(2 * self.kernel + (self.form == "residual"))

    @property
    def reads_context(self) -> bool:
        """The taps are made from it."""
        return True

    @property
    def channel_group(self) -> int:
        """Each channel by itself, or each head."""
        return 1 if self.taps == "low_rank" else self.head_dim

    @property
    def linear(self) -> bool:
        """The taps do not depend on the channels, which are not the context where this is asked."""
        return True

    @property
    def receptive_field(self) -> int:
        """The taps."""
        return self.kernel

    @property
    def init_equivalence(self) -> InitEquivalence:
        """Exact if the static taps make up for everything else."""
        if self.static_init == "identity":
            return InitEquivalence("exact", "the only tap that is not zero, that of the current token, returns the input")
        if self.static_init == "zero" and self.form == "residual" and self.factor == 1:
            return InitEquivalence("exact", "zero taps add nothing to the input")
        return InitEquivalence("none", "the static taps or the scale change the input")

    def check(self, channels: int) -> None:
        """Raises ConfigError if heads do not divide the channels."""
        if self.taps == "per_head" and channels % self.head_dim:
            allowed = f"a divisor of the {channels} channels of its place"
            raise ConfigError(problem("head_dim", self.head_dim, allowed, "use that of the heads, or taps='low_rank'"))

    def cost(self, channels: int, site: SublayerPosition, shape: Shape) -> Cost:
        """Products with weights, and one multiplication and one addition per tap and channel."""
        C, D, k, N = channels, site.d_model, self.kernel, shape.total_tokens
        if self.taps == "low_rank":
            mapped, per_channel = D * self.rank + (self.rank + 1) * k * C, 2 * k
            return Cost(params=mapped, matmul_flops=2 * N * mapped, elementwise_flops=N * per_channel * C)
        mapped = D * C // self.head_dim * k
        return Cost(params=mapped + k * C, matmul_flops=2 * N * mapped, elementwise_flops=N * 3 * k * C)

    def build(self, channels: int, site: SublayerPosition) -> "DynamicConv":
        """Builds the convolution."""
        self.check(channels)
        return DynamicConv(self, channels, site)


class DynamicConv(HistoryMixer, config=DynamicConvConfig):
    """See `DynamicConvConfig`."""

    def __init__(self, config: DynamicConvConfig, channels: int, site: SublayerPosition) -> None:
        super().__init__(config.receptive_field)
        self.config, k = config, config.kernel
        if config.taps == "low_rank":
            self.factors = self.linear("factors", site.d_model, config.rank, grows="inputs")
            self.up = self.parameter("up", (k, config.rank, channels), Constant(0.0), "mixing")
        else:
            self.heads = self.linear("heads", site.d_model, channels // config.head_dim * k, std=0.0)
        self.static = self.parameter("static", (k, channels), _static(config, channels), "mixing")

    def mix(self, x: Tensor, layout: TokenLayout, history: TokenHistory, context: Tensor | None = None) -> Tensor:
        """Convolves the tokens with taps that the context makes."""
        config, context = self.config, x if context is None else context
        past, documents = history.tokens, history.documents(layout)
        if config.taps == "low_rank":
            # The static taps are one more row, for a factor of 1.
            weight = torch.cat((self.up.to(statistics_dtype(x)) * config.factor, self._static_taps().unsqueeze(1)), dim=1)
            factors = F.pad(self.factors(context), (0, 1), value=1.0)
            return low_rank_conv(x, factors, weight, history=past, documents=documents, impl=config.impl)
        taps = self.heads(context).unflatten(-1, (-1, config.kernel)).to(statistics_dtype(x)) * config.factor
        return per_head_conv(x, taps, self._static_taps(), history=past, documents=documents, impl=config.impl)

    def _static_taps(self) -> Float[Tensor, "k C"]:
        """The static taps with the input and the scale in them, in a precision that does not round small taps away."""
        wide = self.static.to(statistics_dtype(self.static))
        if self.config.form == "residual":
            wide = wide + F.pad(wide.new_ones(1, 1), (0, 0, 0, len(wide) - 1))
        return wide * self.config.factor


def _static(config: DynamicConvConfig, channels: int) -> Init:
    if config.static_init == "identity":
        first = 1 / config.factor - (config.form == "residual")
        return Values((*(first,) * channels, *(0.0,) * (config.kernel - 1) * channels))
    return Constant(0.0) if config.static_init == "zero" else Uniform(1 / math.sqrt(config.kernel))
