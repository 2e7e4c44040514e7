"""Softmax attention with rotary positions, grouped kv-heads and an optional window: what the attention mixers share.

Letters: B batch, T position, D width, E emitted numbers, H heads, G kv-heads, K key width.
"""

import math
from typing import ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor

from twoaxis.core.cost import Cost, Shape, visible_pairs
from twoaxis.core.equivalence import InitEquivalence
from twoaxis.core.errors import ConfigError, problem
from twoaxis.core.layout import TokenLayout
from twoaxis.core.parameters import Constant, matrix_std, with_extra
from twoaxis.core.site import HeadShape, Site
from twoaxis.core.views import QKV, Heads, Views
from twoaxis.ops.local_attention import local_attention
from twoaxis.ops.norm import rms_norm
from twoaxis.ops.precision import Impl, statistics_dtype
from twoaxis.ops.rope import rotate, rotation
from twoaxis.sequence.base import HeadMixer, SequenceConfig
from twoaxis.sequence.cache import KeyValueCache

QKNorm = Literal["none", "before_rope", "after_rope"]


class HeadsConfig(SequenceConfig):
    """The options of softmax attention; `AttentionConfig` and `ShortSWAConfig` are its two named forms."""

    accepts_qkv: ClassVar[bool] = True

    n_heads: int = Field(default=4, ge=1)
    n_kv_heads: int | None = Field(default=None)
    head_dim: int | None = Field(default=None, ge=2)
    rope_theta: float = Field(default=10_000.0, gt=0)
    qk_norm: QKNorm = "none"
    output_init: Literal["scaled", "zero"] = "scaled"
    impl: Impl = "fused"

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if not 1 <= self.kv_heads <= self.n_heads or self.n_heads % self.kv_heads:
            allowed = f"a divisor of n_heads={self.n_heads}"
            raise ConfigError(problem("n_kv_heads", self.n_kv_heads, allowed, "use n_kv_heads=1 or n_heads for the extremes"))
        if self.head_dim is not None and self.head_dim % 2:
            raise ConfigError(problem("head_dim", self.head_dim, "even, since RoPE turns pairs of channels", "add 1"))
        return self

    @property
    def kv_heads(self) -> int:
        """Number of kv-heads."""
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def span(self) -> int | None:
        """The attention window, the query included, or None for full causal attention."""
        return None

    @property
    def receptive_field(self) -> int | None:
        """The window."""
        return self.span

    @property
    def init_equivalence(self) -> InitEquivalence:
        """Exact when the output projection starts at zero: the sublayer then adds nothing."""
        if self.output_init == "zero":
            return InitEquivalence("exact", "the zero output projection adds nothing")
        return InitEquivalence("none", "a random output projection adds a random update")

    def check(self, d_model: int) -> None:
        """Raises ConfigError when the heads do not divide the width."""
        if self.head_dim is None and (d_model % self.n_heads or (d_model // self.n_heads) % 2):
            allowed = f"a divisor of d_model={d_model} with an even quotient, or given with a head_dim"
            raise ConfigError(problem("n_heads", self.n_heads, allowed, f"set head_dim, or change n_heads of {self.kind!r}"))

    def key_width(self, d_model: int) -> int:
        """Width of one head."""
        return self.head_dim or d_model // self.n_heads

    def head_shape(self, d_model: int) -> HeadShape:
        """The heads of these options."""
        return HeadShape(self.n_heads, self.kv_heads, self.key_width(d_model))

    def cost(self, site: Site, shape: Shape) -> Cost:
        """Projections by their weights, attention by its visible pairs, cache by what later queries see."""
        K, H, G, D, N = self.key_width(site.d_model), self.n_heads, self.kv_heads, site.d_model, shape.total_tokens
        projected = H + (2 if site.slot.projects_values else 1) * G
        weights = D * projected * K + H * K * (D + site.slot.update_extra)
        norms = 0 if self.qk_norm == "none" else 2 * K
        pairs = shape.batch * visible_pairs(shape.tokens, self.span)
        cached = shape.tokens if self.span is None else min(shape.tokens, self.span - 1)
        return Cost(
            params=weights + norms,
            matmul_flops=2 * N * weights,
            pair_flops=4 * K * H * pairs,
            elementwise_flops=N * (H + G) * K * (3 + (4 if norms else 0)),
            cache_bytes=2 * shape.batch * cached * G * K * shape.element_bytes,
        )

    def build(self, site: Site) -> "SoftmaxAttention":
        """Builds the mixer at this site."""
        self.check(site.d_model)
        return SoftmaxAttention(self, site)


class SoftmaxAttention(HeadMixer):
    """Projects to heads, rotates queries and keys by absolute position, attends, projects back."""

    def __init__(self, config: HeadsConfig, site: Site) -> None:
        super().__init__()
        self.config = config
        self.norm_eps = site.norm_eps
        self.head_dim = config.key_width(site.d_model)
        H, G, K, D = config.n_heads, config.kv_heads, self.head_dim, site.d_model
        self.projects_values = site.slot.projects_values
        self.qkv = self.linear("qkv", D, (H + (2 if self.projects_values else 1) * G) * K)
        # Two writes per block whatever its sublayers, so that models that share a parameter share its start.
        scaled = matrix_std(H * K) / math.sqrt(2 * site.stack.n_blocks)
        self.output = self.linear("output", H * K, D, std=0.0 if config.output_init == "zero" else scaled)
        self.extra = self.linear("extra", H * K, site.slot.update_extra) if site.slot.update_extra else None
        if config.qk_norm != "none":
            self.q_gain = self.parameter("q_gain", (K,), Constant(1.0), "norm")
            self.k_gain = self.parameter("k_gain", (K,), Constant(1.0), "norm")

    def new_cache(self) -> KeyValueCache:
        """An empty cache that keeps what the window can still see."""
        return KeyValueCache(self.config.span)

    def forward(
        self, context: Views, layout: TokenLayout, cache: KeyValueCache | None = None
    ) -> tuple[Float[Tensor, "B T E"], KeyValueCache | None]:
        """Returns the attention output and the extended cache."""
        if not self.projects_values:
            return self.attend(self.project(context), layout, cache)
        q_k, v = self._project(context).split((self.config.n_heads + self.config.kv_heads, self.config.kv_heads), dim=2)
        return self._attend(q_k, v, layout, cache)

    def project(self, context: Views) -> Heads:
        """Returns the heads before rotation and norm; keys in place of values where the slot projects none."""
        H, G = self.config.n_heads, self.config.kv_heads
        projected = self._project(context)
        if self.projects_values:
            return Heads(*projected.split((H, G, G), dim=2))
        q, k = projected.split((H, G), dim=2)
        return Heads(q, k, k)

    def attend(
        self, heads: Heads, layout: TokenLayout, cache: KeyValueCache | None = None
    ) -> tuple[Float[Tensor, "B T E"], KeyValueCache | None]:
        """Returns the output of attention over these heads and the extended cache."""
        return self._attend(torch.cat((heads.q, heads.k), dim=2), heads.v, layout, cache)

    def _attend(
        self, q_k: Tensor, v: Tensor, layout: TokenLayout, cache: KeyValueCache | None
    ) -> tuple[Tensor, KeyValueCache | None]:
        config = self.config
        q, k = self._place(q_k, layout).split((config.n_heads, config.kv_heads), dim=2)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if cache is not None:
            k, v, cache = cache.extend(k, v)
        documents = layout.documents
        key_documents = None if documents is None else layout.key_documents(k.shape[2])
        y = local_attention(q, k, v, window=config.span, documents=documents, key_documents=key_documents, impl=config.impl)
        return with_extra(self.output, self.extra, y.transpose(1, 2).flatten(2)), cache

    def _project(self, context: Views) -> Tensor:
        """[B T H+2G K]: query heads, then key heads, then value heads where the slot projects them."""
        if not isinstance(context, QKV):
            return self.qkv(context).unflatten(-1, (-1, self.head_dim))
        G, H = self.config.kv_heads, self.config.n_heads
        counts = (H, G, G) if self.projects_values else (H, G)
        weights = self.qkv.weight.split([n * self.head_dim for n in counts])
        parts = [F.linear(x, weight) for x, weight in zip(context, weights, strict=False)]
        return torch.cat(parts, dim=-1).unflatten(-1, (-1, self.head_dim))

    def _place(self, q_k: Tensor, layout: TokenLayout) -> Tensor:
        config = self.config
        dtype = statistics_dtype(q_k)
        key = ("rotation", self.head_dim, config.rope_theta, dtype)
        turn = layout.shared(key, lambda: rotation(layout.positions, self.head_dim, config.rope_theta, dtype))
        if config.qk_norm == "before_rope":
            return rotate(self._normalise(q_k), turn)
        if config.qk_norm == "after_rope":
            return self._normalise(rotate(q_k, turn))
        return rotate(q_k, turn)

    def _normalise(self, q_k: Tensor) -> Tensor:
        q, k = q_k.split((self.config.n_heads, self.config.kv_heads), dim=2)
        return torch.cat((rms_norm(q, self.q_gain, self.norm_eps), rms_norm(k, self.k_gain, self.norm_eps)), dim=2)
