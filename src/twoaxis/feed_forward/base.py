"""The contract of a feed-forward sublayer, and the base classes of those with one hidden width.

Letters: B batch, T position, D width, E width of the output (D, or more where a depth mixer asks), F hidden width,
P projected width.
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal

from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from twoaxis.core.config import Config
from twoaxis.core.cost import Cost, Shape
from twoaxis.core.layout import TokenLayout
from twoaxis.core.mixer import Mixer
from twoaxis.core.parameters import extra_output, with_extra
from twoaxis.core.position import SublayerPosition
from twoaxis.local.places import LocalPlaces, Places, PlacesConfig, mix_locally
from twoaxis.ops.rope import RotationTable


class FeedForwardConfig(Config, ABC):
    """Configuration of one feed-forward; builds it and states what it costs."""

    # Any, since each mixer narrows it to the one literal that names it.
    kind: Any

    @property
    def receptive_field(self) -> int:
        """Number of tokens that one output depends on, its own included."""
        return 1

    @abstractmethod
    def cost(self, site: SublayerPosition, shape: Shape) -> Cost:
        """Parameters and operations of one forward pass at this site, without the norm before it."""

    def rotations(self, d_model: int) -> frozenset[RotationTable]:
        """Rotation tables that are shared with other sublayers, so that its cost excludes them."""
        return frozenset()

    @abstractmethod
    def build(self, site: SublayerPosition) -> "FeedForward":
        """Builds the module."""


class FeedForward(Mixer):
    """Transforms each token by itself; only local mixers inside it read earlier tokens."""

    def new_cache(self) -> Any:
        """Returns the cache before the first token; None by default, since nothing is carried from token to token."""
        return None

    @abstractmethod
    def forward(
        self, context: Float[Tensor, "B T D"], layout: TokenLayout, cache: Any = None
    ) -> tuple[Float[Tensor, "B T E"], Any]:
        """Returns the update and the next cache, with the signature of a sequence mixer."""


class HiddenConfig(PlacesConfig, FeedForwardConfig):
    """A feed-forward with one hidden width, equal in every block or rising with depth."""

    ratio: ClassVar[float]
    """Hidden width over model width when `d_ff` is None."""
    projections: ClassVar[int] = 1
    """Number of maps from the token to the hidden width, stored in one matrix."""
    activation_flops: ClassVar[int]
    """Operations per hidden feature between the maps."""
    module: "ClassVar[type[HiddenFeedForward]]"
    """The class that this configuration builds; the class whose header names the configuration sets it."""

    d_ff: int | None = Field(default=None, ge=1)
    d_ff_by_depth: Literal["equal", "rising"] = "equal"

    @property
    def receptive_field(self) -> int:
        """The receptive field of the local mixers, which is at least the token itself."""
        return self.local_field

    def hidden_width(self, d_model: int) -> int:
        """F at this model width: that of every block, or the mean over blocks."""
        return self.d_ff or rounded_width(d_model, self.ratio)

    def width_at(self, site: SublayerPosition) -> int:
        """F in the block of this site."""
        mean = self.hidden_width(site.d_model)
        return mean if self.d_ff_by_depth == "equal" else rising_width(mean, site.block, site.stack.n_blocks)

    def local_channels(self, site: SublayerPosition) -> Places:
        """Widths of the places of local mixers: the input, all projections, and the update."""
        return Places(site.d_model, self.projections * self.width_at(site), site.d_model)

    def cost(self, site: SublayerPosition, shape: Shape) -> Cost:
        """The matrices, the activation and the local mixers."""
        F, N = self.width_at(site), shape.total_tokens
        params = ((self.projections + 1) * site.d_model + site.slot.update_extra) * F
        own = Cost(
            params=params,
            matmul_flops=2 * N * params,
            elementwise_flops=self.activation_flops * N * F,
        )
        return own + self.local_cost(site, shape)

    def rotations(self, d_model: int) -> frozenset[RotationTable]:
        """Rotation tables of the local mixers."""
        return self.local_rotations(d_model)

    def build(self, site: SublayerPosition) -> "HiddenFeedForward":
        """Builds the module."""
        return self.module(self, site)


class HiddenFeedForward(LocalPlaces, FeedForward):
    """W_down activate(project(c)), with an optional local mixer before either map and behind the last."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.config_class is not None and issubclass(cls.config_class, HiddenConfig):
            cls.config_class.module = cls

    def __init__(self, config: HiddenConfig, site: SublayerPosition) -> None:
        super().__init__()
        F = config.width_at(site)
        self.down = self.linear("down", F, site.d_model, std=site.output_std(F))
        self.extra = extra_output(self, F, site.slot.update_extra)
        self.fill_places(config, site)

    def new_cache(self) -> Places:
        """Returns the caches of the local mixers."""
        return self.new_local_caches()

    @abstractmethod
    def project(self, context: Float[Tensor, "B T D"]) -> Float[Tensor, "B T P"]:
        """Returns all projections, concatenated."""

    @abstractmethod
    def activate(self, projected: Float[Tensor, "B T P"]) -> Float[Tensor, "B T F"]:
        """Returns the hidden features."""

    def forward(
        self, context: Float[Tensor, "B T D"], layout: TokenLayout, cache: Places | None = None
    ) -> tuple[Float[Tensor, "B T E"], Places | None]:
        """Returns the update and the next caches of the local mixers."""
        before = cache or Places()
        mixed, after_input = mix_locally(self.input_local, context, layout, before.input)
        projected, after_projected = mix_locally(self.projected_local, self.project(mixed), layout, before.projected, context)
        update = with_extra(self.down, self.extra, self.activate(projected))
        update, after = self.mix_update(update, layout, before, context)
        return update, None if cache is None else after._replace(input=after_input, projected=after_projected)


def rising_width(mean: int, block: int, n_blocks: int) -> int:
    """Returns the hidden width of one block when widths rise from 0.5 to 1.5 times the mean, in multiples of 128, at least 128.

    Equation: F_i = 128 round(F (i/(L - 1) + 0.5) / 128), halves to even; a single block keeps the mean
    Source:   MUDDFormer, arXiv:2502.12170v2, section 3.5; authors' code Caiyun-AI/MUDDFormer, where a width may be 0

    Example:
        >>> [rising_width(256, block, 4) for block in range(4)]
        [128, 256, 256, 384]
    """
    if n_blocks == 1:
        return mean
    return max(128, round(mean * (block / (n_blocks - 1) + 0.5) / 128) * 128)


def rounded_width(d_model: int, ratio: float) -> int:
    """Returns d_model * ratio, rounded up to a multiple of 16."""
    return -(-int(d_model * ratio) // 16) * 16
