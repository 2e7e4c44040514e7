"""The three places for local mixers in a sublayer: its input, the projection of it, and its update.

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
from twoaxis.core.views import Views
from twoaxis.local import Local
from twoaxis.local.base import LocalConfig, LocalMixer, Parts
from twoaxis.ops.rope import RotationTable


class Places(NamedTuple):
    """A value for each place."""

    input: Any = None
    projected: Any = None
    update: Any = None


class PlacesConfig(Config, ABC):
    """The options of a sublayer with these places, with the receptive field and cost of the mixers in them."""

    input_local: Local = None
    projected_local: Local = None
    update_local: Local = None

    @model_validator(mode="after")
    def _local_mixers_fit(self) -> Self:
        for local, heads in zip(self.locals, (None, self.branch_heads, None), strict=True):
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
        """Channels at each place."""

    @property
    def locals(self) -> Places:
        """The local mixers; None at a place without one."""
        return Places(self.input_local, self.projected_local, self.update_local)

    @property
    def local_field(self) -> int:
        """The receptive field of all local mixers in sequence."""
        return 1 + sum(local.receptive_field - 1 for local in self.locals if local is not None)

    @property
    def locals_read_context(self) -> bool:
        """Whether a local mixer needs the one context behind its own place."""
        return any(local is not None and local.reads_context for local in (self.projected_local, self.update_local))

    def check_locals(self, site: SublayerPosition) -> None:
        """Raises ConfigError if a local mixer cannot be built for the channels of its place."""
        for local, channels in self._at(site):
            local.check(channels)

    def local_cost(self, site: SublayerPosition, shape: Shape) -> Cost:
        """The cost of the local mixers at this site."""
        return sum((local.cost(channels, site, shape) for local, channels in self._at(site)), Cost())

    def local_rotations(self, d_model: int) -> frozenset[RotationTable]:
        """The rotation tables of the local mixers."""
        return frozenset(table for local in self.placed(d_model) if local is not None for table in local.rotations)

    def without_local(self) -> Self:
        """The same sublayer without local mixers."""
        return self.replace(input_local=None, projected_local=None, update_local=None)

    def placed(self, d_model: int) -> Places:
        """The configurations of the local mixers for the channels that they are given."""
        projected = self.projected_local and self.projected_local.within(self.branches(d_model))
        return Places(self.input_local, projected, self.update_local)

    def _at(self, site: SublayerPosition) -> list[tuple[LocalConfig, int]]:
        """Every local mixer with its channels."""
        placed, channels = self.placed(site.d_model), self.local_channels(site)
        apart = self.mixed_apart(site.d_model) or (channels.projected,)
        parts = Places((channels.input,), apart, (channels.update,))
        return [(local, n) for local, widths in zip(placed, parts, strict=True) if local is not None for n in widths]


class Apart(LocalMixer):
    """Local mixers side by side, each with its own part of the channels."""

    def __init__(self, config: LocalConfig, channels: tuple[int, ...], site: SublayerPosition) -> None:
        super().__init__()
        self.channels = channels
        self.mixers = nn.ModuleList(config.build(part, site) for part in channels)

    def new_cache(self) -> tuple[Any, ...]:
        """A cache for each."""
        return tuple(mixer.new_cache() for mixer in self.mixers)  # type: ignore[operator]

    def forward(
        self, x: Tensor, layout: TokenLayout, cache: tuple[Any, ...] | None = None, context: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """Returns the mixed channels and the next caches."""
        caches = cache or (None,) * len(self.channels)
        parts = zip(self.mixers, x.split(self.channels, dim=-1), caches, strict=True)
        mixed, following = zip(*(mixer(part, layout, before, context) for mixer, part, before in parts), strict=True)
        return torch.cat(mixed, dim=-1), None if cache is None else following


class LocalPlaces(DeclaredModule):
    """A module of a sublayer with an optional local mixer at each place."""

    input_local: LocalMixer | None
    projected_local: LocalMixer | None
    update_local: LocalMixer | None

    def fill_places(self, config: PlacesConfig, site: SublayerPosition) -> None:
        """Builds the local mixers of the configuration."""
        channels, placed, apart = config.local_channels(site), config.placed(site.d_model), config.mixed_apart(site.d_model)
        for name, local, width in zip(Places._fields, placed, channels, strict=True):
            setattr(self, f"{name}_local", local and local.build(width, site) if name != "projected" or not apart else None)
        if placed.projected is not None and apart:
            self.projected_local = Apart(placed.projected, apart, site)
        self.update_width = site.d_model

    def new_local_caches(self) -> Places:
        """The caches of the local mixers before the first token."""
        return Places(*(mixer and mixer.new_cache() for mixer in (self.input_local, self.projected_local, self.update_local)))

    def mix_update(self, update: Tensor, layout: TokenLayout, caches: Places, context: Views | None) -> tuple[Tensor, Places]:
        """Applies the local mixer of the update, but not to the extra output for the depth mixer; returns the next caches."""
        if self.update_local is None:
            return update, caches
        own, extra = update[..., : self.update_width], update[..., self.update_width :]
        own, following = mix_locally(self.update_local, own, layout, caches.update, context)
        return torch.cat((own, extra), dim=-1) if extra.shape[-1] else own, caches._replace(update=following)


def mix_locally(
    mixer: LocalMixer | None, x: Tensor, layout: TokenLayout, cache: Any, context: Views | None = None
) -> tuple[Tensor, Any]:
    """Applies a local mixer; None returns the input. Separate views are no context."""
    if mixer is None:
        return x, cache
    return mixer(x, layout, cache, context if isinstance(context, Tensor) else None)
