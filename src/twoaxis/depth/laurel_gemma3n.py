"""The LAuReL of Gemma 3n: a normalised low-rank map of the input of attention, added to the stream and divided by sqrt(2).

Letters: B batch, T position, D width, r rank.
"""

import math
from typing import Any, Literal

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.design import InitEquivalence, MixingDesign
from twoaxis.core.parameters import Constant, Normal, matrix_std
from twoaxis.core.position import LayerStack, SublayerPosition
from twoaxis.core.views import Views
from twoaxis.depth.base import DepthConfig, DepthMixer, Stream, StreamEnds
from twoaxis.ops.norm import rms_norm
from twoaxis.ops.precision import Impl


class LaurelGemma3nConfig(DepthConfig):
    """Adds normalised updates to the stream and, where a block opens, the context of attention and a low-rank map of it.

    Equation: first sublayer of a block, c = Norm(x): x' = (x + RMSNorm(f(c)) + c + RMSNorm(R L c)) / sqrt(2)
              other sublayers: x' = x + RMSNorm(f(Norm(x)))
    Source:   Gemma 3n: transformers 5.24, models/gemma3n, Gemma3nTextLaurelBlock and Gemma3nTextDecoderLayer (no paper). Not
              the LAuReL-LR of arXiv:2411.07501, which is `laurel`
    Deviates: AltUp and the embeddings per layer, which act on the stream of Gemma 3n too, are not part of it; the initial
              values of its training are not published, these are ours
    Shapes:   state [B T D]; update [B T D] -> state; norms in float32
    Init:     NONE: c and the divisor have no place in the plain model at any value. L, R ~ N(0, 1 / (4 fan_in)), gains 1
    Cost:     params D per sublayer, and 2*r*D + D where a block opens; there matrix product flops 4*r*D and 14*D more per
              token, elsewhere 5*D; state D numbers per token; saves r + D numbers per token where a block opens
    Published: none; no ablation of this form is known to us. Gemma 3n has r = 64

    Args:
        rank: r.
        impl: `fused` or `reference`.

    Example:
        >>> LaurelGemma3nConfig(rank=4).init_equivalence.relation
        'none'
    """

    kind: Literal["laurel_gemma3n"] = "laurel_gemma3n"
    rank: int = Field(default=64, ge=1)
    impl: Impl = "fused"

    @property
    def design(self) -> MixingDesign:
        """A sum of normalised terms."""
        return MixingDesign(
            query="none",
            key="none",
            value="x, N(f), c, N(R L c)",
            normaliser="norm of each term",
            window="own state",
            sharing="sublayer",
            injection="replaces the stream",
        )

    @property
    def init_equivalence(self) -> InitEquivalence:
        """None."""
        return InitEquivalence("none", "updates are normalised, and the stream is averaged with its norm")

    def cost(self, site: SublayerPosition, shape: Shape) -> Cost:
        """The norm of the update and, where a block opens, the map and its norm."""
        N, D, r = shape.total_tokens, site.d_model, self.rank
        cost = Cost(params=D, elementwise_flops=5 * N * D)
        if site.opens_block:
            cost += Cost(params=(2 * r + 1) * D, matmul_flops=4 * N * r * D, elementwise_flops=9 * N * D)
        return cost

    def build(self, stack: LayerStack) -> "tuple[list[LaurelGemma3n], StreamEnds]":
        """Builds a mixer for each sublayer of one plain stream."""
        return [LaurelGemma3n(self, site) for site in stack.sites], StreamEnds()


class LaurelGemma3n(DepthMixer, config=LaurelGemma3nConfig):
    """See `LaurelGemma3nConfig`."""

    def __init__(self, config: LaurelGemma3nConfig, site: SublayerPosition) -> None:
        super().__init__()
        self.impl: Impl = config.impl
        self.eps, self.opens_block = site.norm_eps, site.opens_block
        # Updates have lost their scale when they are normalised.
        self.update_scale = site.stack.update_scale
        r, D = config.rank, site.d_model
        self.update_gain = self.parameter("update_gain", (D,), Constant(1.0), "norm")
        if site.opens_block:
            self.down = self.parameter("down", (r, D), Normal(matrix_std(D)), "matrix", grows="inputs")
            self.up = self.parameter("up", (D, r), Normal(matrix_std(r)), "matrix", grows="outputs")
            self.gain = self.parameter("gain", (D,), Constant(1.0), "norm")

    def write(self, state: Stream, update: Stream, context: Views, carry: Any) -> Stream:
        """Returns the stream with the normalised update, and where a block opens with the map of the context."""
        assert isinstance(context, Tensor), "the read returns one view, so the context is one tensor"
        # Under autocast updates may be narrower than the stream.
        joined = state + self._normalised(update, self.update_gain)
        if not self.opens_block:
            return joined
        mapped = F.linear(F.linear(context, self.down), self.up)
        return (joined + (context + self._normalised(mapped, self.gain))) / math.sqrt(2)

    def _normalised(self, x: Stream, gain: Tensor) -> Stream:
        return rms_norm(x, gain, self.eps, self.impl, self.update_scale)
