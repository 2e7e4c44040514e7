"""The contract of the depth axis: how a sublayer reads from the residual stream and writes to it.

The depth state is an explicit immutable value: a tensor, or a (nested) tuple of tensors. Nothing is stored on a
module between calls, and no tensor of a state is ever written in place. The state between two sublayers is therefore
exactly what a pipeline cut, an activation checkpoint or a decoder step carries.

A new mixer is one file with a configuration and a module, and one row in `twoaxis.depth`.

Letters: B batch, T position, D width.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils._pytree import tree_map

from twoaxis.core.config import Config
from twoaxis.core.cost import Cost, Shape
from twoaxis.core.design import InitEquivalence, MixingDesign
from twoaxis.core.errors import ConfigError, problem
from twoaxis.core.layout import TokenLayout
from twoaxis.core.mixer import Mixer
from twoaxis.core.parameters import Constant, DeclaredModule
from twoaxis.core.position import LayerStack, SublayerPosition
from twoaxis.core.views import Views, WeightedSum

__all__ = [
    "Constant",
    "Controls",
    "Cost",
    "DepthConfig",
    "DepthEnds",
    "DepthMixer",
    "Explanation",
    "InitEquivalence",
    "LayerStack",
    "Layout",
    "Mix",
    "MixingDesign",
    "NoHeads",
    "Read",
    "Shape",
    "State",
    "Stream",
    "StreamEnds",
    "SublayerPosition",
    "Views",
    "WeightedSum",
    "Write",
]

State = Any
"""A tensor or nested tuples of tensors; each mixer names its own."""

Stream = Float[Tensor, "B T D"]
"""A tensor as wide as the model."""

NoHeads = tuple[()]
"""The heads of a sublayer that has none."""

Layout = TokenLayout | None
"""Documents and positions of the tokens; None means that every row is one document."""


class Controls(NamedTuple):
    """The mixers that one mixer is compared with.

    Attributes:
        static: data of the nearest mixer whose weights do not depend on the input; None without one.
        write_only: data of the mixer that writes the same without erasing anything first; None without one.
        streams: parallel residual streams, which a wider plain model is compared with; 1 for a plain stream.
        unmixed: data of the same mixer with its mixing off: streams that are read and written alike and never mixed, or the
            plain model in the same sublayers; None without one.
        temperature: data of the same mixer with another softmax temperature of each head; None without one.
        qk_norm: data of the same mixer with another choice of norms of queries and keys; None without one.
    """

    static: Mapping[str, Any] | None = None
    write_only: Mapping[str, Any] | None = None
    streams: int = 1
    unmixed: Mapping[str, Any] | None = None
    temperature: Mapping[str, Any] | None = None
    qk_norm: Mapping[str, Any] | None = None


class Read(NamedTuple):
    """One read: the state, the views and the carry. At the end of the stack the views are the final hidden states."""

    state: State
    views: Any
    carry: Any = None


class Write(NamedTuple):
    """One write: the state before it, the update, its context, the carry and the next state."""

    state: State
    update: Tensor
    context: Views
    carry: Any
    next_state: State


class Mix(NamedTuple):
    """One mixing of heads: the state and the heads (`Heads`, or `()` without any) before it, and behind it."""

    state: State
    heads: Any
    mixed: Any
    next_state: State


class Explanation(NamedTuple):
    """The weighted sums of a read, a mixing of heads or a write, and numbers per token [B T] by name, for audits."""

    sums: tuple[WeightedSum, ...] = ()
    gauges: Mapping[str, Float[Tensor, "B T"]] = {}


class DepthConfig(Config, ABC):
    """Configuration of one depth mixer: states its mathematics, and builds its modules."""

    # Any, since each mixer narrows it to the one literal that names it.
    kind: Any

    @property
    @abstractmethod
    def design(self) -> MixingDesign:
        """How weights are computed, and where the weighted sum is added or stored."""

    @property
    @abstractmethod
    def init_equivalence(self) -> InitEquivalence:
        """How the freshly initialised model relates to the plain pre-norm model."""

    @abstractmethod
    def cost(self, site: SublayerPosition, shape: Shape) -> Cost:
        """Parameters and operations of reading, mixing heads and writing at one sublayer, in one forward pass."""

    def ends_cost(self, stack: LayerStack, shape: Shape) -> Cost:
        """Parameters and operations of entering and leaving the stack, in one forward pass."""
        return Cost()

    def splits_views(self, site: SublayerPosition) -> bool:
        """Whether a sublayer reads separate inputs for queries, keys and values, each with its own norm."""
        return False

    def controls(self) -> Controls:
        """Mixers to compare with; none by default."""
        return Controls()

    def prepare(self, stack: LayerStack) -> LayerStack:
        """Checks that the sublayers fit this mixer, and returns the stack with the properties that it sets.

        Raises:
            ConfigError: sublayers that do not fit.
        """
        for site in stack.sites if stack.slots else ():
            if self.splits_views(site) and not site.slot.takes_views:
                raise ConfigError(
                    f"depth mixer {self.kind!r} reads separate q, k and v before {site.slot.kind!r} in block {site.block}: "
                    "must be a mixer that takes them; use 'attention' without input_local there, or options with one view"
                )
        return stack

    @abstractmethod
    def build(self, stack: LayerStack) -> "tuple[Sequence[DepthMixer], DepthEnds]":
        """Builds the mixers of all sublayers of a prepared stack, and its two ends; they may share parts."""


class DepthMixer(Mixer):
    """Reads the input of one sublayer from the depth state, and writes the sublayer's update to it.

    A mixer with parts that the ends own, or that several sublayers share, needs a `DepthAxis`; others may be built alone.

    Attributes:
        mixes_heads: whether `mix_heads` is called, between the projections of the sublayer and its attention if it has heads.
        entering_tensors: tensors of the state that enters here, where a `DepthAxis` has counted them.
        norm_scale: outside of a decoder, the factor on the norm before the sublayer; None if it reads without one.
        enters_stream: outside of a decoder, whether the state begins as the embeddings, so that no `enter` is needed.
    """

    mixes_heads: bool = False
    enters_stream: bool = True
    entering_tensors: int | None = None
    norm_scale: float | None = 1.0

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.mixes_heads = cls.mix_heads is not DepthMixer.mix_heads

    @classmethod
    def build_alone(cls, config: Any, site: SublayerPosition) -> "DepthMixer":
        """Builds the mixer of one sublayer, for a model that is not our decoder."""
        mixers, _ = build_outside(config, outside_decoder(config, site.stack))
        return mixers[site.index]

    @final
    def forward(self, state: State, norm: Callable[[Any], Any], sublayer: Callable[[Any], Tensor]) -> State:
        """Runs a sublayer of a model of another code base: `x = mixer(x, norm, f)` replaces `x = x + f(norm(x))`.

        Our decoder calls `read` and `write` itself. Every row is one document here, from its first token on.

        Args:
            state: the depth state; with many mixers the stream itself, else the result of `enter` or of the sublayer before.
            norm: normalises the views, one tensor or a `QKV` of three, to the context; not called by a mixer whose sublayers
                read without a norm. Neither this nor the sublayer writes into what it is given, which later reads may share.
            sublayer: computes the update [B T D] from the context.

        Raises:
            ConfigError: a norm or sublayer that has written into the state; a mixer that works inside attention, which needs
                our decoder; hidden states where the mixer keeps more than the stream, and a state of another position.

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
        if isinstance(state, Tensor) and not self.enters_stream:
            allowed = "what `enter` of a DepthAxis returns, since this mixer keeps more than the stream"
            remedy = "make a DepthAxis of this kind, and call its mixers between `enter` and `leave`"
            raise ConfigError(problem(f"state of {type(self).__name__}", "a tensor", allowed, remedy))
        check_state(state, self.entering_tensors)
        before = _versions(state)
        views, carry, _ = self.read(state)
        context = views if self.norm_scale is None else norm(views)
        if self.norm_scale not in (None, 1.0):
            context = tree_map(lambda view: self.norm_scale * view, context)
        update = sublayer(context)
        if _versions(state) != before:
            given, allowed = "written in place", "read only, since later sublayers read the same tensors"
            raise ConfigError(problem("state, by norm or sublayer", given, allowed, "write x = x * 2 in place of x.mul_(2)"))
        return self.write(state, update, context, carry)

    def read(self, state: State, layout: Layout = None, cache: Any = None) -> tuple[Views, Any, Any]:
        """Returns the input of the sublayer before its norm, a carry for `write`, and the next cache.

        The default returns the state itself.

        Args:
            state: before this sublayer.
            layout: of the tokens.
            cache: of a mixer that also mixes along positions: `()` before the first token, then as the last call returned
                it; None runs without one.
        """
        return state, None, cache

    def mix_heads(self, heads: Any, context: Views, state: State, layout: Layout = None) -> tuple[Any, State]:
        """Returns the heads that attend instead of the given ones, and the state for later sublayers.

        Args:
            heads: `Heads` at the stage of the slot, or `()` for a sublayer without heads.
            context: what the sublayer computes its update from.
            state: before this sublayer.
            layout: of the tokens.
        """
        return heads, state

    @abstractmethod
    def write(self, state: State, update: Stream, context: Views, carry: Any) -> State:
        """Returns the next state, given the sublayer's output and the normalised input it was computed from."""

    def explain(self, done: Any) -> Explanation:
        """Returns the weights of a `Read`, a `Write` or, of a mixer of heads, a `Mix`, for audits; none by default."""
        return Explanation()


class DepthEnds(DeclaredModule, ABC):
    """Expands embeddings to the depth state, and collapses the last state to the hidden states before the final norm.

    Attributes:
        shares_parameters: whether mixers use parameters of the ends, so that every rank of a pipeline needs them.
    """

    shares_parameters = False

    @abstractmethod
    def enter(self, embeddings: Stream, layout: Layout = None, cache: Any = None) -> tuple[State, Any]:
        """Returns the state before the first sublayer and the cache for `leave`; layout and cache as in `DepthMixer.read`."""

    @abstractmethod
    def leave(self, state: State, layout: Layout = None, cache: Any = None) -> tuple[Stream, Any]:
        """Returns the hidden states before the final norm, and the next cache of the ends."""

    def explain(self, done: Read) -> Explanation:
        """Returns the weights of the final read, for audits; none by default."""
        return Explanation()


class StreamEnds(DepthEnds):
    """The state is one stream that starts as the embeddings."""

    def enter(self, embeddings: Stream, layout: Layout = None, cache: Any = None) -> tuple[State, Any]:
        """Returns the embeddings."""
        return embeddings, cache

    def leave(self, state: State, layout: Layout = None, cache: Any = None) -> tuple[Stream, Any]:
        """Returns the stream."""
        return state, cache


def outside_decoder(config: DepthConfig, stack: LayerStack) -> LayerStack:
    """Prepares the stack for a model whose sublayers return their update alone.

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


def build_stack(config: DepthConfig, stack: LayerStack) -> "tuple[Sequence[DepthMixer], DepthEnds]":
    """Builds the mixers of a prepared stack and its ends.

    Raises:
        ConfigError: a mixer of another package that builds too few or too many.
    """
    mixers, ends = config.build(stack)
    if len(mixers) != len(stack.sites):
        what = f"depth mixer {config.kind!r}: mixers from build"
        allowed = f"{len(stack.sites)}, one for each sublayer"
        raise ConfigError(problem(what, len(mixers), allowed, "build one for each of stack.sites"))
    return mixers, ends


def build_outside(config: DepthConfig, stack: LayerStack) -> "tuple[Sequence[DepthMixer], DepthEnds]":
    """Builds the mixers of a prepared stack, which tell how their sublayers are normalised, and its ends."""
    mixers, ends = build_stack(config, stack)
    for mixer, site in zip(mixers, stack.sites, strict=True):
        mixer.norm_scale = None if site.slot.norm == "none" else site.slot.norm_scale
        mixer.enters_stream = isinstance(ends, StreamEnds)
    return mixers, ends


def check_state(state: State, tensors: int | None) -> None:
    """Refuses a state that does not have the expected number of tensors at this position; None is unknown."""
    if tensors is not None and _tensors(state) != tensors:
        remedy = "begin with axis.enter and call every mixer of axis.blocks in order"
        raise ConfigError(problem("tensors of the depth state", _tensors(state), f"{tensors} at this position", remedy))


def _versions(state: State) -> list[int]:
    """How often each tensor of a state has been written, where PyTorch counts it."""
    if isinstance(state, tuple):
        return [version for part in state for version in _versions(part)]
    counted = isinstance(state, Tensor) and not torch.compiler.is_compiling() and not state.is_inference()
    return [state._version] if counted else []


def _tensors(state: State) -> int:
    return sum(map(_tensors, state)) if isinstance(state, tuple) else int(isinstance(state, Tensor))
