"""Smear: adds to each token the one before it, through one gate.

Letters: B batch, T position, C channels, g channels of the gate.
"""

from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.design import InitEquivalence, MixingDesign
from twoaxis.core.errors import ConfigError, problem
from twoaxis.core.layout import TokenLayout
from twoaxis.core.parameters import Constant
from twoaxis.core.position import SublayerPosition
from twoaxis.local.base import HistoryMixer, LocalConfig, TokenHistory
from twoaxis.ops.causal_conv import causal_conv, previous_token
from twoaxis.ops.precision import Impl, outside_autocast, statistics_dtype
from twoaxis.ops.scores import row_product


class SmearConfig(LocalConfig):
    """Adds the token before, weighed by a gate that the first channels of the token open.

    Equation: token: y_t = x_t + lambda sigmoid(w^T x_t[:g]) x_(t-1);
              channel: y_t = (1 - sigmoid(a)) * x_t + sigmoid(a) * x_(t-1);  x_(-1) = 0 before the first token of a document
    Source:   karpathy/nanochat at 92d63d4, nanochat/gpt.py (g = 24); KellerJordan/modded-nanogpt at f411b3d, train_gpt.py
              (g = 12, before the norm of the embedding); channel: parameter-golf
    Deviates: later chunks of a cached sequence see the token before them, which nanochat drops; w starts at zero, as in
              modded-nanogpt, where nanochat draws it from U(0, 0.02)
    Shapes:   x [B T C] -> y [B T C]; gates and sums in float32 (float64 for float64)
    Init:     token: EXACT, lambda = 0 (still trains); channel: NONE, a = 0, half of each token
    Cost:     token: params g + 1, flops about 2*g + 2*C per token; channel: params C, flops 3*C; cache one token of C numbers
    Places:   the published one is `embedding_local` of a decoder, once behind the norm of the embedding

    Args:
        form: `token`, one gate for each token, or `channel`, a static one for each channel.
        gate_channels: g of the token form, at most the channels.
        impl: `fused` or `reference`.

    Raises:
        ConfigError: more channels of the gate than there are, or gate_channels of the channel form.

    Example:
        >>> SmearConfig(gate_channels=12).init_equivalence.relation
        'exact'
    """

    kind: Literal["smear"] = "smear"
    form: Literal["token", "channel"] = "token"
    gate_channels: int = Field(default=24, ge=1)
    impl: Impl = "fused"

    @model_validator(mode="after")
    def _options_are_read(self) -> Self:
        if self.form == "channel":
            self.refuse_options(["gate_channels"], " with form='channel'", "remove it")
        return self

    @property
    def design(self) -> MixingDesign:
        """A gate for the token before."""
        token = self.form == "token"
        return MixingDesign(
            query="none",
            key="first channels of t" if token else "none",
            value="channels at t",
            normaliser="sigmoid" if token else "sum 1",
            window="last 2 tokens",
            sharing="sublayer",
            injection="added to the channels" if token else "replaces the channels",
            weights="input and reader" if token else "static",
            position=True,
        )

    @property
    def channel_group(self) -> int | None:
        """Each channel by itself, if none opens the gate of others."""
        return 1 if self.form == "channel" else None

    @property
    def linear(self) -> bool:
        """With static gates."""
        return self.form == "channel"

    @property
    def receptive_field(self) -> int:
        """The token and the one before."""
        return 2

    @property
    def init_equivalence(self) -> InitEquivalence:
        """Exact in the token form."""
        if self.form == "token":
            return InitEquivalence("exact", "lambda = 0 adds nothing to the input")
        return InitEquivalence("none", "half of each token is the one before")

    def check(self, channels: int) -> None:
        """Raises ConfigError if there are fewer channels than the gate reads."""
        if self.form == "token" and self.gate_channels > channels:
            allowed = f"at most the {channels} channels of its place"
            raise ConfigError(problem("gate_channels", self.gate_channels, allowed, "lower it"))

    def cost(self, channels: int, site: SublayerPosition, shape: Shape) -> Cost:
        """The gate, and one product and one sum per channel."""
        if self.form == "channel":
            return Cost(params=channels, elementwise_flops=3 * shape.total_tokens * channels)
        per_token = 2 * self.gate_channels + 5 + 2 * channels
        return Cost(params=self.gate_channels + 1, elementwise_flops=shape.total_tokens * per_token)

    def build(self, channels: int, site: SublayerPosition) -> "Smear":
        """Builds the mixer."""
        self.check(channels)
        return Smear(self, channels)


class Smear(HistoryMixer, config=SmearConfig):
    """See `SmearConfig`."""

    def __init__(self, config: SmearConfig, channels: int) -> None:
        super().__init__(config.receptive_field)
        self.config = config
        if config.form == "token":
            self.gate = self.parameter("gate", (config.gate_channels,), Constant(0.0), "gate")
            self.strength = self.parameter("strength", (1,), Constant(0.0), "mixing")
        else:
            self.share = self.parameter("share", (channels,), Constant(0.0), "gate")

    def mix(self, x: Tensor, layout: TokenLayout, history: TokenHistory, context: Tensor | None = None) -> Tensor:
        """Adds the token before, or takes its share."""
        mixed = self._by_token if self.config.form == "token" else self._by_channel
        return mixed(x, history.tokens, history.documents(layout))

    @outside_autocast
    def _by_token(self, x: Tensor, history: Tensor | None, documents: Tensor | None) -> Tensor:
        wide = statistics_dtype(x)
        opened = torch.sigmoid(row_product(x[..., : self.config.gate_channels], self.gate, self.config.impl))
        weight = (self.strength.to(wide) * opened).unsqueeze(-1)
        return (x + weight * previous_token(x, history, documents)).to(x.dtype)

    def _by_channel(self, x: Tensor, history: Tensor | None, documents: Tensor | None) -> Tensor:
        share = torch.sigmoid(self.share.to(statistics_dtype(self.share)))
        taps = torch.stack((share, 1 - share), dim=1)
        return causal_conv(x, taps, history=history, documents=documents, impl=self.config.impl)
