"""The contract of the depth axis: how a sublayer reads from the residual stream and writes to it.

The depth state is an explicit immutable value: a tensor, or a (nested) tuple of tensors. Nothing is stored on a
module between calls, and no tensor of a state is ever written in place. The state between two sublayers is therefore
exactly what a pipeline cut, an activation checkpoint or a decoder step has to carry.

Letters: B batch, T position, D width.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor

from twoaxis.core.config import Config
from twoaxis.core.cost import Cost, Shape
from twoaxis.core.equivalence import InitEquivalence
from twoaxis.core.errors import ConfigError, problem
from twoaxis.core.layout import TokenLayout
from twoaxis.core.mixer import Mixer
from twoaxis.core.mixing_design import MixingDesign
from twoaxis.core.parameters import DeclaredModule
from twoaxis.core.site import Site, Stack
from twoaxis.core.state import Flow, Leaf, total
from twoaxis.core.views import Heads, Views
from twoaxis.core.weighted_sum import WeightedSum
from twoaxis.ops.streams import sum_streams

State = Any
"""A tensor or nested tuples of tensors; each mixer names its own."""


class DepthConfig(Config, ABC):
    """Configuration of one depth mixer; builds its parts and states its init, state and cost."""

    # Any, since each mixer narrows it to the one literal that names it.
    kind: Any

    @property
    @abstractmethod
    def design(self) -> MixingDesign:
        """How it forms weights and where its sum goes."""

    @property
    @abstractmethod
    def init_equivalence(self) -> InitEquivalence:
        """How the freshly initialised model relates to the plain pre-norm model."""

    @abstractmethod
    def state(self, stack: Stack, index: int) -> tuple[Leaf, ...]:
        """The tensors of the state that enters sublayer `index`, in order; `n_sublayers` is the state that is left."""

    def state_floats(self, stack: Stack, index: int) -> int:
        """Numbers per token in the state that enters sublayer `index`."""
        return total(self.state(stack, index)).count

    @abstractmethod
    def flow(self, site: Site) -> Flow:
        """What reading, head mixing and writing move at this site."""

    def ends_flow(self, stack: Stack) -> Flow:
        """What entering and leaving move; the default ends hand one stream through."""
        return Flow()

    def kept_by_ends(self, stack: Stack) -> tuple[Leaf, ...]:
        """The tensors of the last state that autograd keeps for what is made of them at the end."""
        return tuple(leaf for leaf in self.state(stack, stack.n_sublayers) if leaf.kept)

    def padding_bytes(self, site: Site, shape: Shape) -> int:
        """Bytes that storages behind the views of this site hold beyond their numbers, in one forward pass."""
        return 0

    def ends_padding_bytes(self, stack: Stack, shape: Shape) -> int:
        """The same behind the first state and what is left at the end."""
        return 0

    @abstractmethod
    def cost(self, site: Site, shape: Shape) -> Cost:
        """What reading and writing cost at this site in one forward pass."""

    def ends_cost(self, stack: Stack, shape: Shape) -> Cost:
        """What entering and leaving cost in one forward pass."""
        return Cost()

    def splits_views(self, site: Site) -> bool:
        """Whether the mixer at this site returns separate inputs for queries, keys and values, each behind its own norm."""
        return False

    @property
    def parallel_streams(self) -> int:
        """How many residual streams run side by side; 1 unless a mixer says otherwise."""
        return 1

    def static_form(self) -> Mapping[str, Any] | None:
        """Data of the nearest mixer whose weights do not depend on the input; None without one."""
        return None

    def write_only_form(self) -> Mapping[str, Any] | None:
        """Data of the mixer that writes the same without erasing anything first; None without one."""
        return None

    def prepare(self, stack: Stack) -> Stack:
        """Returns the stack with what this mixer asks of its sublayers; the default asks for sublayers that take its views.

        Raises:
            ConfigError: sublayers that this mixer cannot work with.
        """
        for site in stack.sites if stack.slots else ():
            if self.splits_views(site) and not site.slot.takes_views:
                raise ConfigError(
                    f"depth mixer {self.kind!r} reads separate q, k and v before {site.slot.kind!r} in block {site.block}: "
                    "must be a mixer that takes them; use 'attention' without input_local there, or options with one view"
                )
        return stack

    @abstractmethod
    def build(self, site: Site) -> "DepthMixer":
        """Builds the mixer of one sublayer."""

    def build_block(self, sites: Sequence[Site], ends: "DepthEnds") -> "list[DepthMixer]":
        """Builds the mixers of one block, which may share parts that the first one or the ends own; the default shares none.

        Args:
            sites: of the block.
            ends: what `build_ends` has returned for this model.
        """
        return [self.build(site) for site in sites]

    def build_ends(self, stack: Stack) -> "DepthEnds":
        """Builds the two ends of the stack; the default is one plain stream."""
        return StreamEnds()


class DepthMixer(Mixer):
    """Reads and writes the depth state at one sublayer.

    A mixer with parts that the ends own, or that several sublayers share, needs a `DepthAxis`; others may be built alone.
    """

    mixes_heads = False
    """Whether `mix_heads` is called between the projections of the sublayer and its attention."""

    entering_tensors: int | None = None
    """How many tensors a host hands over at this place, where a `DepthAxis` knows it."""

    def forward(self, state: State, norm: Callable[[Any], Any], sublayer: Callable[[Any], Tensor]) -> State:
        """A whole sublayer of a model of another code base: `x = mixer(x, norm, f)` in the place of `x = x + f(norm(x))`.

        Our decoder calls `read` and `write` itself. Every row is one document here, seen from its first token.

        Args:
            state: of the depth axis; with many mixers the stream itself, else what the ends or the sublayer before made.
            norm: makes the context of what is read: one tensor, or a `QKV` of three.
            sublayer: makes the update [B T D] of the context.

        Raises:
            ConfigError: a mixer that works inside attention, where only our decoder lets it in; a state of another place.

        Example:
            >>> import torch
            >>> from twoaxis.depth import DepthAxis, ResidualConfig
            >>> mixer = DepthAxis(ResidualConfig(), d_model=2, n_layers=1).mixers[0]
            >>> mixer(torch.ones(1, 1, 2), lambda x: x / 2, lambda context: 10 * context)
            tensor([[[6., 6.]]])
        """
        if self.mixes_heads:
            name = type(self).__name__
            raise ConfigError(f"{name} mixes the heads inside attention: must be used in a Decoder; choose another mixer")
        check_state(state, self.entering_tensors)
        views, carry = self.read(state)
        context = norm(views)
        return self.write(state, sublayer(context), context, carry)

    @classmethod
    def build_alone(cls, config: DepthConfig, site: Site) -> "DepthMixer":
        """Builds the mixer of one sublayer, for a model that is not our decoder."""
        return config.build(outside_decoder(config, site.stack).sites[site.index])

    @abstractmethod
    def read(self, state: State) -> tuple[Views, Any]:
        """Returns what the sublayer sees, before its norm, and a carry that `write` receives."""

    def new_cache(self) -> Any:
        """What generation carries from token to token before the first one; None for a mixer of single tokens."""

    def read_along(self, state: State, layout: TokenLayout, cache: Any) -> tuple[Views, Any, Any]:
        """As `read`, where a mixer that also mixes along positions learns the documents and the tokens before these.

        Returns:
            The views, the carry, and the cache that the next call starts from (None when none was given).
        """
        return *self.read(state), None

    def mix_heads(self, heads: Heads, context: Views, state: State) -> tuple[Heads, State]:
        """Returns the heads that attend in place of the projected ones, and the state that knows of them."""
        return heads, state

    @abstractmethod
    def write(self, state: State, update: Float[Tensor, "B T D"], context: Views, carry: Any) -> State:
        """Returns the next state, given the sublayer's output and the normalised input it was computed from."""

    def read_sums(self, state: State, views: Any, carry: Any) -> tuple[WeightedSum, ...]:
        """The weighted sums behind what `read` has returned for this state, for audits; none by default."""
        return ()

    def write_sums(self, state: State, update: Tensor, carry: Any, following: State) -> tuple[WeightedSum, ...]:
        """The weighted sums behind the state that `write` has returned, for audits; none by default."""
        return ()

    def write_gauges(self, state: State, update: Tensor, context: Views, carry: Any) -> dict[str, Float[Tensor, "B T"]]:
        """Numbers per token that say how a write works, by name, for audits; none by default."""
        return {}


class DepthEnds(DeclaredModule, ABC):
    """How embeddings become a depth state, and how the last state becomes what the final norm sees."""

    lends = False
    """Whether mixers use parameters of the ends, so that every rank of a pipeline needs them."""

    @abstractmethod
    def enter(self, embeddings: Float[Tensor, "B T D"]) -> State:
        """Returns the state before the first sublayer."""

    @abstractmethod
    def leave(self, state: State) -> Float[Tensor, "B T D"]:
        """Returns the hidden states of the last layer, before the final norm."""

    def new_cache(self) -> Any:
        """What generation carries from token to token before the first one; None for ends of single tokens."""

    def enter_along(self, embeddings: Float[Tensor, "B T D"], layout: TokenLayout, cache: Any) -> tuple[State, Any]:
        """As `enter`, where ends that also mix along positions learn the documents and the tokens before these."""
        return self.enter(embeddings), None

    def leave_along(self, state: State, layout: TokenLayout, cache: Any) -> tuple[Float[Tensor, "B T D"], Any]:
        """As `leave`, in the same way; it is given the cache that `enter_along` returned."""
        return self.leave(state), cache

    def leave_sums(self, state: State, left: Float[Tensor, "B T D"]) -> tuple[WeightedSum, ...]:
        """The weighted sums behind what `leave` has returned, for audits; none by default."""
        return ()


def outside_decoder(config: DepthConfig, stack: Stack) -> Stack:
    """Prepares the stack for a model whose sublayers return their update and nothing else.

    Raises:
        ConfigError: a mixer that takes more than the update.
    """
    stack = config.prepare(stack)
    if any(slot.update_extra for slot in stack.slots):
        raise ConfigError(
            f"depth mixer {config.kind!r} with these options takes more than the update of a sublayer: must be used in a "
            "Decoder; leave out key_rank"
        )
    return stack


def check_state(state: State, tensors: int | None) -> None:
    """Refuses a state of a host that does not have as many tensors as it must at this place; None is not known."""
    if tensors is not None and _tensors(state) != tensors:
        remedy = "begin with axis.enter and call every mixer of axis.blocks in order"
        raise ConfigError(problem("tensors of the depth state", _tensors(state), f"{tensors} at this place", remedy))


def _tensors(state: State) -> int:
    return sum(map(_tensors, state)) if isinstance(state, tuple) else int(isinstance(state, Tensor))


class ParallelEnds(DepthEnds):
    """The state is n parallel streams that start as the embeddings and end as their sum.

    Args:
        n_streams: n.
        n_fractions: pieces of each stream, where pieces are read and mixed.
    """

    def __init__(self, n_streams: int, n_fractions: int = 1) -> None:
        super().__init__()
        self.n_streams, self.n_fractions = n_streams, n_fractions

    def enter(self, embeddings: Float[Tensor, "B T D"]) -> tuple[Float[Tensor, "B T D"], ...]:
        """Returns the embeddings n times."""
        return (embeddings,) * self.n_streams

    def leave(self, state: tuple[Float[Tensor, "B T D"], ...]) -> Float[Tensor, "B T D"]:
        """Returns the sum of the streams."""
        return sum_streams(state)


class StreamEnds(DepthEnds):
    """The state is one stream that starts as the embeddings."""

    def enter(self, embeddings: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """Returns the embeddings."""
        return embeddings

    def leave(self, state: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """Returns the stream."""
        return state
