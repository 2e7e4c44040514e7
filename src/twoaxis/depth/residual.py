"""The residual stream: every sublayer adds its output.

Letters: B batch, T position, D width.
"""

from typing import Any, Literal

from twoaxis.depth.base import (
    Cost,
    DepthConfig,
    DepthMixer,
    InitEquivalence,
    LayerStack,
    MixingDesign,
    Shape,
    Stream,
    StreamEnds,
    SublayerPosition,
    Views,
)


class ResidualConfig(DepthConfig):
    """Adds each sublayer's output to one stream: the fixed depth mixer with which all others are compared.

    Equation: x' = x + f(Norm(x))
    Source:   Deep Residual Learning, arXiv:1512.03385, eq. 1; pre-norm as in arXiv:2002.04745
    Deviates: no
    Shapes:   state [B T D]; update [B T D] -> state [B T D], in the dtype of the model
    Init:     EXACT: it is the plain model
    Cost:     params 0; flops D per token and sublayer; state D numbers per token

    Example:
        >>> ResidualConfig().init_equivalence.relation
        'exact'
    """

    kind: Literal["residual"] = "residual"

    @property
    def design(self) -> MixingDesign:
        """Every source with weight 1."""
        return MixingDesign("none", "none", "f_j, e", "none: weight 1", "own state", "none", "is the stream")

    @property
    def init_equivalence(self) -> InitEquivalence:
        """Exact, by definition."""
        return InitEquivalence("exact", "it is the plain model")

    def cost(self, site: SublayerPosition, shape: Shape) -> Cost:
        """One add."""
        return Cost(elementwise_flops=shape.total_tokens * site.d_model)

    def build(self, stack: LayerStack) -> tuple[list["Residual"], StreamEnds]:
        """Builds a mixer without parameters for each sublayer."""
        return [Residual() for _ in stack.sites], StreamEnds()


class Residual(DepthMixer, config=ResidualConfig):
    """See `ResidualConfig`."""

    def write(self, state: Stream, update: Stream, context: Views, carry: Any) -> Stream:
        """Returns x + update."""
        return state + update
