"""A sublayer of this library whose projections carry biases, as in Qwen2 and GPT-NeoX."""

from dataclasses import dataclass

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.site import Site
from twoaxis.planner.model.part import OwnPart


@dataclass(frozen=True)
class Biased(OwnPart):
    """Adds biases to what the configuration counts.

    Cost: params and flops per token one for each bias; nothing saved, since the gradient of a bias needs no activation

    Attributes:
        biases: numbers in all biases of the sublayer.

    Example:
        >>> from twoaxis.core.site import Stack
        >>> from twoaxis.feed_forward import GELUConfig
        >>> site = Stack(8, 1e-5, (1,)).sites[0]
        >>> Biased(GELUConfig(d_ff=32), biases=32 + 8).cost(site, Shape(1, 1)).params
        552
    """

    biases: int = 0

    def cost(self, site: Site, shape: Shape) -> Cost:
        """The configuration's, and one addition per bias and token."""
        return super().cost(site, shape) + Cost(params=self.biases, elementwise_flops=self.biases * shape.total_tokens)
