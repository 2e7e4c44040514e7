"""The contract of a local mixer: inside a sublayer, it mixes the last few tokens of some channels.

Letters: B batch, T position, S keys, C channels, P tokens of history.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from jaxtyping import Float, Int
from torch import Tensor, nn

from twoaxis.core.config import Config
from twoaxis.core.cost import Cost, Shape, chunk_pairs, visible_pairs
from twoaxis.core.design import InitEquivalence, MixingDesign
from twoaxis.core.layout import TokenLayout
from twoaxis.core.mixer import Mixer, accept_rows
from twoaxis.core.position import SublayerPosition
from twoaxis.ops.causal_conv import next_history
from twoaxis.ops.rope import RotationTable

Parts = tuple[tuple[int, int], ...]
"""What channels consist of, side by side: heads, and the width of each."""

WindowKind = Literal["sliding", "chunk"]
"""A window ends at each token, or begins at multiples of its length."""

Documents = Int[Tensor, "_ _"] | None


def window_documents(layout: TokenLayout, window: int, kind: WindowKind, keys: int) -> tuple[Documents, Documents]:
    """The documents of queries and of the last `keys` tokens, with which attention over a window is that of its kind."""
    if kind == "chunk":
        return layout.chunk_documents(window, keys)
    return layout.documents, layout.key_documents(keys)


def window_pairs(tokens: int, window: int, kind: WindowKind) -> int:
    """The (query, key) pairs of a window of this kind."""
    return chunk_pairs(tokens, window) if kind == "chunk" else visible_pairs(tokens, window)


@dataclass(frozen=True, eq=False)
class TokenHistory:
    """The last tokens of each row: an immutable value in storage of its own."""

    tokens: Float[Tensor, "B P C"] | None = None

    @property
    def length(self) -> int:
        """How many tokens are kept."""
        return 0 if self.tokens is None else self.tokens.shape[1]

    def documents(self, layout: TokenLayout) -> Documents:
        """The documents of these tokens and of the new ones behind them."""
        return layout.key_documents(self.length + layout.positions.shape[1])

    def following(self, x: Float[Tensor, "B T C"], kernel: int) -> "TokenHistory":
        """The history after these tokens, for a mixer that sees `kernel` tokens: the last `kernel - 1`, or all there are."""
        return TokenHistory(next_history(self.tokens, x, kernel))


class LocalConfig(Config, ABC):
    """Configuration of one local mixer, with its receptive field and cost."""

    # Any, since each mixer narrows it to the one literal that names it.
    kind: Any

    @property
    def design(self) -> MixingDesign | None:
        """How it forms weights and where its sum goes; None for a mixer outside the table of methods."""
        return None

    def check_branches(self, heads: tuple[int, ...] | None) -> None:
        """Raises ConfigError if the mixer does not fit channels that are queries, keys and values of so many heads, or None."""

    def within(self, parts: Parts | None) -> Self:
        """The configuration for channels that consist of these parts; most mixers do not distinguish them.

        Raises:
            ConfigError: parts of another sort than the mixer needs.
        """
        return self

    @property
    def reads_context(self) -> bool:
        """Whether the weights depend on the context of the sublayer, and not on the mixed channels alone."""
        return False

    @property
    def channel_group(self) -> int | None:
        """Number of neighbouring channels that devices must not part; None where they cannot divide the channels at all."""
        return None

    @property
    def linear(self) -> bool:
        """Whether the output is linear in the channels, so that it may be computed of each summand of a sum by itself."""
        return False

    @property
    @abstractmethod
    def receptive_field(self) -> int:
        """Tokens that one output depends on, its own included."""

    @property
    @abstractmethod
    def init_equivalence(self) -> InitEquivalence:
        """The relation of the mixer to the identity at initialisation."""

    def check(self, channels: int) -> None:
        """Raises ConfigError if the mixer cannot be built for so many channels; by default it can."""

    @abstractmethod
    def cost(self, channels: int, site: SublayerPosition, shape: Shape) -> Cost:
        """The cost of one forward pass over these channels of a sublayer."""

    @property
    def rotations(self) -> frozenset[RotationTable]:
        """The rotation tables that layers share; they are not part of its cost."""
        return frozenset()

    @abstractmethod
    def build(self, channels: int, site: SublayerPosition) -> "LocalMixer":
        """Builds the mixer for these channels of a sublayer; of the embedding, the site is the first one."""


class LocalMixer(Mixer):
    """Mixes tokens within each row and keeps the number of channels; keeps no state between calls."""

    places: ClassVar[tuple[type, ...]] = (int,)
    around: ClassVar[Mapping[str, Any]] = {}

    @classmethod
    def build_alone(cls, config: LocalConfig, site: SublayerPosition) -> nn.Module:
        """Builds the mixer for the width of the model."""
        return accept_rows(config.build(site.d_model, site))

    @abstractmethod
    def new_cache(self) -> Any:
        """The cache before the first token."""

    @abstractmethod
    def forward(
        self,
        x: Float[Tensor, "B T C"],
        layout: TokenLayout,
        cache: Any = None,
        context: Float[Tensor, "B T D"] | None = None,
    ) -> tuple[Float[Tensor, "B T C"], Any]:
        """Returns the mixed tokens and the next cache (None if none was given).

        In padding, x must be finite, which a decoder ensures; elsewhere call `TokenLayout.without_padding` first.

        Args:
            x: the channels to mix.
            layout: positions and documents.
            cache: returned by the last call, or `new_cache()`.
            context: the input of the sublayer behind its norm, for weights that depend on it; None where x is that.
        """


class HistoryMixer(LocalMixer):
    """A local mixer whose cache is the last tokens that it was given, as many as it sees before the current one."""

    def __init__(self, receptive_field: int) -> None:
        super().__init__()
        self.receptive_field = receptive_field

    def new_cache(self) -> TokenHistory:
        """An empty history."""
        return TokenHistory()

    def forward(
        self,
        x: Float[Tensor, "B T C"],
        layout: TokenLayout,
        cache: TokenHistory | None = None,
        context: Float[Tensor, "B T D"] | None = None,
    ) -> tuple[Float[Tensor, "B T C"], TokenHistory | None]:
        """Returns the mixed tokens and the last inputs, which are not mixed yet."""
        history = cache or TokenHistory()
        y = self.mix(x, layout, history, context)
        return y, None if cache is None else history.following(x, self.receptive_field)

    @abstractmethod
    def mix(
        self,
        x: Float[Tensor, "B T C"],
        layout: TokenLayout,
        history: TokenHistory,
        context: Float[Tensor, "B T D"] | None = None,
    ) -> Float[Tensor, "B T C"]:
        """Returns the mixed tokens, given those before them."""
