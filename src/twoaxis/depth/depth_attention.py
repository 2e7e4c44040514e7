"""Depth attention: every sublayer attends, token by token, to a causal window of earlier states of the stream.

Letters: B batch, T position, D width, H heads, K key width, W depth window, S sources.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

import torch.nn.functional as F
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.equivalence import InitEquivalence
from twoaxis.core.errors import ConfigError, problem
from twoaxis.core.parameters import Constant, Normal, matrix_std
from twoaxis.core.site import Site, Stack
from twoaxis.core.state import Flow, Leaf, Numbers, stream
from twoaxis.core.views import Views
from twoaxis.core.weighted_sum import WeightedSum
from twoaxis.depth.base import DepthConfig, DepthEnds, DepthMixer
from twoaxis.ops.depth_attention import depth_attention, depth_attention_weights
from twoaxis.ops.norm import rms_norm
from twoaxis.ops.precision import Impl


class DepthAttentionConfig(DepthConfig):
    """Reads the stream through causal attention over its last W states: ShortSWA with depth as the position.

    Equation: c_i = [Norm_i](x_i),  q_g = W_q c_g,  k_i = W_k c_i,  v_i = W_v c_i for i in [g-W+1, g],
              h = [x_g +] W_o concat_heads(sum_i softmax_i(q_g^T k_i / sqrt(K)) v_i),  x_{g+1} = h + f(Norm(h))
    Source:   Residual Stream Duality, arXiv:2603.16039, section 2.2; no code is public
    Deviates: the note leaves open whose projections make a key: here the sublayer that reads state x_i makes k_i and v_i once,
              with its own matrices, as a token does along positions; what nobody can read has no matrix (the query of a
              sublayer with one source, all keys at W = 1). It names no norm, head count or start: these are options
    Shapes:   state ([B T D], up to W-1 times [B T H K] keys and values); softmax in float32 (float64 for float64)
    Init:     EXACT with mode="add": W_o = 0 adds nothing and still trains; NONE with mode="replace"
    Cost:     params D + 4*D*H*K per sublayer; matmul flops 8*D*H*K and attention flops 4*H*K per source, both per token;
              state D + 2*H*K*min(g, W-1) numbers per token; moves 5*D + 2*H*K per source of them per sublayer
    Published: the note measures nothing; it argues that this read costs O(T W L D) and a retained history

    Args:
        window: states read, the sublayer's own included; None reads all of them.
        mode: `add` the read to the stream, or `replace` the stream by it.
        n_heads: heads H.
        head_dim: K; None means d_model / n_heads.
        states: `normalised` (with a gain) before they are projected, or `raw`.
        impl: `fused` or `reference`.

    Raises:
        ConfigError: heads that do not divide the width.

    Example:
        >>> DepthAttentionConfig(window=4).sources(7)
        4
    """

    kind: Literal["depth_attention"] = "depth_attention"
    window: int | None = Field(default=8, ge=1)
    mode: Literal["add", "replace"] = "add"
    n_heads: int = Field(default=4, ge=1)
    head_dim: int | None = Field(default=None, ge=1)
    states: Literal["normalised", "raw"] = "normalised"
    impl: Impl = "fused"

    def sources(self, index: int) -> int:
        """States that sublayer `index` reads, its own included."""
        return index + 1 if self.window is None else min(index + 1, self.window)

    def width(self, d_model: int) -> int:
        """Numbers in all heads of one query, key or value."""
        return self.n_heads * (self.head_dim or d_model // self.n_heads)

    def asks(self, site: Site) -> bool:
        """Whether the sublayer has a query: with one source the softmax is 1 whatever it asks."""
        return self.sources(site.index) > 1

    def is_asked(self, site: Site) -> bool:
        """Whether the key of this sublayer's state is ever compared with another one."""
        return self.asks(site) or (self.window != 1 and site.index + 1 < site.stack.n_sublayers)

    def kept(self, site: Site) -> int:
        """Keys and values that the sublayer leaves to later ones, its own included."""
        return self.sources(site.index + 1) - 1 if site.index + 1 < site.stack.n_sublayers else 0

    def static_form(self) -> Mapping[str, Any] | None:
        """DenseFormer, which sums earlier outputs with free weights."""
        return {"kind": "denseformer", "granularity": "sublayer"}

    @property
    def init_equivalence(self) -> InitEquivalence:
        """Exact when the read is added through a zero matrix."""
        if self.mode == "add":
            return InitEquivalence("exact", "the output projection of the read starts at zero")
        return InitEquivalence("none", "the stream is replaced by a random projection of earlier states")

    def prepare(self, stack: Stack) -> Stack:
        """Refuses heads that do not divide the width."""
        if self.head_dim is None and stack.d_model % self.n_heads:
            allowed = f"a divisor of d_model={stack.d_model}, or given with a head_dim"
            raise ConfigError(problem("n_heads", self.n_heads, allowed, f"set head_dim, or change n_heads of {self.kind!r}"))
        return stack

    def state(self, stack: Stack, index: int) -> tuple[Leaf, ...]:
        """The stream, and a key and a value of each state that the next sublayer can read."""
        kept = self.sources(index) - 1 if index < stack.n_sublayers else 0
        heads = Numbers(self.width(stack.d_model))
        earlier = range(index - kept, index)
        # Each sublayer keeps its own value, and its own key where it compares it with others.
        keys = (Leaf(f"key of state {i}", heads, keeper=i if self.sources(i) > 1 else None) for i in earlier)
        values = (Leaf(f"value of state {i}", heads, keeper=i) for i in earlier)
        return stream(stack.d_model, index), *keys, *values

    def flow(self, site: Site) -> Flow:
        """The read takes stream and memory, and leaves the view, which the add takes up, and its own key and value."""
        D, W = site.d_model, self.width(site.d_model)
        memory, own = 2 * W * (self.sources(site.index) - 1), 2 * W * (self.kept(site) > 0)
        return Flow(read=Numbers(3 * D + memory), written=Numbers(2 * D + own), views=Numbers(D))

    def cost(self, site: Site, shape: Shape) -> Cost:
        """The projections, the attention over the window, and the write."""
        D, N, W, n = site.d_model, shape.total_tokens, self.width(site.d_model), self.sources(site.index)
        weights = D * W * (2 + self.asks(site) + self.is_asked(site))
        # The heads of one part, and one number per token in the precision of statistics.
        part, number = N * W * shape.element_bytes, N * max(4, shape.element_bytes)
        context = N * D * shape.element_bytes + number if self.states == "normalised" else 0
        attended = 2 * part + n * self.n_heads * number if n > 1 else 0
        # The own key and value are part of the next state where a later sublayer reads them.
        own = 0 if self.kept(site) else 2 * part if n > 1 else part
        return Cost(
            params=weights + (D if self.states == "normalised" else 0),
            matmul_flops=2 * N * weights,
            elementwise_flops=N * (4 * n * W + D * (6 if self.states == "normalised" else 2)),
            saved_bytes=context + attended + own,
        )

    def build(self, site: Site) -> "DepthAttention":
        """Builds the mixer of one sublayer."""
        return DepthAttention(self, site)

    def build_ends(self, stack: Stack) -> "DepthAttentionEnds":
        """Builds the ends."""
        return DepthAttentionEnds()


class StreamAndMemory(NamedTuple):
    """The depth state: the stream, and the keys and values of earlier states that later sublayers can read."""

    stream: Float[Tensor, "B T D"]
    keys: tuple[Float[Tensor, "B T H K"], ...]
    values: tuple[Float[Tensor, "B T H K"], ...]


class DepthAttention(DepthMixer):
    """See `DepthAttentionConfig`."""

    def __init__(self, config: DepthAttentionConfig, site: Site) -> None:
        super().__init__()
        self.config, self.eps = config, site.norm_eps
        self.asks, self.is_asked = config.asks(site), config.is_asked(site)
        self.keeps = config.kept(site)
        first = site.index + 1 - config.sources(site.index)
        self.names = tuple(f"state at {i}" if i else "embedding" for i in range(first, site.index + 1))
        D, W = site.d_model, config.width(site.d_model)
        parts = 1 + self.asks + self.is_asked
        self.projection = self.parameter("projection", (parts * W, D), Normal(matrix_std(D)), "matrix")
        # Not an nn.Linear: a host that fills those anew would end the equivalence with the plain model.
        start = Constant(0.0) if config.mode == "add" else Normal(matrix_std(W) / math.sqrt(2 * site.stack.n_blocks))
        self.output = self.parameter("output", (D, W), start, "matrix")
        if config.states == "normalised":
            self.gain = self.parameter("gain", (D,), Constant(1.0), "norm")

    def read(self, state: StreamAndMemory) -> tuple[Float[Tensor, "B T D"], StreamAndMemory]:
        """Returns the stream after the read, as the view and, with the memory after it, as the carry."""
        config, x = self.config, state.stream
        *asking, value = self._heads(x)
        mixed = value
        if self.is_asked:
            keys, values = (*state.keys, asking[-1]), (*state.values, value)
            if self.asks:
                mixed = depth_attention(asking[0], keys, values, config.impl)
            keys, values = (past[len(past) - self.keeps :] for past in (keys, values))
        else:
            keys, values = (), ()
        stream = self._joined(x, mixed.flatten(2))
        return stream, StreamAndMemory(stream, keys, values)

    def read_sums(
        self, state: StreamAndMemory, views: Float[Tensor, "B T D"], carry: StreamAndMemory
    ) -> tuple[WeightedSum, ...]:
        """The mixture of values, per head, before its output projection."""
        if not self.asks:
            return ()
        query, key, value = self._heads(state.stream)
        weights = depth_attention_weights(query, (*state.keys, key))
        values = tuple(v.flatten(2) for v in (*state.values, value))
        finish = partial(self._joined, state.stream)
        return (WeightedSum(views, "read", self.names, values, weights, finish=finish),)

    def _heads(self, x: Float[Tensor, "B T D"]) -> list[Float[Tensor, "B T H K"]]:
        """The query and the key, where there are such, and the value."""
        context = rms_norm(x, self.gain, self.eps) if self.config.states == "normalised" else x
        parts = F.linear(context, self.projection).chunk(1 + self.asks + self.is_asked, dim=-1)
        return [part.unflatten(-1, (self.config.n_heads, -1)).contiguous() for part in parts]

    def _joined(self, x: Float[Tensor, "B T D"], mixed: Float[Tensor, "B T W"]) -> Float[Tensor, "B T D"]:
        """The stream after the read."""
        update = F.linear(mixed, self.output).to(x.dtype)
        return x + update if self.config.mode == "add" else update

    def write(
        self, state: StreamAndMemory, update: Float[Tensor, "B T D"], context: Views, carry: StreamAndMemory
    ) -> StreamAndMemory:
        """Returns the stream plus the update, beside the memory that the read has left."""
        return carry._replace(stream=carry.stream + update)


class DepthAttentionEnds(DepthEnds):
    """The stream starts as the embeddings without a memory."""

    def enter(self, embeddings: Float[Tensor, "B T D"]) -> StreamAndMemory:
        """Returns the embeddings and an empty memory."""
        return StreamAndMemory(embeddings, (), ())

    def leave(self, state: StreamAndMemory) -> Float[Tensor, "B T D"]:
        """Returns the stream."""
        return state.stream
