"""Depth value mixing: attention with values that each token mixes over depth, known as Depth-Attention.

Letters: B batch, T position, D width, H heads, G kv-heads, K key width, n earlier layers that a layer reads.
"""

from dataclasses import replace
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.design import InitEquivalence, MixingDesign
from twoaxis.core.errors import ConfigError, problem
from twoaxis.core.mixer import ALONE_IN_ATTENTION
from twoaxis.core.position import LayerStack, SublayerPosition
from twoaxis.core.views import Heads, Views, WeightedSum
from twoaxis.depth.base import Controls, DepthConfig, Explanation, Layout, Mix
from twoaxis.depth.heads import HeadsEnds, StreamAndHeads, chain_of, chains, check_chains, place_in_chain
from twoaxis.depth.history import StreamWrite
from twoaxis.ops.blend import annealed, blend_cost, blend_parameter
from twoaxis.ops.depth_attention import depth_attention, depth_attention_weights
from twoaxis.ops.precision import Impl, statistics_dtype


class DepthValueMixingConfig(DepthConfig):
    """Attends with values that each token has mixed, by a softmax over depth, from those of earlier layers and its own.

    Equation: m_l = sum_i w_i m_i + w_l v_l,  w = softmax_i(r_l^T k_i / sqrt(K)) over the layers i that layer l reads and l;
              r_l the mean of the query heads of a kv-head; q, k as they attend, behind norm and rotation; y = attend(q, k, m);
              later layers read (k_l, m_l). weights="uniform": w = 1 / (n + 1)
    Source:   Depth-Attention, arXiv:2606.05014; hyq718/Depth-Attention @ 3bdad70, `depth_softmax` of its SDPA attention
    Deviates: caches k and m, so that generation equals the full pass, where the released code caches v. Norms are options of
              attention: the authors have qk_norm="key_after_rope". A chain is all sublayers of one kind that have heads
    Shapes:   state ([B T D], k and m [B T G K] of each layer that later ones read); heads [B T G K]; softmax in float32
    Init:     NONE: the values of earlier layers start with a weight of their own; EXACT with a blend or weights="off"
    Cost:     params 0, 1 per layer with a blend; flops 4*G*K per source and token, H*K for the mean; state D + 2*G*K numbers
              per token and layer that is still read (uniform: G*K, which takes as long, so that it is a control of weights)
    Published: 1.5B perplexity 7.77 (plain 8.17), 3B 7.27 (7.55); at 500M the loss is 0.0233 below plain, of which uniform
              weights give 0.0195 (arXiv:2606.05014): compare with them

    Args:
        stride: a layer reads the earlier ones whose number in the chain is a multiple of this; 1 reads all. Released models
            have 16, or half of their layers.
        recent_window: with a stride, the last layers that are read as well.
        weights: `attention` over depth; `uniform`, the control that reads no keys; or `off`, the plain model.
        blend: `none`, or `annealed`: v + g (m - v), g from 0 on, by a recipe or learned.
        impl: `fused` or `reference`; the same computation, since the plain form is as fast.

    Raises:
        ConfigError: no sublayer with heads, none that has an earlier one of its kind to read, kv-heads of different widths in
            one chain, or options that select nothing.

    Example:
        >>> config = DepthValueMixingConfig(stride=2, recent_window=1)
        >>> [config.sources(layer) for layer in range(5)]
        [(), (0,), (0, 1), (0, 2), (0, 2, 3)]
    """

    kind: Literal["depth_value_mixing"] = "depth_value_mixing"
    stride: int = Field(default=1, ge=1)
    recent_window: int = Field(default=0, ge=0)
    weights: Literal["attention", "uniform", "off"] = "attention"
    blend: Literal["none", "annealed"] = "none"
    impl: Impl = "fused"

    @property
    def design(self) -> MixingDesign:
        """A softmax of keys of layers, or a mean."""
        if self.weights == "off":
            return MixingDesign("none", "none", "f_j, e", "none: weight 1", "own state", "none", "is the stream")
        uniform = self.weights == "uniform"
        return MixingDesign(
            query="none" if uniform else "mean of the queries of a kv-head",
            key="none" if uniform else "keys of layers",
            value="mixed values of layers, own values",
            normaliser="mean" if uniform else "softmax",
            window="all" if self.stride == 1 else f"all of every {self.stride}",
            sharing="block" if self.blend == "annealed" else "none",
            injection="replaces values",
            weights="static" if uniform else "input and reader",
            heads="each" if uniform else "groups",
        )

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        if self.stride == 1 and self.recent_window:
            raise ConfigError(problem("recent_window", self.recent_window, "0 with stride=1, which reads all", "set stride"))
        if self.weights == "off":
            self.refuse_options(("stride", "recent_window", "blend"), " with weights='off', which reads nothing", "remove it")
        return self

    @property
    def init_equivalence(self) -> InitEquivalence:
        """None, unless it starts with the own values alone."""
        if self.weights == "off" or self.blend == "annealed":
            return InitEquivalence("exact", "values are the own ones, and a blend starts at 0")
        return InitEquivalence("none", "attention in later layers mixes in values of earlier ones")

    def controls(self) -> Controls:
        """Uniform weights, and none."""
        if self.weights != "attention":
            return Controls()
        return Controls({**self.to_data(), "weights": "uniform"}, unmixed={"kind": self.kind, "weights": "off"})

    def prepare(self, stack: LayerStack) -> LayerStack:
        """Refuses stacks without layers to mix, and asks for heads as they attend."""
        check_chains(stack, self.kind)
        kinds = [slot.kind for slot in stack.slots if slot.heads is not None]
        if self.weights != "off" and len(kinds) == len(chains(stack)) > 1:
            allowed = "two sublayers of one kind, or more, of which the later ones read the first"
            raise ConfigError(problem("sublayers with heads", kinds, allowed, f"raise n_layers, or drop {self.kind!r}"))
        rotated = self.weights == "attention"
        return stack.with_slots(lambda site: replace(site.slot, heads_at="rotated")) if rotated else stack

    def sources(self, layer: int) -> tuple[int, ...]:
        """The earlier layers of its chain that layer number `layer` reads."""
        return tuple(i for i in range(layer) if i % self.stride == 0 or i >= layer - self.recent_window)

    def kept(self, layer: int, n_layers: int) -> tuple[int, ...]:
        """The layers up to number `layer` of a chain that later ones read."""
        return tuple(i for i in range(layer + 1) if any(i in self.sources(one) for one in range(layer + 1, n_layers)))

    def cost(self, site: SublayerPosition, shape: Shape) -> Cost:
        """The mean of queries, and one product with each key and value."""
        N, heads = shape.total_tokens, site.slot.heads
        add = Cost(elementwise_flops=N * site.d_model)
        if heads is None or self.weights == "off" or not (n := len(self.sources(place_in_chain(site)))):
            return add
        width = heads.n_kv_heads * heads.head_dim
        mean = heads.n_heads * heads.head_dim if self.weights == "attention" and heads.n_heads > heads.n_kv_heads else 0
        blends = blend_cost(shape, width) if self.blend == "annealed" else Cost()
        return add + blends + Cost(elementwise_flops=N * (4 * (n + 1) * width + mean))

    def build(self, stack: LayerStack) -> tuple[list[StreamWrite], HeadsEnds]:
        """Builds a mixer for each layer of attention."""
        plain = [self.weights == "off" or site.slot.heads is None for site in stack.sites]
        mixers = [StreamWrite() if one else DepthValueMixing(self, s) for one, s in zip(plain, stack.sites, strict=True)]
        return mixers, HeadsEnds(stack)


class DepthValueMixing(StreamWrite, config=DepthValueMixingConfig):
    """See `DepthValueMixingConfig`; the state holds the key and the mixed value of each layer that later ones read."""

    around = ALONE_IN_ATTENTION

    def __init__(self, config: DepthValueMixingConfig, site: SublayerPosition) -> None:
        super().__init__()
        self.config, self.chain, layer = config, chain_of(site), place_in_chain(site)
        layers = [index for index, slot in enumerate(site.stack.slots) if slot.kind == site.slot.kind]
        sources, (held, kept) = config.sources(layer), (config.kept(last, len(layers)) for last in (layer - 1, layer))
        self.reads, self.keeps = tuple(map(held.index, sources)), tuple(map((*held, layer).index, kept))
        self.tensors, self.keeps_key = (1, False) if config.weights == "uniform" else (2, layer in kept)
        self.names = tuple(f"sublayer {layers[i]}" for i in (*sources, layer))
        self.blend = blend_parameter(self) if config.blend == "annealed" and sources else None

    def mix_heads(self, heads: Heads, context: Views, state: StreamAndHeads, layout: Layout = None) -> tuple[Heads, Any]:
        """Returns the heads with mixed values, and the state with what later layers read of this one."""
        v = heads.v
        if self.reads:
            keys, values = self._keys_and_values(heads, state)
            v = self._blended(v, depth_attention(self._query(heads), keys, values))
        heads = heads._replace(k=heads.k.contiguous() if self.keeps_key else heads.k, v=v.contiguous())
        known = self._layers(heads, state)
        return heads, state.with_chain(self.chain, tuple(x for i in self.keeps for x in known[i]))

    def _layers(self, heads: Heads, state: StreamAndHeads) -> list[tuple[Tensor, ...]]:
        """The key, unless weights are uniform, and the value of each layer in the state, and of this one."""
        known, n = (*state.heads[self.chain], *(heads.k, heads.v)[-self.tensors :]), self.tensors
        return [known[i : i + n] for i in range(0, len(known), n)]

    def _keys_and_values(self, heads: Heads, state: StreamAndHeads) -> tuple[list[Tensor], list[Tensor]]:
        """Of the layers that are read, the own ones last; with uniform weights values stand for keys."""
        layers = self._layers(heads, state)
        sources = [layers[i] for i in (*self.reads, -1)]
        return [layer[0] for layer in sources], [layer[-1] for layer in sources]

    def _query(self, heads: Heads) -> Tensor:
        """The mean of the queries of each kv-head; zeros weigh all sources alike."""
        q, G = heads.q, heads.k.shape[2]
        if self.config.weights == "uniform":
            return torch.zeros_like(heads.v)
        return q if q.shape[2] == G else q.unflatten(2, (G, -1)).mean(3, dtype=statistics_dtype(q))

    def _blended(self, own: Tensor, mixed: Tensor) -> Tensor:
        return mixed if self.blend is None else annealed(own, mixed, self.blend)

    def explain(self, done: Any) -> Explanation:
        """Returns the mixture of values, per kv-head."""
        if not isinstance(done, Mix) or not self.reads:
            return Explanation()
        own, (keys, values) = done.heads.v, self._keys_and_values(done.heads, done.state)

        def finish(total: Tensor) -> Tensor:
            return self._blended(own, total.unflatten(-1, own.shape[2:]).to(own.dtype))

        weights = depth_attention_weights(self._query(done.heads), keys)
        values = tuple(v.flatten(2) for v in values)
        return Explanation((WeightedSum(done.mixed.v, "values", self.names, values, weights, finish=finish),))
