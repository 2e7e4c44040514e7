"""The two places for local mixers in a sublayer: its input, and the projection of it.

Letters: B batch, T position, C channels.
"""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from torch import Tensor

from twoaxis.core.config import Config
from twoaxis.core.cost import Cost, Shape
from twoaxis.core.layout import TokenLayout
from twoaxis.core.parameters import DeclaredModule
from twoaxis.core.position import SublayerPosition
from twoaxis.local import Local
from twoaxis.local.base import LocalConfig, LocalMixer
from twoaxis.ops.rope import RotationTable


class Places(NamedTuple):
    """A value for each place."""

    input: Any = None
    projected: Any = None


class PlacesConfig(Config, ABC):
    """The options of a sublayer with both places, with the receptive field and cost of the mixers in them."""

    input_local: Local = None
    projected_local: Local = None

    @abstractmethod
    def local_channels(self, site: SublayerPosition) -> Places:
        """Channels at the two places."""

    @property
    def local_field(self) -> int:
        """The receptive field of both local mixers in sequence."""
        return 1 + sum(local.receptive_field - 1 for local in self._locals if local is not None)

    def local_cost(self, site: SublayerPosition, shape: Shape) -> Cost:
        """The cost of the local mixers at this site."""
        at = zip(self._locals, self.local_channels(site), strict=True)
        return sum((local.cost(channels, shape) for local, channels in at if local is not None), Cost())

    @property
    def local_rotations(self) -> frozenset[RotationTable]:
        """The rotation tables of the local mixers."""
        return frozenset(table for local in self._locals if local is not None for table in local.rotations)

    @property
    def _locals(self) -> tuple[LocalConfig | None, LocalConfig | None]:
        return self.input_local, self.projected_local


class LocalPlaces(DeclaredModule):
    """A module of a sublayer with an optional local mixer at either place."""

    input_local: LocalMixer | None
    projected_local: LocalMixer | None

    def fill_places(self, config: PlacesConfig, site: SublayerPosition) -> None:
        """Builds the local mixers of the configuration."""
        channels = config.local_channels(site)
        self.input_local = config.input_local and config.input_local.build(channels.input)
        self.projected_local = config.projected_local and config.projected_local.build(channels.projected)

    def new_local_caches(self) -> Places:
        """The caches of the local mixers before the first token."""
        return Places(*(mixer and mixer.new_cache() for mixer in (self.input_local, self.projected_local)))


def mix_locally(mixer: LocalMixer | None, x: Tensor, layout: TokenLayout, cache: Any) -> tuple[Tensor, Any]:
    """Applies a local mixer; None returns the input."""
    return (x, cache) if mixer is None else mixer(x, layout, cache)
