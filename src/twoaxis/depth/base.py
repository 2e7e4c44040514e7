"""The contract of the depth axis: how a sublayer reads from the residual stream and writes to it.

The depth state is an explicit immutable value: a tensor, or a (nested) tuple of tensors. Nothing is stored on a
module between calls, and no tensor of a state is ever written in place. The state between two sublayers is therefore
exactly what a pipeline cut, an activation checkpoint or a decoder step has to carry.

Letters: B batch, T position, D width.
"""

from abc import ABC, abstractmethod
from typing import Any

from jaxtyping import Float
from torch import Tensor

from twoaxis.core.config import Config
from twoaxis.core.cost import Cost, Shape
from twoaxis.core.equivalence import InitEquivalence
from twoaxis.core.parameters import DeclaredModule
from twoaxis.core.site import Site, Stack
from twoaxis.core.views import Views

State = Any
"""A tensor or nested tuples of tensors; each mixer names its own."""


class DepthConfig(Config, ABC):
    """Configuration of one depth mixer; builds its parts and states its init, state and cost."""

    # Any, since each mixer narrows it to the one literal that names it.
    kind: Any

    @property
    @abstractmethod
    def init_equivalence(self) -> InitEquivalence:
        """How the freshly initialised model relates to the plain pre-norm model."""

    @abstractmethod
    def state_floats(self, stack: Stack, index: int) -> int:
        """Numbers per token in the state that enters sublayer `index`; `n_sublayers` is the state that is left."""

    @abstractmethod
    def cost(self, site: Site, shape: Shape) -> Cost:
        """What reading and writing cost at this site in one forward pass."""

    def ends_cost(self, stack: Stack, shape: Shape) -> Cost:
        """What entering and leaving cost in one forward pass."""
        return Cost()

    @abstractmethod
    def build(self, site: Site) -> "DepthMixer":
        """Builds the mixer of one sublayer; `core.parameters.initialise` sets its values."""

    def build_ends(self, stack: Stack) -> "DepthEnds":
        """Builds the two ends of the stack; the default is one plain stream."""
        return StreamEnds()


class DepthMixer(DeclaredModule, ABC):
    """What one sublayer does to the depth state."""

    splits_views = False
    """Whether `read` returns separate inputs for queries, keys and values."""

    @abstractmethod
    def read(self, state: State) -> tuple[Views, Any]:
        """Returns what the sublayer sees, before its norm, and a carry that `write` receives."""

    @abstractmethod
    def write(self, state: State, update: Float[Tensor, "B T D"], context: Views, carry: Any) -> State:
        """Returns the next state, given the sublayer's output and the normalised input it was computed from."""


class DepthEnds(DeclaredModule, ABC):
    """How embeddings become a depth state, and how the last state becomes what the final norm sees."""

    @abstractmethod
    def enter(self, embeddings: Float[Tensor, "B T D"]) -> State:
        """Returns the state before the first sublayer."""

    @abstractmethod
    def leave(self, state: State) -> Float[Tensor, "B T D"]:
        """Returns the hidden states of the last layer, before the final norm."""


class StreamEnds(DepthEnds):
    """The state is one stream that starts as the embeddings."""

    def enter(self, embeddings: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """Returns the embeddings."""
        return embeddings

    def leave(self, state: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """Returns the stream."""
        return state
