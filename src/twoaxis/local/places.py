"""The two places for local mixers in a sublayer: its input, and the projection of it.

Letters: B batch, T position, C channels.
"""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple, Self

import torch
from pydantic import model_validator
from torch import Tensor, nn

from twoaxis.core.config import Config
from twoaxis.core.cost import Cost, Shape
from twoaxis.core.layout import TokenLayout
from twoaxis.core.parameters import DeclaredModule
from twoaxis.core.position import SublayerPosition
from twoaxis.local import Local
from twoaxis.local.base import LocalConfig, LocalMixer, Parts
from twoaxis.ops.rope import RotationTable


class Places(NamedTuple):
    """A value for each place."""

    input: Any = None
    projected: Any = None


class PlacesConfig(Config, ABC):
    """The options of a sublayer with both places, with the receptive field and cost of the mixers in them."""

    input_local: Local = None
    projected_local: Local = None

    @model_validator(mode="after")
    def _local_mixers_fit(self) -> Self:
        for local, heads in ((self.input_local, None), (self.projected_local, self.branch_heads)):
            if local is not None:
                local.check_branches(heads)
        return self

    @property
    def branch_heads(self) -> tuple[int, ...] | None:
        """Heads of the queries, keys and values that the projection consists of; None where it is no such projection."""
        return None

    def branches(self, d_model: int) -> Parts | None:
        """The same with the width of each head."""
        return None

    def mixed_apart(self, d_model: int) -> tuple[int, ...] | None:
        """Channels of the projection that local mixers of their own work on; None for one mixer of all."""
        return None

    @abstractmethod
    def local_channels(self, site: SublayerPosition) -> Places:
        """Channels at the two places."""

    @property
    def local_field(self) -> int:
        """The receptive field of both local mixers in sequence."""
        return 1 + sum(local.receptive_field - 1 for local in (self.input_local, self.projected_local) if local is not None)

    def local_cost(self, site: SublayerPosition, shape: Shape) -> Cost:
        """The cost of the local mixers at this site."""
        channels, placed = self.local_channels(site), self.placed(site.d_model)
        costs = [] if placed.input is None else [placed.input.cost(channels.input, shape)]
        if placed.projected is not None:
            apart = self.mixed_apart(site.d_model) or (channels.projected,)
            costs += [placed.projected.cost(part, shape) for part in apart]
        return sum(costs, Cost())

    def local_rotations(self, d_model: int) -> frozenset[RotationTable]:
        """The rotation tables of the local mixers."""
        return frozenset(table for local in self.placed(d_model) if local is not None for table in local.rotations)

    def without_local(self) -> Self:
        """The same sublayer without local mixers."""
        return self.replace(input_local=None, projected_local=None)

    def placed(self, d_model: int) -> Places:
        """The configurations of the local mixers for the channels that they are given."""
        projected = self.projected_local and self.projected_local.within(self.branches(d_model))
        return Places(self.input_local, projected)


class Apart(LocalMixer):
    """Local mixers side by side, each with its own part of the channels."""

    def __init__(self, config: LocalConfig, channels: tuple[int, ...]) -> None:
        super().__init__()
        self.channels = channels
        self.mixers = nn.ModuleList(config.build(part) for part in channels)

    def new_cache(self) -> tuple[Any, ...]:
        """A cache for each."""
        return tuple(mixer.new_cache() for mixer in self.mixers)  # type: ignore[operator]

    def forward(self, x: Tensor, layout: TokenLayout, cache: tuple[Any, ...] | None = None) -> tuple[Tensor, Any]:
        """Returns the mixed channels and the next caches."""
        caches = cache or (None,) * len(self.channels)
        parts = zip(self.mixers, x.split(self.channels, dim=-1), caches, strict=True)
        mixed, following = zip(*(mixer(part, layout, before) for mixer, part, before in parts), strict=True)
        return torch.cat(mixed, dim=-1), None if cache is None else following


class LocalPlaces(DeclaredModule):
    """A module of a sublayer with an optional local mixer at either place."""

    input_local: LocalMixer | None
    projected_local: LocalMixer | None

    def fill_places(self, config: PlacesConfig, site: SublayerPosition) -> None:
        """Builds the local mixers of the configuration."""
        channels, placed, apart = config.local_channels(site), config.placed(site.d_model), config.mixed_apart(site.d_model)
        self.input_local = placed.input and placed.input.build(channels.input)
        if placed.projected is None:
            self.projected_local = None
        else:
            self.projected_local = Apart(placed.projected, apart) if apart else placed.projected.build(channels.projected)

    def new_local_caches(self) -> Places:
        """The caches of the local mixers before the first token."""
        return Places(*(mixer and mixer.new_cache() for mixer in (self.input_local, self.projected_local)))


def mix_locally(mixer: LocalMixer | None, x: Tensor, layout: TokenLayout, cache: Any) -> tuple[Tensor, Any]:
    """Applies a local mixer; None returns the input."""
    return (x, cache) if mixer is None else mixer(x, layout, cache)
