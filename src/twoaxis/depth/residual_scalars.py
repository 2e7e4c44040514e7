"""Residual scalars: learned weights on the stream and on the embedding, a cheap baseline.

Letters: B batch, T position, D width.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import torch

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.design import InitEquivalence, MixingDesign
from twoaxis.core.parameters import Constant
from twoaxis.core.position import LayerStack, SublayerPosition
from twoaxis.core.views import Views, WeightedSum, per_token
from twoaxis.depth.base import DepthConfig, DepthEnds, DepthMixer, Explanation, Layout, Read, Stream, Write
from twoaxis.ops.norm import rms_norm
from twoaxis.ops.precision import Impl, statistics_dtype

Embedding = Literal["normalised", "normalised_start", "raw"]


class ResidualScalarsConfig(DepthConfig):
    """Rescales the stream and adds back the embedding before each sublayer, with two learned scalars.

    Equation: h = a_g x + b_g x_0,  x' = h + f(Norm(h)),  e the embeddings
              normalised: x_0 = e / sqrt(mean(e^2) + eps), x = e at first;  normalised_start: the same x_0, x = x_0 at first;
              raw: x_0 = x = e at first
    Source:   the resid_lambdas and x0_lambdas of karpathy/nanochat, gpt.py at 92d63d4 (no paper)
    Deviates: one pair of scalars per sublayer instead of per block. nanochat starts the stream at x_0 (`normalised_start`);
              the default starts it at the embedding as the plain model does, so that the two differ by the scalars alone.
              nanochat starts a at 1.15 to 1.05 and b at 0.20 to 0.05, falling with depth, and smears embeddings before x_0
              is taken; neither is here. eps is the epsilon of the statistics dtype, as there
    Shapes:   state ([B T D], [B T D]); update [B T D] -> state; the norm in float32
    Init:     a = 1, b = 0: EXACT with `normalised` and `raw`; NONE with `normalised_start`
    Cost:     params 2 per sublayer; flops 4*D per token and sublayer, and 3*D per token for the norm; state 2*D numbers per
              token

    Args:
        embedding: `normalised`: x_0 is the RMS norm of the embedding without a gain, and the stream starts as the embedding;
            `normalised_start`, where the stream starts as the normalised embedding too; or `raw`, the embedding itself.
        impl: of the norm, `fused` or `reference`.

    Example:
        >>> ResidualScalarsConfig().init_equivalence.relation
        'exact'
    """

    kind: Literal["residual_scalars"] = "residual_scalars"
    embedding: Embedding = "normalised"
    impl: Impl = "fused"

    unrecorded: ClassVar[Mapping[str, Any]] = {"embedding": "raw"}

    @property
    def design(self) -> MixingDesign:
        """Two free scalars."""
        value = "x_g, e" if self.embedding == "raw" else "x_g, RMSNorm(e)"
        return MixingDesign("none", "none", value, "none", "own state, e", "sublayer", "replaces the stream")

    @property
    def init_equivalence(self) -> InitEquivalence:
        """Exact, unless the stream starts as the normalised embedding."""
        if self.embedding == "normalised_start":
            return InitEquivalence("none", "the stream starts as the normalised embedding, and updates are added to that")
        return InitEquivalence("exact", "the stream starts with weight 1 and the embedding with weight 0")

    def cost(self, site: SublayerPosition, shape: Shape) -> Cost:
        """Two scalings and two adds."""
        return Cost(params=2, elementwise_flops=4 * shape.total_tokens * site.d_model)

    def ends_cost(self, stack: LayerStack, shape: Shape) -> Cost:
        """The norm of the embedding."""
        return Cost(elementwise_flops=3 * shape.total_tokens * stack.d_model * (self.embedding != "raw"))

    def build(self, stack: LayerStack) -> "tuple[list[ResidualScalars], StreamAndEmbeddingEnds]":
        """Builds two scalars for each sublayer."""
        return [ResidualScalars() for _ in stack.sites], StreamAndEmbeddingEnds(self)


class StreamAndEmbedding(NamedTuple):
    """The depth state: the stream, and the embeddings it began with or their norm."""

    stream: Stream
    embedding: Stream


class ResidualScalars(DepthMixer, config=ResidualScalarsConfig):
    """See `ResidualScalarsConfig`."""

    def __init__(self) -> None:
        super().__init__()
        self.stream_weight = self.parameter("stream_weight", (1,), Constant(1.0), "mixing")
        self.embedding_weight = self.parameter("embedding_weight", (1,), Constant(0.0), "mixing")

    def read(self, state: StreamAndEmbedding, layout: Layout = None, cache: Any = None) -> tuple[Stream, Stream, Any]:
        """Returns a x + b x_0, as view and as carry."""
        mixed = state.stream * self.stream_weight + state.embedding * self.embedding_weight
        return mixed, mixed, cache

    def write(self, state: StreamAndEmbedding, update: Stream, context: Views, carry: Stream) -> StreamAndEmbedding:
        """Returns the mixed stream plus the update, and the embedding."""
        return StreamAndEmbedding(carry + update, state.embedding)

    def explain(self, done: Read | Write) -> Explanation:
        """Returns the sum of stream and embedding."""
        if isinstance(done, Write):
            return Explanation()
        weights = per_token(torch.cat((self.stream_weight, self.embedding_weight)), done.views)
        return Explanation((WeightedSum(done.views, "read", ("stream", "embedding"), tuple(done.state), weights),))


class StreamAndEmbeddingEnds(DepthEnds):
    """The state starts as the stream and x_0, and ends as the stream."""

    def __init__(self, config: ResidualScalarsConfig) -> None:
        super().__init__()
        self.config = config

    def enter(self, embeddings: Stream, layout: Layout = None, cache: Any = None) -> tuple[StreamAndEmbedding, Any]:
        """Returns the first stream, and x_0."""
        if self.config.embedding == "raw":
            return StreamAndEmbedding(embeddings, embeddings), cache
        added = rms_norm(embeddings, None, torch.finfo(statistics_dtype(embeddings)).eps, self.config.impl)
        return StreamAndEmbedding(embeddings if self.config.embedding == "normalised" else added, added), cache

    def leave(self, state: StreamAndEmbedding, layout: Layout = None, cache: Any = None) -> tuple[Stream, Any]:
        """Returns the stream."""
        return state.stream, cache
