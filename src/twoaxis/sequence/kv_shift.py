"""KV shift: attention whose keys and values are mixed with those of the token before.

Letters: B batch, T position, D width, E emitted numbers, G kv-heads, K key width.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.design import MixingDesign
from twoaxis.core.layout import TokenLayout
from twoaxis.core.parameters import Normal, UniformPairs, Values, matrix_std
from twoaxis.core.position import SublayerPosition
from twoaxis.core.views import QKV, Views
from twoaxis.local.base import TokenHistory
from twoaxis.ops.causal_conv import previous_token
from twoaxis.ops.precision import statistics_dtype
from twoaxis.ops.scores import linear_scores
from twoaxis.sequence.heads import AttentionCache, HeadsConfig, SoftmaxAttention


class KVShiftConfig(HeadsConfig):
    """Attends with keys and values that are each a mixture of the current and the previous token's.

    Equation: k'_t = a k_(t-1) + b k_t, v'_t = c v_(t-1) + d v_t, per kv-head and before rotation, k_(-1) = v_(-1) = 0;
              fixed: a, b, c, d are free numbers; token: a = sigmoid(s^T x_t), b = 1 - a, and c, d likewise
    Source:   KV Shifting Attention, arXiv:2411.19574, section 3 (fixed); yifanzhang-pro/deep-delta-learning,
              kv_shift_torch.py (token)
    Deviates: later calls start from the last unshifted key and value, where the paper's listing keeps the shifted ones; in the
              token form the first token is scaled by 1 - a in every call, where the reference code leaves a lone one as it is.
              The authors publish the fixed form as a listing alone, which our golden tensors copy by hand
    Shapes:   context [B T D] -> update [B T D]; the mixture and its gates in float32 (float64 for float64)
    Init:     fixed: a, c ~ U(0, 1), b = 1 - a, d = 1 - c, or a = c = 0, b = d = 1, then plain attention; token: a near 1/2;
              NONE, or EXACT with output_init="zero"
    Cost:     params of attention and 4*G (fixed) or 2*G*D (token); cache of attention and one token of 2*G*K numbers
    Args:
        form: `fixed` numbers per kv-head, or gates that depend on the `token`.
        shift_init: `uniform` as published, or `identity` (fixed form only).
        n_heads: query heads H.
        n_kv_heads: kv-heads G, a divisor of H; None means H.
        head_dim: K, even; None means d_model / n_heads.
        window: tokens seen, the query included; None means all.
        impl: `fused` or `reference`.

    Further:  the other options of `attention`

    Raises:
        ConfigError: heads, widths or windows that cannot be.

    Example:
        >>> KVShiftConfig(window=8).receptive_field
        9
    """

    kind: Literal["kv_shift"] = "kv_shift"
    form: Literal["fixed", "token"] = "fixed"
    shift_init: Literal["uniform", "identity"] = "uniform"
    window: int | None = Field(default=None, ge=1)

    @property
    def design(self) -> MixingDesign:
        """Free or gated weights of two tokens, inside attention."""
        gated = self.form == "token"
        return MixingDesign(
            query="parameter s" if gated else "none",
            key="c_t" if gated else "none",
            value="k_t, v_t",
            normaliser="sigmoid" if gated else "none",
            window="last 2 tokens",
            sharing="sublayer",
            injection="replaces keys and values",
            weights="input and reader" if gated else "static",
            position=True,
        )

    @property
    def span(self) -> int | None:
        """The window."""
        return self.window

    @property
    def receptive_field(self) -> int | None:
        """The window, and the token before it."""
        attended = super().receptive_field
        return None if attended is None else attended + 1

    def shifted_heads(self, site: SublayerPosition) -> int:
        """Heads of keys, and of values if the slot projects them."""
        return (2 if site.slot.projects_values else 1) * self.kv_heads

    def cost(self, site: SublayerPosition, shape: Shape) -> Cost:
        """The cost of attention, and that of the gates."""
        heads, N = self.shifted_heads(site), shape.total_tokens
        mixed = heads * self.key_width(site.d_model)
        gates = heads * site.d_model if self.form == "token" else 0
        return super().cost(site, shape) + Cost(
            params=gates or 2 * heads,
            matmul_flops=2 * N * gates,
            elementwise_flops=3 * N * mixed + (N * 4 * heads if gates else 0),
        )

    def build(self, site: SublayerPosition) -> "KVShift":
        """Builds the mixer at this site."""
        self.check(site.d_model)
        return KVShift(self, site)


@dataclass(frozen=True, eq=False)
class KVShiftCache(AttentionCache):
    """The cache of attention, and the last unshifted keys and values."""

    last: TokenHistory


class KVShift(SoftmaxAttention, config=KVShiftConfig):
    """See `KVShiftConfig`."""

    def __init__(self, config: KVShiftConfig, site: SublayerPosition) -> None:
        super().__init__(config, site)
        self.form, heads = config.form, config.shifted_heads(site)
        if config.form == "token":
            start = Normal(matrix_std(site.d_model))
            self.shift_weight = self.parameter("shift_weight", (heads, site.d_model), start, "gate", grows="inputs")
        else:
            init = UniformPairs() if config.shift_init == "uniform" else Values((0.0, 1.0) * heads)
            self.shift = self.parameter("shift", (heads, 2), init, "mixing")

    def new_cache(self) -> KVShiftCache:
        """Empty caches."""
        attention = super().new_cache()
        return KVShiftCache(attention.keys, attention.local, TokenHistory())

    def _projected(
        self, context: Views, layout: TokenLayout, cache: AttentionCache | None
    ) -> tuple[Float[Tensor, "B T _ K"], AttentionCache | None]:
        """Query heads, then shifted key heads, then shifted value heads if the slot projects them."""
        joined, cache = super()._projected(context, layout, cache)
        q, raw = joined.split((self.config.n_heads, joined.shape[2] - self.config.n_heads), dim=2)
        flat, history = raw.flatten(2), cache.last if isinstance(cache, KVShiftCache) else TokenHistory()
        before = previous_token(flat, history.tokens, history.documents(layout))
        previous, current = self._weights(context)
        mixed = (previous * before.unflatten(-1, raw.shape[2:]) + current * raw).to(raw.dtype)
        if isinstance(cache, KVShiftCache):
            cache = replace(cache, last=history.following(flat, kernel=2))
        return torch.cat((q, mixed), dim=2), cache

    def _weights(self, context: Views) -> tuple[Tensor, Tensor]:
        """Weights of the previous and of the current token of each shifted head, [heads 1] or [B T heads 1]; keys first."""
        if self.form == "fixed":
            shift = self.shift.to(statistics_dtype(self.shift))
            return shift[:, :1], shift[:, 1:]
        inputs = (context.k, context.v) if isinstance(context, QKV) else (context, context)
        parts = self.shift_weight.split(self.config.kv_heads)
        scores = [linear_scores(x, weight, self.config.impl) for x, weight in zip(inputs, parts, strict=False)]
        gate = torch.sigmoid(torch.cat(scores)).permute(1, 2, 0).unsqueeze(-1)
        return gate, 1 - gate
