"""One sublayer between its read and its write, and a block of them.

Letters: B batch, T position, D width.
"""

from collections.abc import Sequence
from typing import Any, cast

from jaxtyping import Float
from torch import Tensor, nn

from twoaxis.core.errors import ConfigError
from twoaxis.core.layout import TokenLayout
from twoaxis.core.parameters import Constant, DeclaredModule
from twoaxis.core.site import Site
from twoaxis.core.views import QKV
from twoaxis.depth import DepthConfig
from twoaxis.depth.base import State
from twoaxis.model.config import SublayerConfig
from twoaxis.ops.norm import rms_norm
from twoaxis.sequence import SequenceConfig


class RMSNorm(DeclaredModule):
    """RMS normalisation with a learned gain and an explicit eps."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.gain = self.parameter("gain", (width,), Constant(1.0), "norm")

    def forward(self, x: Float[Tensor, "*n D"]) -> Float[Tensor, "*n D"]:
        """Normalises the last axis."""
        return rms_norm(x, self.gain, self.eps)


class Sublayer(nn.Module):
    """Reads from the depth state, normalises, mixes, writes back.

    Raises:
        ConfigError: a depth mixer with separate q, k and v reads before a mixer that takes one input.
    """

    def __init__(self, depth: DepthConfig, config: SublayerConfig, site: Site) -> None:
        super().__init__()
        self.depth = depth.build(site)
        self.norm = RMSNorm(site.d_model, site.norm_eps)
        self.mixer = config.build(site)
        accepts_qkv = isinstance(config, SequenceConfig) and config.accepts_qkv
        if self.depth.splits_views and not accepts_qkv:
            raise ConfigError(
                f"depth mixer {depth.kind!r} reads separate q, k and v before {config.kind!r}: must be a mixer that takes "
                "them; use 'attention' or a depth mixer with one view"
            )

    def forward(self, state: State, layout: TokenLayout, cache: Any = None) -> tuple[State, Any]:
        """Returns the next depth state and the mixer's next cache."""
        views, carry = self.depth.read(state)
        context = QKV(*(self.norm(view) for view in views)) if isinstance(views, QKV) else self.norm(views)
        update, cache = self.mixer(context, layout, cache)
        return self.depth.write(state, update, context, carry), cache


class Block(nn.Module):
    """Sublayers in order, named by their kind so that models which share one share its parameter names."""

    def __init__(self, depth: DepthConfig, configs: Sequence[SublayerConfig], sites: Sequence[Site]) -> None:
        super().__init__()
        for config, site in zip(configs, sites, strict=True):
            earlier = sum(other.kind == config.kind for other in configs[: site.place])
            name = f"{config.kind}_{earlier + 1}" if earlier else config.kind
            self.add_module(name, Sublayer(depth, config, site))

    @property
    def sublayers(self) -> list[Sublayer]:
        """The sublayers in order."""
        return [cast(Sublayer, sublayer) for sublayer in self.children()]

    def new_caches(self) -> tuple[Any, ...]:
        """The cache of each sublayer before the first token."""
        return tuple(sublayer.mixer.new_cache() for sublayer in self.sublayers)

    def forward(self, state: State, layout: TokenLayout, caches: Sequence[Any] | None = None) -> tuple[State, list[Any]]:
        """Returns the depth state after the block, and the next cache of each sublayer."""
        following = []
        for index, sublayer in enumerate(self.children()):
            state, cache = sublayer(state, layout, None if caches is None else caches[index])
            following.append(cache)
        return state, following
