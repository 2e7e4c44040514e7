"""One sublayer as the planner sees it: what it is and what it costs; nothing is built."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.site import Site, Slot
from twoaxis.feed_forward import FeedForwardConfig
from twoaxis.local.places import PlacesConfig
from twoaxis.ops.rope import RotationTable
from twoaxis.sequence import SequenceConfig


@dataclass(frozen=True)
class Routed:
    """Experts of which every token is sent to a few.

    Attributes:
        experts: how many there are.
        used: how many every token is sent to.
        params: of one expert.
    """

    experts: int
    used: int
    params: int

    def read(self, tokens: int) -> float:
        """Experts that a pass of so many tokens is expected to read, when the router chooses evenly."""
        return self.experts * (1 - (1 - self.used / self.experts) ** tokens)


class Part(ABC):
    """A sublayer between its norm and its write."""

    @property
    def routed(self) -> Routed | None:
        """Its experts, when not every parameter is used by every token."""
        return None

    @property
    def windows(self) -> tuple[int, ...]:
        """Numbers of tokens beyond which some cost of one more token no longer grows, such as a window and its cache."""
        return ()

    def local_channels(self, site: Site) -> tuple[int, ...]:
        """Channels of each local mixer inside it, which is a kernel of its own."""
        return ()

    def check(self, d_model: int) -> None:  # noqa: B027
        """Raises ConfigError when the sublayer cannot be built at this width; by default it always can."""

    @property
    @abstractmethod
    def kind(self) -> str:
        """What it is called."""

    @abstractmethod
    def slot(self, d_model: int) -> Slot:
        """What a depth mixer may know of it."""

    @abstractmethod
    def cost(self, site: Site, shape: Shape) -> Cost:
        """What one forward pass costs at this site, without its norm; `params` holds every parameter, used or not."""

    def rotations(self, d_model: int) -> frozenset[RotationTable]:
        """Its rotation tables, which all layers that need the same have once; none where the part counts its own."""
        return frozenset()

    def in_generation(self) -> "Part":
        """The form that computes single tokens behind a context; the same unless a part says otherwise."""
        return self

    def parameters_read(self, site: Site, tokens: int) -> float:
        """Parameters that a pass of so many tokens reads: all of them, but for experts that no token is sent to."""
        params = self.cost(site, Shape(1, 1)).params
        return params if self.routed is None else params - self.routed.params * (self.routed.experts - self.routed.read(tokens))


@dataclass(frozen=True)
class OwnPart(Part):
    """A sublayer of this library, by its configuration."""

    config: SequenceConfig | FeedForwardConfig

    @property
    def kind(self) -> str:
        """The kind of its configuration."""
        return self.config.kind

    def check(self, d_model: int) -> None:
        """Asks the configuration."""
        if isinstance(self.config, SequenceConfig):
            self.config.check(d_model)

    def slot(self, d_model: int) -> Slot:
        """Its heads and the views that it takes."""
        if not isinstance(self.config, SequenceConfig):
            return Slot(self.kind)
        heads = self.config.head_shape(d_model)
        return Slot(self.kind, self.config.accepts_qkv, heads, window=self.config.pair_window)

    def rotations(self, d_model: int) -> frozenset[RotationTable]:
        """Those of its configuration."""
        return self.config.rotations(d_model)

    @property
    def windows(self) -> tuple[int, ...]:
        """Those of the mixer and of the local mixers inside it, with what their caches hold."""
        fields = [self.config.receptive_field]
        if isinstance(self.config, SequenceConfig):
            # A key that is no token, such as a sink, costs every query the same: as much as a window of one token.
            fields += [self.config.pair_window, min(1, self.config.unseen_keys)]
        if isinstance(self.config, PlacesConfig):
            inside = (self.config.input_local, self.config.projected_local)
            fields += [local.receptive_field for local in inside if local is not None]
        return tuple(sorted({tokens for field in fields if field for tokens in (field, field - 1) if tokens}))

    def local_channels(self, site: Site) -> tuple[int, ...]:
        """Those at its two places."""
        if not isinstance(self.config, PlacesConfig):
            return ()
        inside = (self.config.input_local, self.config.projected_local)
        return tuple(n for local, n in zip(inside, self.config.local_channels(site), strict=True) if local is not None)

    def cost(self, site: Site, shape: Shape) -> Cost:
        """As declared beside its mathematics."""
        return self.config.cost(site, shape)
