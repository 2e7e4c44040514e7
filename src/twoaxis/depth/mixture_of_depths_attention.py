"""Mixture-of-depths attention (MoDA): attention whose softmax also holds keys of the same token from earlier layers.

Letters: B batch, T position, D width, H heads, G kv-heads, K key width, M slots that a layer sees, L layers.
"""

from dataclasses import replace
from functools import partial
from typing import Any, Literal, Self

import torch
from pydantic import model_validator
from torch import Tensor

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.design import InitEquivalence, MixingDesign
from twoaxis.core.errors import ConfigError, problem
from twoaxis.core.mixer import ALONE_IN_ATTENTION
from twoaxis.core.parameters import Constant
from twoaxis.core.position import LayerStack, SublayerInfo, SublayerPosition
from twoaxis.core.views import Heads, Views, WeightedSum
from twoaxis.depth.base import Controls, DepthConfig, Explanation, Layout, Mix, NoHeads
from twoaxis.depth.heads import HeadsEnds, StreamAndHeads, chain_of, chains, check_chains
from twoaxis.depth.history import StreamWrite
from twoaxis.ops.blend import blend_parameter
from twoaxis.ops.depth_attention import depth_attention_weights, depth_summary
from twoaxis.ops.norm import rms_norm
from twoaxis.ops.precision import Impl


class MixtureOfDepthsAttentionConfig(DepthConfig):
    """Attends, in one softmax, to the tokens before and to slots of the own token: keys and values of earlier sublayers.

    Equation: y = (sum_j e^{q^T k_j} v_j + sum_m e^{q^T s_m} u_m) / (sum_j e^{q^T k_j} + sum_m e^{q^T s_m}), scores divided by
              sqrt(K); j: tokens that the mask leaves, m: slots of the query's own token, from earlier sublayers;
              slot of attention: its keys s behind their norm and before their rotation, and its values u;
              slot of a feed-forward: (s, u) = W c, with c what it reads, s behind the key norm of the attention before it;
              q and k as they attend: queries are rotated, slots are not. weights="uniform": every q^T s_m is 0.
              norm="post": x' = Norm(x + f(x)) at every sublayer, which reads the stream as it is
    Source:   Mixture-of-Depths Attention, arXiv:2603.15619; operator: hustvl/MoDA @ 36a225f, naive_mixture_of_depth_causal_ref;
              model: keyu-wang-2002/DepthBench, nn/moda.py with examples/moda_common.py (cache_post_norm_k)
    Deviates: slots belong to a chain, all sublayers of one kind that have heads, and a sublayer without heads fills a slot of
              the chain of the attention before it; in blocks of attention and feed-forward, this is the published model. Slots
              of attention have no projections of their own. No mask reaches slots, as they are of the own token: in padding and
              where a query sees no token, it attends to slots alone
    Shapes:   state ([B T D], slots (s, u) [B T G K] per chain, the gain of the key norm [B T K] up to the feed-forward);
              softmax over depth and its merge in float32
    Init:     NONE: slots take a part of the softmax; EXACT with a blend or weights="off", and norm="pre". W ~ N(0, 0.25/D)
    Cost:     params 2*G*K*D per feed-forward that fills a slot (uniform: half), 1 per layer with a blend, D per sublayer with
              norm="post"; flops 4*H*K per token and slot, 7*H*K to merge; state D + 2*G*K numbers per token and slot: a
              pipeline cut sends all slots, generation caches none
    Published: 700M in 36 layers: perplexity 14.49, with slots of attention 14.08, with both 13.90; 38 plain layers, as many
              parameters, 14.27 (arXiv:2603.15619)

    Args:
        slots: which sublayers fill them: `attention`, or `attention_and_feed_forward`, all sublayers of which a later attention
            reads.
        weights: `attention`; `uniform`, the control without keys of slots; or `off`, the plain model.
        norm: of the model around it: `pre`, before each sublayer, or `post`, behind each sum.
        blend: `none`, or `annealed`: y_0 + g (y - y_0) with the attention y_0 to tokens alone, g from 0 on, by a recipe or
            learned.
        impl: `fused` or `reference`.

    Raises:
        ConfigError: no sublayer with heads, kv-heads of different widths in one chain, keys whose norm follows their rotation,
            options of slots with weights="off", or a blend with norm="post".

    Example:
        >>> MixtureOfDepthsAttentionConfig().slots
        'attention_and_feed_forward'
    """

    kind: Literal["mixture_of_depths_attention"] = "mixture_of_depths_attention"
    slots: Literal["attention", "attention_and_feed_forward"] = "attention_and_feed_forward"
    weights: Literal["attention", "uniform", "off"] = "attention"
    norm: Literal["pre", "post"] = "pre"
    blend: Literal["none", "annealed"] = "none"
    impl: Impl = "fused"

    @property
    def design(self) -> MixingDesign:
        """More keys and values in the softmax of attention."""
        post = self.norm == "post"
        if self.weights == "off":
            norm, sharing = ("norm of the sum", "sublayer") if post else ("none: weight 1", "none")
            return MixingDesign("none", "none", "f_j, e", norm, "own state", sharing, "is the stream")
        uniform, projects = self.weights == "uniform", post or self.slots == "attention_and_feed_forward"
        return MixingDesign(
            query="none" if uniform else "queries",
            key="none" if uniform else "keys of layers, before rotation",
            value="values of layers, W_v c" if projects else "values of layers",
            normaliser="softmax, shared with tokens",
            window="all",
            sharing="sublayer" if projects else "block" if self.blend == "annealed" else "none",
            injection="attended as further keys",
            weights="static" if uniform else "input and reader",
            heads="each",
        )

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        if self.weights == "off":
            self.refuse_options(("slots", "blend"), " with weights='off', which fills no slot", "remove it")
        if self.norm == "post":
            self.refuse_options(("blend",), " with norm='post', which is not the plain model", "remove it")
        return self

    @property
    def init_equivalence(self) -> InitEquivalence:
        """None, unless it starts with the attention to tokens alone."""
        if self.norm == "post":
            return InitEquivalence("none", "norms stand behind the sums")
        if self.weights == "off":
            return InitEquivalence("exact", "it is the plain model")
        if self.blend == "annealed":
            return InitEquivalence("exact", "the blend starts at 0, where attention is that to tokens alone")
        return InitEquivalence("none", "slots take a part of the softmax of attention")

    def controls(self) -> Controls:
        """Uniform weights, and none."""
        if self.weights != "attention":
            return Controls()
        return Controls(
            {**self.to_data(), "weights": "uniform"}, unmixed={"kind": self.kind, "weights": "off", "norm": self.norm}
        )

    def prepare(self, stack: LayerStack) -> LayerStack:
        """Refuses stacks without heads, uneven ones and keys without a form before rotation; asks for heads as they attend."""
        check_chains(stack, self.kind)
        for site in stack.sites if self.weights == "attention" else ():
            if site.slot.heads is not None and site.slot.heads.key_norm == "after_rope":
                what, allowed = f"key norm of {site.slot.kind!r} in block {site.block}", "before_rope or none"
                remedy = f"set qk_norm='before_rope', for slots of {self.kind!r} are not rotated"
                raise ConfigError(problem(what, "after_rope", allowed, remedy))
        return stack.with_slots(self._slot)

    def _slot(self, site: SublayerPosition) -> SublayerInfo:
        slot = replace(site.slot, more_keys=bool(self.seen(site)))
        slot = replace(slot, heads_at="rotated") if self.weights == "attention" else slot
        return replace(slot, norm="none") if self.norm == "post" else slot

    def fills(self, stack: LayerStack) -> list[int | None]:
        """The chain of the slot that each sublayer fills; None for one of which no later attention reads."""
        if self.weights == "off":
            return [None] * stack.n_sublayers
        kinds, newest, found = list(chains(stack)), None, list[int | None]()
        for slot in stack.slots:
            newest = kinds.index(slot.kind) if slot.heads is not None else newest
            found.append(newest if slot.heads is not None or self.slots == "attention_and_feed_forward" else None)
        for chain, kind in enumerate(kinds):
            last = max(i for i, slot in enumerate(stack.slots) if slot.kind == kind and slot.heads is not None)
            found[last:] = [None if one == chain else one for one in found[last:]]
        return found

    def numbers(self, site: SublayerPosition) -> int:
        """Numbers that a sublayer without heads projects to its slot."""
        chain = self.fills(site.stack)[site.index]
        if chain is None or site.slot.heads is not None:
            return 0
        heads = list(chains(site.stack).values())[chain]
        return (1 if self.weights == "uniform" else 2) * heads.n_kv_heads * heads.head_dim

    def seen(self, site: SublayerPosition) -> list[int]:
        """The sublayers whose slots the attention of this sublayer sees."""
        if site.slot.heads is None:
            return []
        chain = chain_of(site)
        return [index for index, one in enumerate(self.fills(site.stack)[: site.index]) if one == chain]

    def cost(self, site: SublayerPosition, shape: Shape) -> Cost:
        """The slots that attention sees, or the projection to one."""
        N, D, heads, weights = shape.total_tokens, site.d_model, site.slot.heads, site.d_model * self.numbers(site)
        post = self.norm == "post"
        add = Cost(params=weights + D * post, matmul_flops=2 * N * weights, elementwise_flops=N * D * (5 if post else 1))
        if heads is None or not (n := len(self.seen(site))):
            return add
        width = heads.n_heads * heads.head_dim
        return add + Cost(params=self.blend == "annealed", elementwise_flops=N * (4 * n + 7) * width)

    def build(self, stack: LayerStack) -> "tuple[list[SumWrite], HeadsEnds]":
        """Builds a mixer for each layer of attention and for each other sublayer that fills a slot."""
        mixers = list[SumWrite]()
        for site in stack.sites:
            if self.weights != "off" and site.slot.heads is not None:
                mixers.append(MixtureOfDepthsAttention(self, site))
            else:
                mixers.append(SlotProjection(self, site) if self.numbers(site) else SumWrite(self, site))
        return mixers, HeadsEnds(stack, more=1)


class SumWrite(StreamWrite):
    """Adds to the stream, and normalises the sum where the model does."""

    def __init__(self, config: MixtureOfDepthsAttentionConfig, site: SublayerPosition) -> None:
        super().__init__()
        self.eps = site.norm_eps
        self.impl: Impl = config.impl
        self.gain = self.parameter("gain", (site.d_model,), Constant(1.0), "norm") if config.norm == "post" else None

    def write(self, state: StreamAndHeads, update: Tensor, context: Views, carry: Any) -> StreamAndHeads:
        """Returns the state with the next stream."""
        state = super().write(state, update, context, carry)
        return state if self.gain is None else state._replace(stream=rms_norm(state.stream, self.gain, self.eps, self.impl))


class MixtureOfDepthsAttention(SumWrite, config=MixtureOfDepthsAttentionConfig):
    """See `MixtureOfDepthsAttentionConfig`; the state holds the slots of each chain, and then the gain of the newest keys."""

    around = ALONE_IN_ATTENTION

    def __init__(self, config: MixtureOfDepthsAttentionConfig, site: SublayerPosition) -> None:
        super().__init__(config, site)
        self.config, self.chain = config, chain_of(site)
        fills, seen = config.fills(site.stack), config.seen(site)
        self.fills = fills[site.index] is not None
        following = next((i for i in range(site.index + 1, len(fills)) if site.stack.slots[i].heads is not None), len(fills))
        self.gives_gain = any(config.numbers(one) for one in site.stack.sites[site.index + 1 : following])
        self.names = tuple(f"sublayer {index}" for index in seen)
        self.blend = blend_parameter(self) if config.blend == "annealed" and seen else None

    def mix_heads(self, heads: Heads, context: Views, state: StreamAndHeads, layout: Layout = None) -> tuple[Heads, Any]:
        """Returns the heads with the slots as one more key, and the state with a slot of these heads."""
        if self.names:
            weight, (keys, values) = () if self.blend is None else (self.blend,), self._slots(state)
            summary = depth_summary(self._query(heads.q), keys, values)
            heads = heads._replace(beside=(*summary, *weight))
        if not self.fills:
            return heads, state.with_chain(self.chain, ())
        # The slot holds the very values that attend.
        heads = heads._replace(v=heads.v.contiguous())
        if self.config.weights == "uniform":
            return heads, state.with_heads(self.chain, heads.v)
        key, *gain = heads.unrotated
        own = tuple(g.expand(*key.shape[:2], -1).contiguous() for g in gain) if self.gives_gain else ()
        return heads, state.with_heads(self.chain, key.contiguous(), heads.v).with_chain(-1, own)

    def _query(self, q: Tensor) -> Tensor:
        return torch.zeros_like(q) if self.config.weights == "uniform" else q

    def _slots(self, state: StreamAndHeads) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Keys and values of the slots; with uniform weights values stand for keys."""
        slots = state.heads[self.chain]
        return (slots, slots) if self.config.weights == "uniform" else (slots[::2], slots[1::2])

    def explain(self, done: Any) -> Explanation:
        """Returns the mixture of values of slots, per head."""
        if not isinstance(done, Mix) or not self.names:
            return Explanation()
        q = self._query(done.heads.q)
        keys, values = (
            [x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in each] for each in self._slots(done.state)
        )
        sources, weights = tuple(u.flatten(2) for u in values), depth_attention_weights(q, keys)
        finish = partial(Tensor.unflatten, dim=-1, sizes=q.shape[2:])
        return Explanation((WeightedSum(done.mixed.beside[1], "slots", self.names, sources, weights, finish=finish),))


class SlotProjection(SumWrite):
    """Fills a slot with keys and values of what a sublayer without heads reads."""

    def __init__(self, config: MixtureOfDepthsAttentionConfig, site: SublayerPosition) -> None:
        super().__init__(config, site)
        fills = config.fills(site.stack)
        chain = fills[site.index]
        assert chain is not None, "a sublayer without a slot projects nothing"
        self.chain, self.uniform = chain, config.weights == "uniform"
        self.head_dim = list(chains(site.stack).values())[chain].head_dim
        self.last = site.index + 1 == len(fills) or not config.numbers(site.stack.sites[site.index + 1])
        rows = (self.head_dim,) * (config.numbers(site) // self.head_dim)
        self.slot = self.linear("slot", site.d_model, sum(rows), rows=rows, grows="inputs")

    def mix_heads(self, heads: NoHeads, context: Any, state: StreamAndHeads, layout: Layout = None) -> tuple[NoHeads, Any]:
        """Returns the state with the slot, and without the gain behind the last one of it."""
        projected = self.slot(context)
        if self.uniform:
            return heads, state.with_heads(self.chain, projected.unflatten(-1, (-1, self.head_dim)))
        key, value = projected.chunk(2, dim=-1)
        for gain in state.heads[-1]:
            width = gain.shape[-1]
            normal = rms_norm(key.unflatten(-1, (-1, width)), None, self.eps) * gain.unsqueeze(2)
            key = normal.to(value.dtype).flatten(2)
        slot = (x.unflatten(-1, (-1, self.head_dim)).contiguous() for x in (key, value))
        state = state.with_heads(self.chain, *slot)
        return heads, state.with_chain(-1, ()) if self.last else state
