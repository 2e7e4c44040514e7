"""Feed-forwards that are right but for one fault."""

from typing import Any, ClassVar

from torch import Tensor

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.site import Site
from twoaxis.feed_forward import FeedForwardConfig, GELUConfig
from twoaxis.feed_forward.plain import Plain
from twoaxis.testing.faults.fault import Fault


class _Planted(GELUConfig):
    """GELU with another module or another statement about itself."""

    module: ClassVar[type[Plain]] = Plain
    misstated: ClassVar[Cost] = Cost()

    def cost(self, site: Site, shape: Shape) -> Cost:
        return super().cost(site, shape) + self.misstated

    def build(self, site: Site) -> Plain:
        return self.module(self, site)


class _TokenLeak(Plain):
    def project(self, context: Tensor) -> Tensor:
        return super().project(context + 0.1 * context.cumsum(dim=1))


def _planted(module: type[Plain] = Plain, **statements: Any) -> FeedForwardConfig:
    return type("PlantedConfig", (_Planted,), {"module": module, **statements, "__module__": __name__})()


FEED_FORWARD_FAULTS = (
    Fault("tokens mixed", _planted(_TokenLeak), _planted(), ("receptive_field_is_exact", "incremental_decode")),
    Fault("wrong flops", _planted(misstated=Cost(matmul_flops=1)), _planted(), ("mixer_costs_are_exact",)),
)
