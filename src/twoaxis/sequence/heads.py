"""Softmax attention with rotary positions, grouped kv-heads and an optional window, the base of the attention mixers.

Letters: B batch, T position, D width, E emitted numbers, H heads, G kv-heads, K key width.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor, nn

from twoaxis.core.cost import Cost, Shape, visible_pairs
from twoaxis.core.errors import ConfigError, problem
from twoaxis.core.key_value_cache import KeyValueCache
from twoaxis.core.layout import TokenLayout
from twoaxis.core.parameters import Constant, Normal, extra_output, with_extra
from twoaxis.core.position import HeadShape, KeyNorm, SublayerPosition
from twoaxis.core.views import QKV, Heads, Views
from twoaxis.local.base import Parts
from twoaxis.local.places import LocalPlaces, Places, PlacesConfig, mix_locally
from twoaxis.ops.local_attention import local_attention
from twoaxis.ops.norm import rms_norm
from twoaxis.ops.precision import Impl, statistics_dtype
from twoaxis.ops.rope import RotationTable, Scaling, layout_rotation, rotate
from twoaxis.ops.scores import linear_scores
from twoaxis.sequence.base import GroupedHeadOptions, HeadMixer, OutputOptions, SequenceConfig

QKNorm = Literal["none", "before_rope", "after_local", "after_rope", "key_after_rope"]
Branch = Literal["q", "k", "v"]
ProjectionBias = Literal["none", "qkv", "all"]

SINK_STD = 0.02
"""Standard deviation of a sink that starts `normal`, that of gpt-oss."""


ALL_BRANCHES: tuple[Branch, ...] = ("q", "k", "v")


class HeadsConfig(OutputOptions, GroupedHeadOptions, PlacesConfig, SequenceConfig):
    """The options of softmax attention, which `AttentionConfig`, `ShortSWAConfig` and `KVShiftConfig` share."""

    rope_theta: float = Field(default=10_000.0, gt=0)
    rope_dim: int | None = Field(default=None, ge=0, multiple_of=2)
    rope_scaling: Scaling = None
    projected_branches: tuple[Branch, ...] = ALL_BRANCHES
    qk_norm: QKNorm = "none"
    qk_norm_over: Literal["head", "all_heads"] = "head"
    bias: ProjectionBias = "none"
    sink: Literal["none", "learned", "per_token"] = "none"
    sink_init: Literal["zero", "normal"] = "zero"
    impl: Impl = "fused"

    @model_validator(mode="after")
    def _rotation_and_sink_fit(self) -> Self:
        if self.head_dim is not None and self.head_dim % 2:
            raise ConfigError(problem("head_dim", self.head_dim, "even, since RoPE turns pairs of channels", "add 1"))
        if self.rope_scaling is not None and self.rope_dim == 0:
            raise ConfigError(problem("rope_dim", 0, "> 0 with rope_scaling", "leave rope_scaling out"))
        if self.rope_scaling is not None and self.rope_theta <= 1:
            raise ConfigError(problem("rope_theta", self.rope_theta, "> 1 with rope_scaling", "use the base of the model"))
        if self.sink == "none" and self.sink_init != "zero":
            raise ConfigError(problem("sink_init", self.sink_init, "left out without a sink", "set sink='learned'"))
        return self

    @model_validator(mode="after")
    def _order_fits(self) -> Self:
        if self.projected_local is not None and self.key_norm == "after_rope":
            allowed = "none, before_rope or after_local with projected_local"
            raise ConfigError(problem("qk_norm", self.qk_norm, allowed, "move the norm before the rotation"))
        if self.projected_local is None and self.qk_norm == "after_local":
            raise ConfigError(problem("qk_norm", self.qk_norm, "none, before_rope or after_rope", "use before_rope"))
        if self.projected_local is None:
            self.refuse_options(["projected_branches"], " without projected_local", "remove it")
        ordered = tuple(name for name in ALL_BRANCHES if name in self.projected_branches)
        if not ordered or ordered != self.projected_branches:
            allowed = "some of q, k and v, in this order"
            remedy = "write for example ['k', 'v']"
            raise ConfigError(problem("projected_branches", list(self.projected_branches), allowed, remedy))
        return self

    @property
    def query_norm(self) -> KeyNorm:
        """The side of the rotation on which queries are normalised."""
        return "before_rope" if self.qk_norm in ("after_local", "key_after_rope") else self.qk_norm

    @property
    def key_norm(self) -> KeyNorm:
        """The side of the rotation on which keys are normalised."""
        return {"after_local": "before_rope", "key_after_rope": "after_rope"}.get(self.qk_norm, self.qk_norm)  # type: ignore[return-value]

    @property
    def span(self) -> int | None:
        """The attention window, the query included, or None for full causal attention."""
        return None

    @property
    def pair_window(self) -> int | None:
        """The attention window."""
        return self.span

    @property
    def accepts_qkv(self) -> bool:
        """Whether separate inputs are accepted; a local mixer of the input, or one that reads it, needs one."""
        return self.input_local is None and not self.locals_read_context

    @property
    def unseen_keys(self) -> int:
        """The sink."""
        return int(self.sink != "none")

    @property
    def receptive_field(self) -> int | None:
        """The window, and what the local mixers see before its first token."""
        return None if self.span is None else self.span + self.local_field - 1

    def check(self, d_model: int) -> None:
        """Raises ConfigError if the heads do not divide the width, or are narrower than their rotated channels."""
        if self.head_dim is None and d_model % (2 * self.n_heads):
            allowed = f"a divisor of d_model={d_model} with an even quotient, or given with a head_dim"
            raise ConfigError(problem("n_heads", self.n_heads, allowed, f"set head_dim, or change n_heads of {self.kind!r}"))
        if self.rotated(d_model) > self.key_width(d_model):
            allowed = f"at most the head width {self.key_width(d_model)}"
            raise ConfigError(problem("rope_dim", self.rope_dim, allowed, "leave it out to rotate whole heads"))

    def rotated(self, d_model: int) -> int:
        """Channels of each head that are rotated."""
        return self.key_width(d_model) if self.rope_dim is None else self.rope_dim

    def local_channels(self, site: SublayerPosition) -> Places:
        """Channels of the input, of the heads of all branches that are mixed, and of the update."""
        return Places(site.d_model, sum(self.branch_heads) * self.key_width(site.d_model), site.d_model)

    def without_local(self) -> Self:
        """The same sublayer without local mixers."""
        bare: Any = {"input_local": None, "projected_local": None, "update_local": None, "projected_branches": ALL_BRANCHES}
        return self.replace(**bare, qk_norm="before_rope" if self.qk_norm == "after_local" else self.qk_norm)

    @property
    def branch_heads(self) -> tuple[int, ...]:
        """Query heads and kv-heads of the branches that are mixed."""
        return tuple(self.n_heads if name == "q" else self.kv_heads for name in self.projected_branches)

    def branches(self, d_model: int) -> Parts:
        """Those of one width."""
        return tuple((heads, self.key_width(d_model)) for heads in self.branch_heads)

    def head_shape(self, d_model: int) -> HeadShape:
        """The heads of these options."""
        return HeadShape(self.n_heads, self.kv_heads, self.key_width(d_model), self.key_norm)

    def cost(self, site: SublayerPosition, shape: Shape) -> Cost:
        """Projections by their weights, attention by its visible pairs."""
        K, H, G, D, N = self.key_width(site.d_model), self.n_heads, self.kv_heads, site.d_model, shape.total_tokens
        projected = H + (2 if site.slot.projects_values else 1) * G
        weights = D * projected * K + H * K * (D + site.slot.update_extra) + (H * D if self.sink == "per_token" else 0)
        biases = (0 if self.bias == "none" else projected * K) + (D if self.bias == "all" else 0)
        norms = 0 if self.qk_norm == "none" else 2 * K if self.qk_norm_over == "head" else (H + G) * K
        pairs = shape.batch * visible_pairs(shape.tokens, self.span) + N * self.unseen_keys
        own = Cost(
            params=weights + biases + norms + (H if self.sink == "learned" else 0),
            matmul_flops=2 * N * weights,
            pair_flops=4 * (K + self.unseen_keys) * H * pairs,
            elementwise_flops=N * ((H + G) * (3 * self.rotated(D) + (4 * K if norms else 0)) + biases),
        )
        return own + self.local_cost(site, shape)

    def rotations(self, d_model: int) -> frozenset[RotationTable]:
        """Its rotation table, and those of the local mixers."""
        own = self.rotation(d_model)
        return self.local_rotations(d_model) | (set() if own is None else {own})

    def rotation(self, d_model: int) -> RotationTable | None:
        """Its rotation table; None without rotation."""
        rotated = self.rotated(d_model)
        return RotationTable(rotated, self.rope_theta, self.rope_scaling) if rotated else None


@dataclass(frozen=True, eq=False)
class AttentionCache:
    """The cache of attention: keys and values, and the caches of its local mixers."""

    # Any, since it is a `KeyValueRing` in static steps.
    keys: Any
    local: Places


class SoftmaxAttention(LocalPlaces, HeadMixer):
    """Projects to heads, rotates queries and keys by absolute position, attends, projects back."""

    def __init__(self, config: HeadsConfig, site: SublayerPosition) -> None:
        super().__init__()
        self.config = config
        self.norm_eps = site.norm_eps
        self.head_dim, self.rotation = config.key_width(site.d_model), config.rotation(site.d_model)
        H, G, K, D = config.n_heads, config.kv_heads, self.head_dim, site.d_model
        self.projects_values, self.heads_at = site.slot.projects_values, site.slot.heads_at
        projected = (H + (2 if self.projects_values else 1) * G) * K
        values = (G * K, site.hidden_std(D)) if self.projects_values else None
        grows = "both" if config.head_dim is None else "inputs"
        self.qkv = self.linear("qkv", D, projected, values=values, rows=(K,) * (projected // K), grows=grows)
        self.qkv_bias = None if config.bias == "none" else self.parameter("qkv_bias", (projected,), Constant(0.0), "bias")
        self.output = self.linear("output", H * K, D, std=config.output_std(site, H * K))
        self.output_bias = self.parameter("output_bias", (D,), Constant(0.0), "bias") if config.bias == "all" else None
        self.extra = extra_output(self, H * K, site.slot.update_extra)
        if config.qk_norm != "none":
            each = config.qk_norm_over == "head"
            self.q_gain = self.parameter("q_gain", (K if each else H * K,), Constant(1.0), "norm")
            self.k_gain = self.parameter("k_gain", (K if each else G * K,), Constant(1.0), "norm")
        start = Normal(SINK_STD) if config.sink_init == "normal" else Constant(0.0)
        self.sink = self.parameter("sink", (H,), start, "bias") if config.sink == "learned" else None
        self.sink_weight = None
        if config.sink == "per_token":
            self.sink_weight = self.parameter("sink_weight", (H, D), start, "gate", grows="inputs")
        self.fill_places(config, site)

    def new_cache(self) -> AttentionCache:
        """Empty caches; that of keys and values keeps the window."""
        return AttentionCache(KeyValueCache(self.config.span), self.new_local_caches())

    def forward(
        self, context: Views, layout: TokenLayout, cache: AttentionCache | None = None
    ) -> tuple[Float[Tensor, "B T E"], AttentionCache | None]:
        """Returns the attention output and the extended cache."""
        sink = self.sink_scores(context)
        joined, cache = self._projected(context, layout, cache)
        q_k, v, cache = self._before_rotation(joined, context, layout, cache)
        return self._attend(self._split(self._rotated(q_k, layout), v), context, layout, cache, sink)

    def project(
        self, context: Views, layout: TokenLayout, cache: AttentionCache | None = None
    ) -> tuple[Heads, AttentionCache | None]:
        """Returns the heads at the stage of the slot; keys in place of values if the slot projects none."""
        joined, cache = self._projected(context, layout, cache)
        if self.heads_at == "rotated":
            q_k, v, cache = self._before_rotation(joined, context, layout, cache)
            gain = (self.k_gain,) if self.config.key_norm == "before_rope" else ()
            heads = self._split(self._rotated(q_k, layout), v)
            return heads._replace(unrotated=(q_k[:, :, self.config.n_heads :], *gain)), cache
        H, G = self.config.n_heads, self.config.kv_heads
        if self.projects_values:
            q, k, v = joined.split((H, G, G), dim=2)
            return Heads(q, k, v), cache
        q, k = joined.split((H, G), dim=2)
        return Heads(q, k, k), cache

    def attend(
        self, heads: Heads, layout: TokenLayout, cache: AttentionCache | None = None, context: Views | None = None
    ) -> tuple[Float[Tensor, "B T E"], AttentionCache | None]:
        """Returns the output of attention over these heads and the extended cache.

        A sink per token and local mixers may need the context.
        """
        if self.heads_at == "projected":
            heads, cache = self._ready(heads, context, layout, cache)
        return self._attend(heads, context, layout, cache, self.sink_scores(context))

    def sink_scores(self, context: Views | None) -> Float[Tensor, " H"] | Float[Tensor, "B H T"] | None:
        """The score of the sink of each head, or of each head and query; None without a sink."""
        if self.sink_weight is None:
            return self.sink
        assert context is not None, "a sink per token is computed from the context"
        queries = context.q if isinstance(context, QKV) else context
        return linear_scores(queries, self.sink_weight, self.config.impl).transpose(0, 1)

    def queries_and_keys(
        self, heads: Heads, layout: TokenLayout, context: Views | None = None
    ) -> tuple[Float[Tensor, "B H T K"], Float[Tensor, "B G T K"]]:
        """Queries and keys whose products are the scores of attention over these heads, for audits."""
        ready = self._ready(heads, context, layout, None)[0] if self.heads_at == "projected" else heads
        return ready.q.transpose(1, 2), ready.k.transpose(1, 2)

    def _projected(
        self, context: Views, layout: TokenLayout, cache: AttentionCache | None
    ) -> tuple[Float[Tensor, "B T _ K"], AttentionCache | None]:
        """Query heads, then key heads, then value heads if the slot projects them."""
        if self.input_local is None:
            return self._project(context), cache
        assert isinstance(context, Tensor)
        context, following = mix_locally(self.input_local, context, layout, None if cache is None else cache.local.input)
        cache = None if cache is None else replace(cache, local=cache.local._replace(input=following))
        return self._project(context), cache

    def _split_values(self, joined: Tensor) -> tuple[Tensor, Tensor]:
        """Queries with keys, and values, or keys in their place."""
        H, G = self.config.n_heads, self.config.kv_heads
        if self.projects_values:
            q_k, v = joined.split((H + G, G), dim=2)
            return q_k, v
        return joined, joined[:, :, H:]

    def _split(self, q_k: Tensor, v: Tensor) -> Heads:
        q, k = q_k.split((self.config.n_heads, self.config.kv_heads), dim=2)
        return Heads(q, k, v)

    def _ready(
        self, heads: Heads, context: Views | None, layout: TokenLayout, cache: AttentionCache | None
    ) -> tuple[Heads, AttentionCache | None]:
        """Heads as they attend, of projected ones."""
        parts = (torch.cat((heads.q, heads.k), dim=2), heads.v)
        q_k, v, cache = self._before_rotation(parts, context, layout, cache)
        return self._split(self._rotated(q_k, layout), v)._replace(beside=heads.beside), cache

    def _before_rotation(
        self,
        heads: Tensor | tuple[Tensor, Tensor],
        context: Views | None,
        layout: TokenLayout,
        cache: AttentionCache | None,
    ) -> tuple[Tensor, Tensor, AttentionCache | None]:
        """Behind the norms of this side and the local mixing, of heads as projected or as queries with keys, and values."""
        raw, v = self._split_values(heads) if isinstance(heads, Tensor) else heads
        q_k = raw if self.config.qk_norm == "after_local" else self._normalise(raw, "before_rope")
        if self.projected_local is not None:
            # Heads as projected stand side by side already, as the local mixer takes them.
            side_by_side = isinstance(heads, Tensor) and self.projects_values and q_k is raw
            whole = heads if side_by_side else torch.cat((q_k, v), dim=2)
            assert isinstance(whole, Tensor)
            q_k, v, cache = self._mix_projected(whole, context, layout, cache)
        return self._normalise(q_k, "before_rope") if self.config.qk_norm == "after_local" else q_k, v, cache

    def _rotated(self, q_k: Tensor, layout: TokenLayout) -> Tensor:
        return self._normalise(self._rotate(q_k, layout), "after_rope")

    def _attend(
        self, heads: Heads, context: Views | None, layout: TokenLayout, cache: AttentionCache | None, sink: Tensor | None
    ) -> tuple[Tensor, AttentionCache | None]:
        mixed, cache = self._over_keys(heads, layout, cache, sink)
        update, local = self.mix_update(self._update(mixed), layout, Places() if cache is None else cache.local, context)
        return update, None if cache is None else replace(cache, local=local)

    def _over_keys(
        self, heads: Heads, layout: TokenLayout, cache: AttentionCache | None, sink: Tensor | None
    ) -> tuple[Tensor, AttentionCache | None]:
        """The weighted sums of values, heads side by side."""
        config = self.config
        q, k, v = (x.transpose(1, 2) for x in heads[:3])
        if layout.attend is not None:
            if heads.beside:
                raise ConfigError(
                    "attention of another library: got one more key for each query from the depth mixer; must be the attention "
                    "of this library; leave attn_implementation out"
                )
            return layout.attend(self, q, k, v), cache
        documents = layout.documents
        if cache is not None:
            k, v, keys = cache.keys.extend(k, v)
            cache = replace(cache, keys=keys)
        key_documents = None if documents is None else layout.key_documents(k.shape[2])
        if cache is not None:
            key_documents = cache.keys.arranged(key_documents)
        y = local_attention(
            q,
            k,
            v,
            window=config.span,
            documents=documents,
            key_documents=key_documents,
            sink=sink,
            beside=tuple(x.transpose(1, 2) if x.ndim > 1 else x for x in heads.beside),
            impl=config.impl,
        )
        return y.transpose(1, 2).flatten(2), cache

    def _update(self, y: Tensor) -> Tensor:
        update = with_extra(self.output, self.extra, y)
        if self.output_bias is None:
            return update
        return update + F.pad(self.output_bias, (0, update.shape[-1] - len(self.output_bias))).to(update.dtype)

    def _mix_projected(
        self, whole: Tensor, context: Views | None, layout: TokenLayout, cache: AttentionCache | None
    ) -> tuple[Tensor, Tensor, AttentionCache | None]:
        H, G, chosen = self.config.n_heads, self.config.kv_heads, self.config.projected_branches
        branches = dict(zip(ALL_BRANCHES, whole.split((H, G, G), dim=2), strict=True))
        first, last = {"q": 0, "k": H, "v": H + G}[chosen[0]], {"q": H, "k": H + G, "v": H + 2 * G}[chosen[-1]]
        neighbours = chosen != ("q", "v")
        taken = whole[:, :, first:last] if neighbours else torch.cat([branches[name] for name in chosen], dim=2)
        before = None if cache is None else cache.local.projected
        channels, following = mix_locally(self.projected_local, taken.flatten(2), layout, before, context)
        mixed = channels.unflatten(-1, (-1, self.head_dim))
        if chosen == ALL_BRANCHES:
            q_k, v = mixed.split((H + G, G), dim=2)
        else:
            branches |= zip(chosen, mixed.split([branches[name].shape[2] for name in chosen], dim=2), strict=True)
            q_k, v = torch.cat((branches["q"], branches["k"]), dim=2), branches["v"]
        return q_k, v, None if cache is None else replace(cache, local=cache.local._replace(projected=following))

    def _project(self, context: Views) -> Tensor:
        """[B T H+2G K]: query heads, then key heads, then value heads if the slot projects them."""
        if not isinstance(context, QKV):
            return self._biased(self.qkv(context)).unflatten(-1, (-1, self.head_dim))
        G, H = self.config.kv_heads, self.config.n_heads
        widths = [n * self.head_dim for n in ((H, G, G) if self.projects_values else (H, G))]
        parts: list[Tensor]
        if isinstance(self.qkv, nn.Linear):
            parts = [F.linear(x, weight) for x, weight in zip(context, self.qkv.weight.split(widths), strict=False)]
        else:
            # An adapter of another library changes outputs, not weights.
            parts = [self.qkv(x).split(widths, dim=-1)[i] for i, x in enumerate(context[: len(widths)])]
        return self._biased(torch.cat(parts, dim=-1)).unflatten(-1, (-1, self.head_dim))

    def _biased(self, projected: Tensor) -> Tensor:
        return projected if self.qkv_bias is None else projected + self.qkv_bias.to(projected.dtype)

    def _rotate(self, q_k: Tensor, layout: TokenLayout) -> Tensor:
        if self.rotation is None:
            return q_k
        turn, rotated = layout_rotation(layout, self.rotation, statistics_dtype(q_k)), self.rotation.width
        if rotated == self.head_dim:
            return rotate(q_k, turn)
        first, rest = q_k.split((rotated, self.head_dim - rotated), dim=-1)
        return torch.cat((rotate(first, turn), rest), dim=-1)

    def _normalise(self, q_k: Tensor, side: KeyNorm) -> Tensor:
        """With norms of queries and keys that have theirs on this side of the rotation."""
        q, k = q_k.split((self.config.n_heads, self.config.kv_heads), dim=2)
        norms_q, norms_k = self.config.query_norm == side, self.config.key_norm == side
        if not norms_q and not norms_k:
            return q_k
        q, k = self._norm(q, self.q_gain) if norms_q else q, self._norm(k, self.k_gain) if norms_k else k
        return torch.cat((q, k), dim=2)

    def _norm(self, x: Tensor, gain: Tensor) -> Tensor:
        if self.config.qk_norm_over == "head":
            return rms_norm(x, gain, self.norm_eps)
        return rms_norm(x.flatten(2), gain, self.norm_eps).unflatten(-1, x.shape[2:])
