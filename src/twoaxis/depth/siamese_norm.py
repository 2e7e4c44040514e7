"""SiameseNorm: a post-norm and a pre-norm stream that share every sublayer.

Letters: B batch, T position, D width, b block, counted from 0.
"""

import math
from dataclasses import replace
from typing import Any, Literal

from torch import add

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.design import InitEquivalence, MixingDesign
from twoaxis.core.parameters import Constant
from twoaxis.core.position import LayerStack, SublayerInfo, SublayerPosition
from twoaxis.core.views import Views
from twoaxis.depth.base import DepthConfig, DepthEnds, DepthMixer, Layout, Stream
from twoaxis.ops.norm import rms_norm
from twoaxis.ops.precision import Impl

Pair = tuple[Stream, Stream]
"""The depth state: the stream x, whose norm the next sublayer takes first, and the plain sum y."""


class SiameseNormConfig(DepthConfig):
    """Keeps a stream that is normalised before every update and one that is not, and feeds sublayers with both.

    Equation: x_n = P(x);  z = f(Norm(x_n + Q(y)));  x' = x_n + z / c;  y' = y + z,  c = sqrt(2 (b + 1)), P and Q RMSNorms
              start x = y = e;  end P(x) + Q(y), behind which the final norm follows
              hybrid_pre, where heads are normalised: z = f(g * x + Q(y));  x' = x + z / c, g a vector
    Source:   SiameseNorm, arXiv:2602.08064v2, section 3; authors' code Qwen-Applications/SiameseNorm@70efa00:
              deit-model-siamesenorm.py (post_pre) and OLMo_model_hybrid_pre.py (hybrid_pre)
    Deviates: c counts blocks, as both codes do; the notation of the paper counts layers. In hybrid_pre, g x + Q(y) feeds
              sublayers with heads, whose queries and keys `qk_norm` of attention normalises; the authors normalise values too,
              which attention here does not. It feeds the first sublayer of a block where heads are unknown. DeiT has
              LayerNorms in place of RMSNorms
    Shapes:   state (x, y), each [B T D]; update [B T D] -> state; statistics in float32, rounded once
    Init:     NONE with init="ones". UP_TO_NORM with init="preserving": P and g start at 0, so that a sublayer reads
              Norm(Q(y)), which is Norm(y) but for eps, and y is the plain stream. Both train from there
    Cost:     params 2*D per sublayer and at the end; flops 12*D per token and sublayer (g in place of P: 9*D); state 2*D
              numbers per token

    Args:
        form: `post_pre`, or `hybrid_pre`, which leaves out the norm of sublayers whose heads are normalised.
        init: `ones`, as published, or `preserving`, for a trained pre-norm model.
        impl: `fused` or `reference`.

    Example:
        >>> SiameseNormConfig(init="preserving").init_equivalence.relation
        'up_to_norm'
    """

    kind: Literal["siamese_norm"] = "siamese_norm"
    form: Literal["post_pre", "hybrid_pre"] = "post_pre"
    init: Literal["ones", "preserving"] = "ones"
    impl: Impl = "fused"

    @property
    def design(self) -> MixingDesign:
        """Two streams with factors from parameters, norms and depth."""
        norm = "norm of each stream"
        return MixingDesign("none", "none", "f_j, e", norm, "own state, 2 streams", "sublayer", "is the stream, twice")

    @property
    def init_equivalence(self) -> InitEquivalence:
        """None; up to a norm of a norm with gains of 0."""
        if self.init == "preserving":
            return InitEquivalence("up_to_norm", "sublayers read the norm of the norm of the plain stream alone")
        return InitEquivalence("none", "sublayers read the sum of two normalised streams")

    def normalises_heads(self, site: SublayerPosition) -> bool:
        """Whether the sublayer reads without a norm of its own, since its heads are normalised."""
        has_heads = site.slot.heads is not None if site.slot.kind else site.opens_block
        return self.form == "hybrid_pre" and has_heads

    def prepare(self, stack: LayerStack) -> LayerStack:
        """Returns the stack without norms before sublayers whose heads are normalised."""
        return super().prepare(stack).with_slots(self._slot)

    def _slot(self, site: SublayerPosition) -> SublayerInfo:
        return replace(site.slot, norm="none" if self.normalises_heads(site) else "rms")

    def cost(self, site: SublayerPosition, shape: Shape) -> Cost:
        """Two norms, or one and a product; and the sums."""
        flops = 9 if self.normalises_heads(site) else 12
        return Cost(params=2 * site.d_model, elementwise_flops=flops * site.d_model * shape.total_tokens)

    def ends_cost(self, stack: LayerStack, shape: Shape) -> Cost:
        """Two norms and their sum."""
        return Cost(params=2 * stack.d_model, elementwise_flops=9 * stack.d_model * shape.total_tokens)

    @property
    def x_start(self) -> Constant:
        """The initial gain of x."""
        return Constant(0.0 if self.init == "preserving" else 1.0)

    def build(self, stack: LayerStack) -> "tuple[list[SiameseNorm], SiameseNormEnds]":
        """Builds the norms of both streams for each sublayer, and those of the end."""
        return [SiameseNorm(self, site) for site in stack.sites], SiameseNormEnds(self, stack)


class SiameseNorm(DepthMixer, config=SiameseNormConfig):
    """See `SiameseNormConfig`."""

    def __init__(self, config: SiameseNormConfig, site: SublayerPosition) -> None:
        super().__init__()
        self.eps, width = site.norm_eps, (site.d_model,)
        self.impl: Impl = config.impl
        self.share = 1 / math.sqrt(2 * (site.block + 1))
        self.x_normed = not config.normalises_heads(site)
        # Without a norm of its own, the sublayer has that of y in its place.
        self.x_gain = self.parameter("x_gain", width, config.x_start, "norm")
        if self.x_normed:
            self.y_gain = self.parameter("y_gain", width, Constant(1.0), "norm")
        else:
            self.input_gain = self.parameter("input_gain", width, Constant(1.0), "norm")

    def read(self, state: Pair, layout: Layout = None, cache: Any = None) -> tuple[Stream, Stream, Any]:
        """Returns the sum of both normalised streams, and x as the update is added to it."""
        x, y = state
        y_n = rms_norm(y, self.y_gain if self.x_normed else self.input_gain, self.eps, self.impl)
        if not self.x_normed:
            return self.x_gain.to(x.dtype) * x + y_n, x, cache
        x_n = rms_norm(x, self.x_gain, self.eps, self.impl)
        return x_n + y_n, x_n, cache

    def write(self, state: Pair, update: Stream, context: Views, carry: Stream) -> Pair:
        """Returns x with its share of the update, and y with all of it."""
        return add(carry, update, alpha=self.share), state[1] + update


class SiameseNormEnds(DepthEnds):
    """Both streams start as the embeddings and end as the sum of their norms."""

    def __init__(self, config: SiameseNormConfig, stack: LayerStack) -> None:
        super().__init__()
        self.eps = stack.norm_eps
        self.impl: Impl = config.impl
        self.x_gain = self.parameter("x_gain", (stack.d_model,), config.x_start, "norm")
        self.y_gain = self.parameter("y_gain", (stack.d_model,), Constant(1.0), "norm")

    def enter(self, embeddings: Stream, layout: Layout = None, cache: Any = None) -> tuple[Pair, Any]:
        """Returns the embeddings twice."""
        return (embeddings, embeddings), cache

    def leave(self, state: Pair, layout: Layout = None, cache: Any = None) -> tuple[Stream, Any]:
        """Returns P(x) + Q(y)."""
        x, y = state
        return rms_norm(x, self.x_gain, self.eps, self.impl) + rms_norm(y, self.y_gain, self.eps, self.impl), cache
