"""Value residual: attention mixes the values of the first attention layer into its own.

Letters: B batch, T position, D width, G kv-heads, K key width, N attention layers of a chain.
"""

from dataclasses import replace
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.design import InitEquivalence, MixingDesign
from twoaxis.core.errors import ConfigError, problem
from twoaxis.core.mixer import ALONE_IN_ATTENTION
from twoaxis.core.parameters import Constant, Normal, Values, matrix_std
from twoaxis.core.position import LayerStack, SublayerPosition
from twoaxis.core.views import QKV, Heads, Views
from twoaxis.depth.base import DepthConfig, Layout, State
from twoaxis.depth.heads import HeadsEnds, StreamAndHeads, chain_of, check_chains, place_in_chain
from twoaxis.depth.history import StreamWrite
from twoaxis.ops.blend import blend
from twoaxis.ops.mix import mix
from twoaxis.ops.precision import Impl, statistics_dtype
from twoaxis.ops.scores import linear_scores


class ValueResidualConfig(DepthConfig):
    """Attends with a weighted sum of each layer's own values and those of the first layer; the stream stays plain.

    Equation: V'_n = l1_n V_1 + l2_n V_n for n >= 2 of a chain, in the place of V_n before attention;
              plus: l1_n = scale softmax_n(logits), one softmax over all mixing layers, which the first layer owns;
              dense: V'_n = sum_{j<n} l_nj V_j + l2_n V_n;  gated: V'_n = V_1 + g (V_n - V_1), g = sigmoid(W c + b);
              svformer: V'_n = V_1, and later layers project no values
    Source:   Value Residual Learning, arXiv:2410.17897, section 3; `gated` is that of x-transformers 2.31.10
    Deviates: a chain is all sublayers of one kind that have heads, so that a ShortSWA never takes values of another width;
              svformer caches the shared values once per layer. The published start of plus is not known; here it equals that of
              learnable: logits 0, and the scale that makes each l1_n the option `first`. The authors' repository has fixed
              weights of 1/2 and svformer alone; learnable, plus, dense and a subset of layers follow the paper's text
    Shapes:   state ([B T D], values [B T G*K] per chain); heads [B T G K]; weights and gates in float32
    Init:     NONE as published; EXACT with first=0 and own=1
    Cost:     params 2 per later layer (constant, svformer 0; dense n; gated G*(D+1); plus 2 and one scale per chain); flops
              2*G*K per source and token; state D + G*K numbers per token and chain (dense: n*G*K; plus: one more per
              mixing layer, so that a pipeline stage knows its weights)
    Published: 82M validation loss 2.739, learnable 2.705, constant 2.700, sparse 2.687, plus 2.681 (arXiv:2410.17897)

    Args:
        variant: `learnable` weights; `constant` ones; `plus`, which shares one softmax among layers; `dense`, which reads all
            earlier layers; `gated`; or `svformer`.
        first: initial (or constant) weight l1 of the first layer's values.
        own: initial (or constant) weight l2 of the layer's own values.
        layers: layers of a chain that mix, counted from 0; None means all later ones. A subset is the sparse variant.
        impl: `fused` or `reference`.

    Raises:
        ConfigError: no sublayer with heads, kv-heads of different widths in one chain, a layer 0 that is to mix, or weights
            that the variant does not have.

    Example:
        >>> ValueResidualConfig(first=0.0, own=1.0).init_equivalence.relation
        'exact'
    """

    kind: Literal["value_residual"] = "value_residual"
    variant: Literal["learnable", "constant", "plus", "dense", "gated", "svformer"] = "learnable"
    first: float = 0.5
    own: float = 0.5
    layers: tuple[int, ...] | None = Field(default=None)
    impl: Impl = "fused"

    @property
    def design(self) -> MixingDesign:
        """Weights of the first layer's values, or of all."""
        free, gated = self.variant in ("constant", "svformer"), self.variant == "gated"
        return MixingDesign(
            query="parameter W_g" if gated else "none",
            key="c" if gated else "none",
            value="values of layers" if self.variant == "dense" else "values of the first and own layer",
            normaliser={"plus": "softmax over readers", "gated": "sigmoid"}.get(self.variant, "none"),
            window="all" if self.variant == "dense" else "first layer",
            sharing="none" if free else "block",
            injection="replaces values",
            weights="input and reader" if gated else "static",
            heads="each",
        )

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        if self.layers is not None and (not self.layers or min(self.layers) < 1):
            got, remedy = list(self.layers), "leave out layer 0, whose values the others mix in"
            raise ConfigError(problem("layers", got, "one or more layers >= 1", remedy))
        if self.variant == "svformer" and self.layers is not None:
            raise ConfigError(problem("layers", list(self.layers), "left out with svformer", "choose another variant"))
        if self.variant in ("gated", "svformer"):
            self.refuse_options(("first", "own"), f" with {self.variant}, which has no such weights", "choose another variant")
        return self

    @property
    def init_equivalence(self) -> InitEquivalence:
        """Exact when the first layer's values start with weight 0 and the own ones with weight 1."""
        if self.variant in ("learnable", "constant", "plus", "dense") and (self.first, self.own) == (0.0, 1.0):
            return InitEquivalence("exact", "the own values start with weight 1 and the first layer's with weight 0")
        return InitEquivalence("none", "attention in later layers mixes in the values of the first one")

    def prepare(self, stack: LayerStack) -> LayerStack:
        """Refuses stacks without heads or with uneven ones, and drops the values of later layers of svformer."""
        check_chains(stack, self.kind)
        if self.variant != "svformer":
            return stack
        return stack.with_slots(lambda site: replace(site.slot, projects_values=not self.mixes(site)))

    def mixes(self, site: SublayerPosition) -> bool:
        """Whether this sublayer attends with mixed values."""
        place = place_in_chain(site)
        return site.slot.heads is not None and place > 0 and (self.layers is None or place in self.layers)

    def mixing(self, site: SublayerPosition) -> list[int]:
        """The sublayers of the chain of this one that attend with mixed values."""
        return [s.index for s in site.stack.sites if s.slot.kind == site.slot.kind and self.mixes(s)]

    def shares(self, site: SublayerPosition) -> int:
        """Number of weights that this sublayer owns and later ones of its chain apply to its values."""
        return len(self.mixing(site)) if self.variant == "plus" and place_in_chain(site) == 0 else 0

    def cost(self, site: SublayerPosition, shape: Shape) -> Cost:
        """The mixing weights, and one multiply-add per source and number."""
        N, D, heads = shape.total_tokens, site.d_model, site.slot.heads
        add = Cost(elementwise_flops=N * D)
        if layers := self.shares(site):
            return add + Cost(params=layers + 1)
        if heads is None or not self.mixes(site) or self.variant == "svformer":
            return add
        G, width = heads.n_kv_heads, heads.n_kv_heads * heads.head_dim
        if self.variant == "gated":
            return add + Cost(params=G * (D + 1), matmul_flops=2 * N * D * G, elementwise_flops=3 * N * width)
        if self.variant == "plus":
            return add + Cost(params=1, elementwise_flops=4 * N * width)
        sources = (place_in_chain(site) if self.variant == "dense" else 1) + 1
        return add + Cost(params=sources * (self.variant != "constant"), elementwise_flops=2 * N * sources * width)

    def build(self, stack: LayerStack) -> tuple[list[StreamWrite], HeadsEnds]:
        """Builds the weights of each layer of attention."""
        return [StreamWrite() if s.slot.heads is None else ValueResidual(self, s) for s in stack.sites], HeadsEnds(stack)


class ValueResidual(StreamWrite, config=ValueResidualConfig):
    """See `ValueResidualConfig`; the state holds the un-mixed values [B T G*K] that later layers may read."""

    around = ALONE_IN_ATTENTION

    def __init__(self, config: ValueResidualConfig, site: SublayerPosition) -> None:
        super().__init__()
        self.config, self.mixes, self.chain = config, config.mixes(site), chain_of(site)
        place, heads, D = place_in_chain(site), site.slot.heads, site.d_model
        self.records, self.shares = config.variant == "dense" or place == 0, config.shares(site)
        if self.shares:
            self.logits = self.parameter("logits", (self.shares,), Constant(0.0), "mixing")
            self.scale = self.parameter("scale", (1,), Constant(config.first * self.shares), "mixing")
        if not self.mixes or heads is None:
            return
        if config.variant == "plus":
            self.rank = config.mixing(site).index(site.index)
            self.own = self.parameter("own", (1,), Constant(config.own), "mixing")
        if config.variant == "gated":
            start = Normal(matrix_std(D))
            self.gate_weight = self.parameter("gate_weight", (heads.n_kv_heads, D), start, "gate", grows="inputs")
            self.gate_bias = self.parameter("gate_bias", (heads.n_kv_heads,), Constant(0.0), "bias")
        elif config.variant in ("learnable", "dense"):
            start = (config.first, *[0.0] * (place - 1 if config.variant == "dense" else 0), config.own)
            self.weights = self.parameter("weights", (1, len(start)), Values(start), "mixing")

    def mix_heads(self, heads: Heads, context: Views, state: StreamAndHeads, layout: Layout = None) -> tuple[Heads, State]:
        """Returns the heads with mixed values, and the state with the un-mixed ones that later layers read."""
        mixed = heads._replace(v=self._mixed(heads.v, context, state.heads[self.chain])) if self.mixes else heads
        if not self.records:
            return mixed, state
        shares = (self._shares(heads.v),) if self.shares else ()
        return mixed, state.with_heads(self.chain, heads.v.flatten(2).contiguous(), *shares)

    def _shares(self, v: Tensor) -> Tensor:
        """[B T layers]: the weight of these values in each later layer, the same for every token."""
        dtype = statistics_dtype(v)
        return (self.scale.to(dtype) * torch.softmax(self.logits.to(dtype), dim=0)).expand(*v.shape[:2], -1).contiguous()

    def _mixed(self, v: Tensor, context: Views, earlier: tuple[Tensor, ...]) -> Tensor:
        config, shape = self.config, v.shape[2:]
        if config.variant == "svformer":
            return earlier[0].unflatten(-1, shape)
        if config.variant == "gated":
            read = context.v if isinstance(context, QKV) else context
            scores = linear_scores(read, self.gate_weight, config.impl).permute(1, 2, 0) + self.gate_bias
            return blend(earlier[0].unflatten(-1, shape), v, torch.sigmoid(scores))
        if config.variant == "plus":
            first, shares = earlier
            weights = torch.stack((shares[..., self.rank], self.own.to(shares.dtype).expand(shares.shape[:2]))).unsqueeze(0)
            return mix((first, v.flatten(2)), weights)[0].unflatten(-1, shape)
        constant = [[config.first, config.own]] if config.variant == "constant" else None
        weights = torch.tensor(constant, dtype=statistics_dtype(v), device=v.device) if constant else self.weights
        return mix((*earlier, v.flatten(2)), weights)[0].unflatten(-1, shape)
