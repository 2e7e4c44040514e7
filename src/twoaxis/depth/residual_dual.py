"""ResiDual: a post-norm stream that sublayers read, and beside it the plain sum of all updates, read at the end alone.

Letters: B batch, T position, D width.
"""

from dataclasses import replace
from typing import Any, Literal

from pydantic import Field

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.design import InitEquivalence, MixingDesign
from twoaxis.core.parameters import Constant, DeclaredModule
from twoaxis.core.position import LayerStack, SublayerPosition
from twoaxis.core.views import Views
from twoaxis.depth.base import DepthConfig, DepthEnds, DepthMixer, Layout, Stream
from twoaxis.ops.blend import annealed, blend_cost, blend_parameter
from twoaxis.ops.norm import layer_norm, rms_norm
from twoaxis.ops.precision import Impl

Pair = tuple[Stream, Stream]
"""The depth state: the post-norm stream x and the sum r."""


class ResidualDualConfig(DepthConfig):
    """Keeps a post-norm stream for the sublayers, and a plain sum that is normalised once and added at the end.

    Equation: y = f(x);  x' = LayerNorm(x + y);  r' = r + y;  start x = r = e;  end h = x + LayerNorm(r)
    Source:   ResiDual, arXiv:2304.14802, section 3.1; authors' code microsoft/ResiDual@8682f75, resi_dual_layers.py
    Deviates: the final RMSNorm of the decoder follows, as for every mixer; the authors' h goes to the head as it is. Their
              factors on r (dec_res_input_norm_scale) and on x at the end (dec_alpha) are 1, as by default there
    Shapes:   state (x, r), each [B T D]; update [B T D] -> state; statistics in float32, rounded once
    Init:     NONE: sublayers read a normalised stream. Gains start at 1, biases at 0. EXACT with blend="annealed"
    Cost:     params 2*D per sublayer and at the end; flops 10*D per token and sublayer; state 2*D numbers per token

    Args:
        layer_eps: eps of the LayerNorms.
        blend: `none`, or `annealed`: from pre-norm to this with a weight g from 0 on, by a recipe or learned; the norm before
            each sublayer is blended out too: (1 - g) Norm(x) + g x.
        impl: `fused` or `reference`.

    Example:
        >>> ResidualDualConfig(blend="annealed").init_equivalence.relation
        'exact'
    """

    kind: Literal["residual_dual"] = "residual_dual"
    layer_eps: float = Field(default=1e-5, gt=0)
    blend: Literal["none", "annealed"] = "none"
    impl: Impl = "fused"

    @property
    def design(self) -> MixingDesign:
        """Every source with weight 1, but for norms."""
        return MixingDesign("none", "none", "f_j, e", "norm of the sum", "own state, 2 streams", "sublayer", "is the stream")

    @property
    def init_equivalence(self) -> InitEquivalence:
        """None; exact with a blend."""
        if self.blend == "annealed":
            return InitEquivalence("exact", "the blend starts at 0, where x is the plain stream and the end adds nothing")
        return InitEquivalence("none", "the stream that sublayers read is normalised after every update")

    def prepare(self, stack: LayerStack) -> LayerStack:
        """Returns the stack without norms before its sublayers."""
        return super().prepare(stack).with_slots(lambda site: replace(site.slot, norm="none"))

    def cost(self, site: SublayerPosition, shape: Shape) -> Cost:
        """A norm, two adds, and with a blend the norm before the sublayer and two interpolations."""
        D, tokens = site.d_model, shape.total_tokens
        cost = Cost(params=2 * D, elementwise_flops=10 * D * tokens)
        if self.blend == "none":
            return cost
        return cost + blend_cost(shape, D) + Cost(params=D, elementwise_flops=7 * D * tokens)

    def ends_cost(self, stack: LayerStack, shape: Shape) -> Cost:
        """The norm of the sum, and its addition."""
        cost = Cost(params=2 * stack.d_model, elementwise_flops=9 * stack.d_model * shape.total_tokens)
        return cost if self.blend == "none" else cost + blend_cost(shape, stack.d_model)

    def build(self, stack: LayerStack) -> "tuple[list[ResidualDual], ResidualDualEnds]":
        """Builds a norm for each sublayer, and that of the sum."""
        return [ResidualDual(self, site) for site in stack.sites], ResidualDualEnds(self, stack)


class Affine(DeclaredModule):
    """The gain and the bias of a LayerNorm."""

    def __init__(self, config: ResidualDualConfig, width: int) -> None:
        super().__init__()
        self.eps = config.layer_eps
        self.impl: Impl = config.impl
        self.gain = self.parameter("gain", (width,), Constant(1.0), "norm")
        self.bias = self.parameter("bias", (width,), Constant(0.0), "norm")

    def forward(self, x: Stream) -> Stream:
        """Normalises the last axis."""
        return layer_norm(x, self.eps, self.impl, self.gain, self.bias)


class ResidualDual(DepthMixer, config=ResidualDualConfig):
    """See `ResidualDualConfig`."""

    def __init__(self, config: ResidualDualConfig, site: SublayerPosition) -> None:
        super().__init__()
        self.impl: Impl = config.impl
        self.norm_eps = site.norm_eps
        self.norm = Affine(config, site.d_model)
        blended = config.blend == "annealed"
        self.blend = blend_parameter(self) if blended else None
        self.input_gain = self.parameter("input_gain", (site.d_model,), Constant(1.0), "norm") if blended else None

    def read(self, state: Pair, layout: Layout = None, cache: Any = None) -> tuple[Stream, None, Any]:
        """Returns x, or its blend with its norm."""
        x, _ = state
        if self.blend is None:
            return x, None, cache
        return annealed(rms_norm(x, self.input_gain, self.norm_eps, self.impl), x, self.blend), None, cache

    def write(self, state: Pair, update: Stream, context: Views, carry: Any) -> Pair:
        """Returns both streams with the update added, the first one normalised."""
        x, r = state
        total = x + update
        written = self.norm(total)
        return written if self.blend is None else annealed(total, written, self.blend), r + update


class ResidualDualEnds(DepthEnds):
    """Both streams start as the embeddings; the end adds the norm of the sum to x."""

    def __init__(self, config: ResidualDualConfig, stack: LayerStack) -> None:
        super().__init__()
        self.norm = Affine(config, stack.d_model)
        self.blend = blend_parameter(self) if config.blend == "annealed" else None

    def enter(self, embeddings: Stream, layout: Layout = None, cache: Any = None) -> tuple[Pair, Any]:
        """Returns the embeddings twice."""
        return (embeddings, embeddings), cache

    def leave(self, state: Pair, layout: Layout = None, cache: Any = None) -> tuple[Stream, Any]:
        """Returns x + LayerNorm(r)."""
        x, r = state
        total = x + self.norm(r)
        return total if self.blend is None else annealed(x, total, self.blend), cache
