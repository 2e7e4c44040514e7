"""LIMe: attention reads keys and values that a static router mixes from the heads of all earlier layers.

Letters: B batch, T position, D width, G kv-heads, K key width, n layers of the chain up to this one.
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.design import InitEquivalence, MixingDesign
from twoaxis.core.mixer import ALONE_IN_ATTENTION
from twoaxis.core.parameters import Constant, Uniform, Values
from twoaxis.core.position import LayerStack, SublayerPosition
from twoaxis.core.views import Heads, Views
from twoaxis.depth.base import DepthConfig, DepthMixer, Layout, State
from twoaxis.depth.heads import HeadsEnds, StreamAndHeads, chain_of, check_chains, place_in_chain
from twoaxis.depth.history import StreamWrite
from twoaxis.ops.mix import head_by_head, mix_heads
from twoaxis.ops.precision import Impl


class LimeConfig(DepthConfig):
    """Attends with keys and values routed, by learned weights, from every kv-head of every earlier layer; a plain stream.

    Equation: (K', V')_h = sum_{l' <= l, h'} W_l[h, (l', h')] (K, V)_{l'h'}, before the rotation of the keys
    Source:   Layer-Integrated Memory, arXiv:2502.09245, static router; authors' code corl-team/lime src/lm/lime.py
    Deviates: the own-layer block of W and the rest are two parameters; the first layer of a chain has no router, which could
              only mix its own heads. A chain is all sublayers of one kind that have heads. The authors train the router at ten
              times the rate of the model (0.01 for 0.001), without decay as here: optimizer.groups=[{pattern="*.depth.earlier",
              lr_scale=10}, {pattern="*.depth.own", lr_scale=10}]
    Shapes:   state ([B T D], [B T G 2*K] of each earlier layer); heads [B T G K]; sums in float32
    Init:     NONE with init="released" (own layer identity, the rest uniform in +-sqrt(3/(n G))); EXACT with init="plain"
    Cost:     params n*G^2 per later layer; flops 4*n*G^2*K per token; state D + 2*n*G*K numbers per token; the cache holds
              routed keys and values and does not grow
    Published: average of LLaMA 48.20, Hyper-Connections 49.93, LIMe 51.74 (the authors' README)

    Args:
        init: `released`, or `plain` for a model that starts as without it.
        impl: `fused`, or `reference`, which saves keys and values in half precision once more, as float32.

    Raises:
        ConfigError: no sublayer with heads, or kv-heads of different widths in one chain.

    Example:
        >>> LimeConfig(init="plain").init_equivalence.relation
        'exact'
    """

    kind: Literal["lime"] = "lime"
    init: Literal["released", "plain"] = "released"
    impl: Impl = "fused"

    @property
    def design(self) -> MixingDesign:
        """Free weights over the heads of all layers."""
        return MixingDesign(
            query="none",
            key="none",
            value="keys and values of layers",
            normaliser="none",
            window="all",
            sharing="block",
            injection="replaces keys and values",
            heads="across",
        )

    @property
    def init_equivalence(self) -> InitEquivalence:
        """Exact when other layers start with weight 0."""
        if self.init == "plain":
            return InitEquivalence("exact", "every layer starts with its own keys and values alone")
        return InitEquivalence("none", "the weights of other layers start at random")

    def prepare(self, stack: LayerStack) -> LayerStack:
        """Refuses stacks without heads or with uneven ones."""
        check_chains(stack, self.kind)
        return stack

    def cost(self, site: SublayerPosition, shape: Shape) -> Cost:
        """The router, and one multiply-add per weight and number."""
        N, heads = shape.total_tokens, site.slot.heads
        add = Cost(elementwise_flops=N * site.d_model)
        if heads is None or place_in_chain(site) == 0:
            return add
        weights = (place_in_chain(site) + 1) * heads.n_kv_heads**2
        return add + Cost(params=weights, matmul_flops=2 * N * weights * 2 * heads.head_dim)

    def build(self, stack: LayerStack) -> tuple[Sequence[DepthMixer], HeadsEnds]:
        """Builds a router for each layer of attention."""
        mixers = [StreamWrite() if site.slot.heads is None else Lime(self, site) for site in stack.sites]
        return mixers, HeadsEnds(stack)


class Lime(StreamWrite, config=LimeConfig):
    """See `LimeConfig`; the state holds the un-routed (keys, values) [B T G 2*K] of each layer so far."""

    around = ALONE_IN_ATTENTION

    def __init__(self, config: LimeConfig, site: SublayerPosition) -> None:
        super().__init__()
        self.chain, heads, earlier = chain_of(site), site.slot.heads, place_in_chain(site)
        self.routes = earlier > 0
        self.impl: Impl = config.impl
        if self.routes and heads is not None:
            G = heads.n_kv_heads
            start = Constant(0.0) if config.init == "plain" else Uniform(math.sqrt(3 / ((earlier + 1) * G)))
            self.earlier = self.parameter("earlier", (G, earlier * G), start, "mixing", grows="both", stacked=1)
            identity = tuple(float(row == column) for row in range(G) for column in range(G))
            self.own = self.parameter("own", (G, G), Values(identity), "mixing", grows="both")

    def mix_heads(self, heads: Heads, context: Views, state: StreamAndHeads, layout: Layout = None) -> tuple[Heads, State]:
        """Returns the heads with routed keys and values, and the state with the un-routed ones."""
        state = state.with_heads(self.chain, head_by_head(torch.cat((heads.k, heads.v), dim=-1)))
        if not self.routes:
            return heads, state
        weights = torch.cat((self.earlier, self.own), dim=1)
        k, v = mix_heads(state.heads[self.chain], weights, self.impl).chunk(2, dim=-1)
        return Heads(heads.q, k, v), state
