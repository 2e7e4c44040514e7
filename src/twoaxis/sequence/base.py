"""The contract of the sequence axis: a mixer along positions with a declared receptive field, cache and cost."""

from abc import ABC, abstractmethod
from typing import Any, Literal, Self

from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor

from twoaxis.core.config import Config
from twoaxis.core.cost import Cost, Shape
from twoaxis.core.design import InitEquivalence, MixingDesign
from twoaxis.core.errors import ConfigError, problem
from twoaxis.core.layout import TokenLayout
from twoaxis.core.mixer import Mixer
from twoaxis.core.position import HeadShape, SublayerPosition
from twoaxis.core.views import Heads, Views
from twoaxis.ops.rope import RotationTable


class SequenceConfig(Config, ABC):
    """Configuration of one sequence mixer, with its receptive field and cost."""

    # Any, since each mixer narrows it to the one literal that names it.
    kind: Any

    @property
    def design(self) -> MixingDesign | None:
        """How it forms weights and where its sum goes; None for a mixer outside the table of methods."""
        return None

    @property
    def accepts_qkv(self) -> bool:
        """Whether the mixer takes separate inputs for queries, keys and values."""
        return False

    @property
    def pair_window(self) -> int | None:
        """Keys per query in products between activations, its own included; None without a bound."""
        return self.receptive_field

    @property
    def inner_field(self) -> int:
        """Tokens that a convolution of the mixer itself sees, the current one included; 1 without."""
        return 1

    @property
    def unseen_keys(self) -> int:
        """Keys of every query besides those of tokens, such as a sink."""
        return 0

    @property
    def histories(self) -> tuple[int, ...]:
        """Tokens that parts of its cache hold at most, where it is not all but one of the receptive field."""
        return ()

    @property
    def reads_context(self) -> bool:
        """Whether the update depends on the context, and not on token ids alone."""
        return True

    @property
    def hashed(self) -> tuple[tuple[int, int], ...]:
        """Its hashed tables, as in `SublayerInfo`."""
        return ()

    @property
    @abstractmethod
    def receptive_field(self) -> int | None:
        """Tokens that one output can depend on, its own included; None without a bound."""

    @property
    @abstractmethod
    def init_equivalence(self) -> InitEquivalence:
        """How a model with this sublayer relates at initialisation to the same model without it."""

    def head_shape(self, d_model: int) -> HeadShape | None:
        """The heads that a depth mixer may mix, if the mixer is a `HeadMixer`."""
        return None

    def rotations(self, d_model: int) -> frozenset[RotationTable]:
        """The rotation tables that sublayers share; they are not part of its cost."""
        return frozenset()

    @abstractmethod
    def check(self, d_model: int) -> None:
        """Raises ConfigError if the mixer cannot be built at this width."""

    def recorded_for(self, vocab_size: int) -> Self:
        """The configuration with what it takes from the vocabulary, which then stays if the vocabulary grows."""
        return self

    def check_at(self, site: SublayerPosition) -> None:
        """Raises ConfigError if the mixer cannot be built in this stack; by default it can."""

    @abstractmethod
    def cost(self, site: SublayerPosition, shape: Shape) -> Cost:
        """The cost of one forward pass at this site, without its norm."""

    @abstractmethod
    def build(self, site: SublayerPosition) -> "SequenceMixer":
        """Builds the mixer."""


class OutputOptions(Config, ABC):
    """The start of the matrix from which the update comes."""

    output_init: Literal["scaled", "zero"] = "scaled"

    @property
    def init_equivalence(self) -> InitEquivalence:
        """Exact when the output projection starts at zero: the sublayer then adds nothing."""
        if self.output_init == "zero":
            return InitEquivalence("exact", "the zero output projection adds nothing")
        return InitEquivalence("none", "a random output projection adds a random update")

    def output_std(self, site: SublayerPosition, inputs: int) -> float:
        """The standard deviation of the matrix, of so many inputs."""
        return 0.0 if self.output_init == "zero" else site.output_std(inputs)


class HeadOptions(Config, ABC):
    """The number of heads and the width of their queries and keys."""

    kind: Any
    n_heads: int = Field(default=4, ge=1)
    head_dim: int | None = Field(default=None, ge=1)

    def check(self, d_model: int) -> None:
        """Raises ConfigError if the heads do not divide the width."""
        if self.head_dim is None and d_model % self.n_heads:
            allowed = f"a divisor of d_model={d_model}, or given with a head_dim"
            raise ConfigError(problem("n_heads", self.n_heads, allowed, f"set head_dim, or change n_heads of {self.kind!r}"))

    def key_width(self, d_model: int) -> int:
        """Width of the queries and keys of one head."""
        return self.head_dim or d_model // self.n_heads


class GroupedHeadOptions(HeadOptions, ABC):
    """The same with heads of keys and values that several query heads share."""

    n_kv_heads: int | None = Field(default=None)

    @model_validator(mode="after")
    def _kv_heads_divide(self) -> Self:
        if not 1 <= self.kv_heads <= self.n_heads or self.n_heads % self.kv_heads:
            allowed = f"a divisor of n_heads={self.n_heads}"
            raise ConfigError(problem("n_kv_heads", self.n_kv_heads, allowed, "use n_kv_heads=1 or n_heads for the extremes"))
        return self

    @property
    def kv_heads(self) -> int:
        """Number of kv-heads."""
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads


class SequenceMixer(Mixer):
    """Mixes tokens along positions; keeps no state between calls but the cache value."""

    @abstractmethod
    def new_cache(self) -> Any:
        """The cache before the first token."""

    @abstractmethod
    def forward(self, context: Views, layout: TokenLayout, cache: Any = None) -> tuple[Float[Tensor, "B T E"], Any]:
        """Returns the update and the next cache (None if none was given).

        A cache is a value: two continuations may start from the same one. In padding, the context must be finite, which a
        decoder ensures; elsewhere call `TokenLayout.without_padding` first.
        """


class HeadMixer(SequenceMixer, ABC):
    """A sequence mixer in two steps, between which a depth mixer may mix the heads."""

    @abstractmethod
    def project(self, context: Views, layout: TokenLayout, cache: Any = None) -> tuple[Heads, Any]:
        """Returns queries, keys and values, and the cache for `attend`.

        Keys stand in for values that the slot does not project.
        """

    @abstractmethod
    def attend(
        self, heads: Heads, layout: TokenLayout, cache: Any = None, context: Views | None = None
    ) -> tuple[Float[Tensor, "B T E"], Any]:
        """Mixes the heads along positions and projects them back; returns as `forward` does.

        The context is that of `project`, for what depends on it besides the heads.
        """
