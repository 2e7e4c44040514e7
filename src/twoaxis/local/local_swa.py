"""ShortSWA in the place of a short convolution: local adaptive mixing of channels inside a sublayer.

Letters: B batch, T position, C channels, H heads, G kv-heads, K key width.
"""

from typing import Literal, Self

import torch.nn.functional as F
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.design import InitEquivalence, MixingDesign
from twoaxis.core.errors import ConfigError, problem
from twoaxis.core.key_value_cache import KeyValueCache, KeyValueRing
from twoaxis.core.layout import TokenLayout
from twoaxis.core.position import SublayerPosition
from twoaxis.local.base import LocalConfig, LocalMixer, WindowKind, window_documents, window_pairs
from twoaxis.ops.local_attention import local_attention
from twoaxis.ops.precision import Impl, statistics_dtype
from twoaxis.ops.rope import RotationTable, layout_rotation, rotate


class LocalSWAConfig(LocalConfig):
    """Adds to the channels a softmax mixture of their own last `window` tokens.

    Equation: y_t = x_t + W_o concat_h sum_(j=t-w+1..t) softmax_j(q_t^T k_j / sqrt(K)) v_j,  q, k, v = W x, q and k rotated;
              without x_t in the plain form; j from w floor(t/w) with window_kind="chunk"
    Source:   Residual Stream Duality in Modern Transformer Architectures, arXiv:2603.16039, section 2.4; the place, that of a
              short convolution inside a branch, from its author's companion text yifanzhang-pro/Rethinking-SWA
    Deviates: nothing about projections, heads or initial values is published; all are options here. The companion text names a
              window of 128, also that of a chunk, and puts the operator on the branches q, k and v or x, B and C: the default
              here is 16 tokens that end at each token, one operator over all channels of a place
    Shapes:   x [B T C] -> y [B T C]; softmax and rotations in float32 (float64 for float64)
    Init:     EXACT with output_init="zero" in the residual form without activation (still trains), else NONE; W_q, W_k,
              W_v ~ N(0, 0.25/C), W_o ~ N(0, 0.25/(H K)) or zero: it writes to no residual stream, so that no depth scales it
    Cost:     params C*(2H+2G)*K; pair flops 4*H*K*min(t, w) per token, half of it in chunks; cache at most w-1 keys and values
    Args:
        window: tokens seen, the current one included.
        window_kind: `sliding`, or `chunk`: those since the last multiple of the window, by absolute position.
        n_heads: query heads H.
        n_kv_heads: kv-heads G, a divisor of H.
        head_dim: K, even.
        form: `residual` adds to the channels, `plain` replaces them.
        activation: `none`, or `silu` of the result, as behind a convolution in linear attention.
        rope_theta: base of the rotation angles.
        output_init: `scaled` or `zero`.
        impl: `fused` or `reference`.

    Raises:
        ConfigError: heads or widths that cannot be.

    Example:
        >>> LocalSWAConfig(window=16).receptive_field
        16
    """

    kind: Literal["local_swa"] = "local_swa"
    window: int = Field(default=16, ge=1)
    window_kind: WindowKind = "sliding"
    n_heads: int = Field(default=4, ge=1)
    n_kv_heads: int = Field(default=1, ge=1)
    head_dim: int = Field(default=16, ge=2, multiple_of=2)
    form: Literal["residual", "plain"] = "residual"
    activation: Literal["none", "silu"] = "none"
    rope_theta: float = Field(default=10_000.0, gt=0)
    output_init: Literal["scaled", "zero"] = "scaled"
    impl: Impl = "fused"

    @property
    def design(self) -> MixingDesign:
        """Attention over tokens."""
        return MixingDesign(
            query="W_Q x_t",
            key="W_K x_t",
            value="W_V x_t",
            normaliser="softmax",
            window="last w tokens" if self.window_kind == "sliding" else "its chunk of w tokens",
            sharing="sublayer",
            injection="added to the channels" if self.form == "residual" else "replaces the channels",
            weights="input and reader",
            position=True,
        )

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.n_heads % self.n_kv_heads:
            raise ConfigError(
                problem("n_kv_heads", self.n_kv_heads, f"a divisor of n_heads={self.n_heads}", "use n_kv_heads=1")
            )
        return self

    @property
    def receptive_field(self) -> int:
        """The window."""
        return self.window

    @property
    def init_equivalence(self) -> InitEquivalence:
        """Exact if a zero output projection is added to the channels."""
        if self.form == "residual" and self.output_init == "zero" and self.activation == "none":
            return InitEquivalence("exact", "the zero output projection adds nothing to the input")
        return InitEquivalence("none", "a random output projection changes the input")

    @property
    def rotations(self) -> frozenset[RotationTable]:
        """The rotation table of whole heads."""
        return frozenset({RotationTable(self.head_dim, self.rope_theta)})

    def cost(self, channels: int, site: SublayerPosition, shape: Shape) -> Cost:
        """Costs of two projections, and of the visible pairs."""
        H, G, K = self.n_heads, self.n_kv_heads, self.head_dim
        weights = 2 * channels * (H + G) * K
        return Cost(
            params=weights,
            matmul_flops=2 * shape.total_tokens * weights,
            pair_flops=4 * K * H * shape.batch * window_pairs(shape.tokens, self.window, self.window_kind),
            elementwise_flops=shape.total_tokens
            * (3 * (H + G) * K + channels * ((self.form == "residual") + 4 * (self.activation == "silu"))),
        )

    def build(self, channels: int, site: SublayerPosition) -> "LocalSWA":
        """Builds the mixer."""
        return LocalSWA(self, channels)


class LocalSWA(LocalMixer, config=LocalSWAConfig):
    """See `LocalSWAConfig`."""

    def __init__(self, config: LocalSWAConfig, channels: int) -> None:
        super().__init__()
        self.config = config
        H, G, K = config.n_heads, config.n_kv_heads, config.head_dim
        self.qkv = self.linear("qkv", channels, (H + 2 * G) * K, rows=(K,) * (H + 2 * G), grows="inputs")
        std = 0.0 if config.output_init == "zero" else None
        self.output = self.linear("output", H * K, channels, std=std, grows="outputs")

    def new_cache(self) -> KeyValueCache:
        """An empty cache that keeps the window."""
        return KeyValueCache(self.config.window)

    def forward(
        self,
        x: Float[Tensor, "B T C"],
        layout: TokenLayout,
        cache: KeyValueCache | KeyValueRing | None = None,
        context: Float[Tensor, "B T D"] | None = None,
    ) -> tuple[Float[Tensor, "B T C"], KeyValueCache | KeyValueRing | None]:
        """Returns the mixed channels and the extended cache."""
        config = self.config
        q, k, v = self._heads(x, layout)
        if cache is not None:
            k, v, cache = cache.extend(k, v)
        documents, seen = window_documents(layout, config.window, config.window_kind, k.shape[2])
        if cache is not None:
            seen = cache.arranged(seen)
        y = local_attention(q, k, v, window=config.window, documents=documents, key_documents=seen, impl=config.impl)
        update = self.output(y.transpose(1, 2).flatten(2))
        y = x + update if config.form == "residual" else update
        return F.silu(y) if config.activation == "silu" else y, cache

    def queries_and_keys(
        self, x: Float[Tensor, "B T C"], layout: TokenLayout
    ) -> tuple[Float[Tensor, "B H T K"], Float[Tensor, "B G T K"]]:
        """Queries and keys whose products are the scores of attention over these channels, for audits."""
        return self._heads(x, layout)[:2]

    def _heads(self, x: Tensor, layout: TokenLayout) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values, heads before positions."""
        config = self.config
        H, G, K = config.n_heads, config.n_kv_heads, config.head_dim
        q_k, v = self.qkv(x).unflatten(-1, (-1, K)).split((H + G, G), dim=2)
        turn = layout_rotation(layout, RotationTable(K, config.rope_theta), statistics_dtype(x))
        q, k = rotate(q_k, turn).split((H, G), dim=2)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
