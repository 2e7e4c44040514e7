"""Residual scalars: learned weights on the stream and on the embedding, the cheap baseline to beat.

Letters: B batch, T position, D width.
"""

from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.equivalence import InitEquivalence
from twoaxis.core.mixing_design import MixingDesign
from twoaxis.core.parameters import Constant
from twoaxis.core.site import Site, Stack
from twoaxis.core.state import Flow, Leaf, Numbers, stream
from twoaxis.core.views import Views
from twoaxis.core.weighted_sum import WeightedSum, per_token
from twoaxis.depth.base import DepthConfig, DepthEnds, DepthMixer


class ResidualScalarsConfig(DepthConfig):
    """Rescales the stream and adds back the embedding before each sublayer, with two learned scalars.

    Equation: h = a_g x + b_g x_0,  x' = h + f(Norm(h)),  x_0 the embeddings
    Source:   the resid_lambdas and x0_lambdas of karpathy/nanochat (no paper)
    Deviates: one pair of scalars per sublayer instead of per block
    Shapes:   state ([B T D], [B T D]); update [B T D] -> state
    Init:     EXACT: a = 1, b = 0
    Cost:     params 2 per sublayer; flops 4*D per token and sublayer; state 2*D numbers per token; it
              moves 6*D

    Example:
        >>> ResidualScalarsConfig().init_equivalence.relation
        'exact'
    """

    kind: Literal["residual_scalars"] = "residual_scalars"

    @property
    def design(self) -> MixingDesign:
        """Two free scalars."""
        return MixingDesign("none", "none", "x_g, e", "none", "own state, e", "sublayer", "replaces the stream")

    @property
    def init_equivalence(self) -> InitEquivalence:
        """Exact."""
        return InitEquivalence("exact", "the stream starts with weight 1 and the embedding with weight 0")

    def state(self, stack: Stack, index: int) -> tuple[Leaf, ...]:
        """The stream and the embedding, which are one tensor at first."""
        return stream(stack.d_model, index), stream(stack.d_model, 0)

    def flow(self, site: Site) -> Flow:
        """The mixed stream goes to memory for the sublayer, and comes back for the add."""
        D = site.d_model
        held = 2 if site.index else 1
        return Flow(read=Numbers((held + 2) * D), written=Numbers(2 * D), views=Numbers(D))

    def cost(self, site: Site, shape: Shape) -> Cost:
        """Two scalings and two adds; autograd keeps nothing beyond the state."""
        return Cost(params=2, elementwise_flops=4 * shape.total_tokens * site.d_model)

    def build(self, site: Site) -> "ResidualScalars":
        """Builds the mixer."""
        return ResidualScalars()

    def build_ends(self, stack: Stack) -> "StreamAndEmbeddingEnds":
        """Builds the ends."""
        return StreamAndEmbeddingEnds()


class StreamAndEmbedding(NamedTuple):
    """The depth state: the stream, and the embeddings it began with."""

    stream: Float[Tensor, "B T D"]
    embedding: Float[Tensor, "B T D"]


class ResidualScalars(DepthMixer):
    """See `ResidualScalarsConfig`."""

    def __init__(self) -> None:
        super().__init__()
        self.stream_weight = self.parameter("stream_weight", (1,), Constant(1.0), "mixing")
        self.embedding_weight = self.parameter("embedding_weight", (1,), Constant(0.0), "mixing")

    def read(self, state: StreamAndEmbedding) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "B T D"]]:
        """Returns a x + b x_0, as view and as carry."""
        mixed = state.stream * self.stream_weight + state.embedding * self.embedding_weight
        return mixed, mixed

    def read_sums(
        self, state: StreamAndEmbedding, views: Float[Tensor, "B T D"], carry: Float[Tensor, "B T D"]
    ) -> tuple[WeightedSum, ...]:
        """The sum of stream and embedding."""
        weights = per_token(torch.cat((self.stream_weight, self.embedding_weight)), views)
        return (WeightedSum(views, "read", ("stream", "embedding"), (state.stream, state.embedding), weights),)

    def write(
        self, state: StreamAndEmbedding, update: Float[Tensor, "B T D"], context: Views, carry: Float[Tensor, "B T D"]
    ) -> StreamAndEmbedding:
        """Returns the mixed stream plus the update, beside the embedding."""
        return StreamAndEmbedding(carry + update, state.embedding)


class StreamAndEmbeddingEnds(DepthEnds):
    """The state starts as the embeddings twice and ends as the stream."""

    def enter(self, embeddings: Float[Tensor, "B T D"]) -> StreamAndEmbedding:
        """Returns the embeddings as stream and as themselves."""
        return StreamAndEmbedding(embeddings, embeddings)

    def leave(self, state: StreamAndEmbedding) -> Float[Tensor, "B T D"]:
        """Returns the stream."""
        return state.stream
