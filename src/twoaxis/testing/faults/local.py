"""Local mixers and feed-forwards that are correct except for one fault."""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.design import InitEquivalence
from twoaxis.core.layout import TokenLayout
from twoaxis.core.parameters import Values
from twoaxis.core.position import SublayerPosition
from twoaxis.feed_forward import GELU, FeedForwardConfig, GELUConfig
from twoaxis.local import CanonConfig, LocalConfig
from twoaxis.local.base import TokenHistory
from twoaxis.local.conv import DepthwiseConv
from twoaxis.testing.conformance import Fault


class _Planted(CanonConfig):
    """Canon with another module or another declaration."""

    module: ClassVar[type[DepthwiseConv]] = DepthwiseConv
    misstated: ClassVar[Cost] = Cost()
    relation: ClassVar[Any] = "none"

    @property
    def init_equivalence(self) -> InitEquivalence:
        return InitEquivalence(self.relation, "a planted fault or its twin")

    def cost(self, channels: int, site: SublayerPosition, shape: Shape) -> Cost:
        return super().cost(channels, site, shape) + self.misstated

    def build(self, channels: int, site: SublayerPosition) -> DepthwiseConv:
        return self.module(self, channels)


class _ForgetsLaterChunks(DepthwiseConv):
    """Ignores the history in calls of several tokens, as caches for single steps do."""

    def mix(self, x: Tensor, layout: TokenLayout, history: TokenHistory, context: Tensor | None = None) -> Tensor:
        several = x.shape[1] > 1
        return super().mix(x, layout.after(None) if several else layout, TokenHistory() if several else history)


class _NewestTapFirst(DepthwiseConv):
    """Uses the first tap for the current token, so that the identity is on the oldest one."""

    def __init__(self, options: Any, channels: int) -> None:
        super().__init__(options, channels)
        oldest = Values((1.0, *(0.0,) * (options.kernel - 1)) * channels)
        self.declarations["weight"] = replace(self.declarations["weight"], init=oldest)


class _AcrossDocuments(DepthwiseConv):
    def mix(self, x: Tensor, layout: TokenLayout, history: TokenHistory, context: Tensor | None = None) -> Tensor:
        return super().mix(x, TokenLayout(layout.positions), history)


class _SymmetricTaps(DepthwiseConv):
    """Pads at both ends, so that a tap reaches the next token."""

    def mix(self, x: Tensor, layout: TokenLayout, history: TokenHistory, context: Tensor | None = None) -> Tensor:
        y = super().mix(x, layout, history)
        return torch.cat((y[:, :-1] + 0.1 * x[:, 1:], y[:, -1:]), dim=1)


class _OneTokenTooMany(DepthwiseConv):
    """Keeps k tokens where k - 1 are needed."""

    def __init__(self, options: Any, channels: int) -> None:
        super().__init__(options, channels)
        self.receptive_field += 1


def _planted(module: type[DepthwiseConv] = DepthwiseConv, **options: Any) -> LocalConfig:
    statements = {key: options.pop(key) for key in ("misstated", "relation") if key in options}
    config = type("PlantedConfig", (_Planted,), {"module": module, **statements, "__module__": __name__})
    return config(**options)


def _fault(name: str, caught_by: str, faulty: LocalConfig, twin: LocalConfig | None = None) -> Fault:
    return Fault(name, faulty, twin or _planted(), tuple(caught_by.split()))


_IDENTITY: dict[str, Any] = {"form": "plain", "taps_init": "identity", "relation": "exact"}

LOCAL_FAULTS = (
    _fault("later chunks without history", "chunk_size_invariance incremental_decode", _planted(_ForgetsLaterChunks)),
    _fault("newest tap first", "local_init_equivalence", _planted(_NewestTapFirst, **_IDENTITY), _planted(**_IDENTITY)),
    _fault("taps across documents", "document_isolation left_padding", _planted(_AcrossDocuments)),
    _fault("taps on both sides", "causal_along_positions receptive_field_is_exact", _planted(_SymmetricTaps)),
    _fault("one token too many", "cache_size", _planted(_OneTokenTooMany)),
    _fault("false claim of identity", "local_init_equivalence", _planted(relation="exact")),
    _fault("wrong parameters", "mixer_costs_are_exact", _planted(misstated=Cost(params=1))),
)


class _PlantedFeedForward(GELUConfig):
    """GELU with another module or another declaration."""

    misstated: ClassVar[Cost] = Cost()

    def cost(self, site: SublayerPosition, shape: Shape) -> Cost:
        return super().cost(site, shape) + self.misstated


class _TokenLeak(GELU):
    def project(self, context: Tensor) -> Tensor:
        return super().project(context + 0.1 * context.cumsum(dim=1))


def _planted_ff(module: type[GELU] = GELU, **statements: Any) -> FeedForwardConfig:
    return type("PlantedConfig", (_PlantedFeedForward,), {"module": module, **statements, "__module__": __name__})()


FEED_FORWARD_FAULTS = (
    Fault("tokens mixed", _planted_ff(_TokenLeak), _planted_ff(), ("receptive_field_is_exact", "incremental_decode")),
    Fault("wrong flops", _planted_ff(misstated=Cost(matmul_flops=1)), _planted_ff(), ("mixer_costs_are_exact",)),
)
