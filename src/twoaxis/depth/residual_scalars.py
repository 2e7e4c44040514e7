"""Residual scalars: learned weights on the stream and on the embedding, a cheap baseline.

Letters: B batch, T position, D width.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.design import InitEquivalence, MixingDesign
from twoaxis.core.errors import ConfigError, problem
from twoaxis.core.parameters import Constant
from twoaxis.core.position import LayerStack, SublayerPosition
from twoaxis.core.views import Views, WeightedSum, per_token, unit_name
from twoaxis.depth.base import DepthConfig, DepthEnds, DepthMixer, Explanation, Layout, Read, Stream, Write
from twoaxis.depth.history import Granularity, Unit, n_units, unit_of
from twoaxis.ops.norm import rms_norm
from twoaxis.ops.precision import Impl, statistics_dtype

Embedding = Literal["normalised", "normalised_start", "raw"]
Backout = Literal["middle"] | Annotated[int, Field(ge=0)] | None

STREAM_START, EMBEDDING_START, BACKOUT_START = (1.15, 1.05), (0.20, 0.05), 0.2
"""What nanochat starts with: the weights of the first and the last unit, linear between them, and that of the last read."""


class ResidualScalarsConfig(DepthConfig):
    """Rescales the stream and adds back the embedding before each sublayer or block, with two learned scalars.

    Equation: h = a_g x + b_g x_0,  x' = h + f(Norm(h)),  e the embeddings
              normalised: x_0 = e / sqrt(mean(e^2) + eps), x = e at first;  normalised_start: the same x_0, x = x_0 at first;
              raw: x_0 = x = e at first
              backout_layer m: the head reads x - c x_m, with x_m the stream after block m
    Source:   the resid_lambdas, x0_lambdas and backout_lambda of karpathy/nanochat, gpt.py at 92d63d4 (no paper)
    Deviates: the default has a pair of scalars per sublayer, where nanochat has one per block, no backout, and starts the
              stream at the embedding as the plain model does, so that the two differ by the scalars alone; nanochat is
              embedding="normalised_start", granularity="block", backout_layer="middle" and init="nanochat". It also smears
              embeddings before x_0 is taken, which is not here. It trains a at 0.005, b at 0.5 and c at 0.2 of the rate of
              its scalars and decays a by 0.05; here no weight decays. eps is the epsilon of the statistics dtype, as there
    Shapes:   state ([B T D], [B T D]), a third after block m; update [B T D] -> state; the norm in float32
    Init:     a = 1, b = 0, c = 0: EXACT with `normalised` and `raw`; NONE with `normalised_start` and with init="nanochat",
              where a falls from 1.15 to 1.05 and b from 0.20 to 0.05, linear in depth, and c = 0.2
    Cost:     params 2 per sublayer or block, 1 for backout; flops 4*D per token and pair of scalars, D per other sublayer,
              3*D per token for the norm and 2*D for backout; state 2*D numbers per token, 3*D after block m

    Args:
        embedding: `normalised`: x_0 is the RMS norm of the embedding without a gain, and the stream starts as the embedding;
            `normalised_start`, where the stream starts as the normalised embedding too; or `raw`, the embedding itself.
        granularity: a pair of scalars for every `sublayer`, or for every `block`, before its first sublayer.
        backout_layer: the block m, counted from 0, after which the stream is kept; `middle` is half of the blocks, rounded
            down; None leaves backout out.
        init: `plain` for a model that starts as without the scalars, or the values of `nanochat`.
        impl: of the norm, `fused` or `reference`.

    Raises:
        ConfigError: a backout_layer that the model does not have.

    Example:
        >>> ResidualScalarsConfig().init_equivalence.relation
        'exact'
    """

    kind: Literal["residual_scalars"] = "residual_scalars"
    embedding: Embedding = "normalised"
    granularity: Granularity = "sublayer"
    backout_layer: Backout = None
    init: Literal["plain", "nanochat"] = "plain"
    impl: Impl = "fused"

    unrecorded: ClassVar[Mapping[str, Any]] = {"embedding": "raw"}

    @property
    def design(self) -> MixingDesign:
        """Two free scalars."""
        value = "x_g, e" if self.embedding == "raw" else "x_g, RMSNorm(e)"
        window = "own state, e" if self.backout_layer is None else "own state, e, h_m"
        return MixingDesign("none", "none", value, "none", window, self.granularity, "replaces the stream")

    @property
    def init_equivalence(self) -> InitEquivalence:
        """Exact, unless the stream starts as the normalised embedding, or the scalars as published."""
        if self.embedding == "normalised_start":
            return InitEquivalence("none", "the stream starts as the normalised embedding, and updates are added to that")
        if self.init == "nanochat":
            return InitEquivalence("none", "the stream starts with weights above 1, and the embedding with weights above 0")
        return InitEquivalence("exact", "the stream starts with weight 1 and the embedding with weight 0")

    def prepare(self, stack: LayerStack) -> LayerStack:
        """Refuses a backout_layer that the model does not have."""
        if isinstance(self.backout_layer, int) and self.backout_layer >= stack.n_blocks:
            allowed = f"below the {stack.n_blocks} blocks of the model"
            raise ConfigError(problem("backout_layer", self.backout_layer, allowed, "count from 0, or use 'middle'"))
        return stack

    def backout_block(self, stack: LayerStack) -> int | None:
        """The block m; None without backout."""
        return stack.n_blocks // 2 if self.backout_layer == "middle" else self.backout_layer

    def starts(self, unit: Unit, units: int) -> tuple[float, float]:
        """The initial weights of the stream and of the embedding in one unit."""
        if self.init == "plain":
            return 1.0, 0.0
        way = unit.number / max(units - 1, 1)
        (a, a_last), (b, b_last) = STREAM_START, EMBEDDING_START
        return a + way * (a_last - a), b + way * (b_last - b)

    def cost(self, site: SublayerPosition, shape: Shape) -> Cost:
        """Two scalings and two adds, or one add."""
        numbers, mixes = shape.total_tokens * site.d_model, unit_of(site, self.granularity).opens
        return Cost(params=2, elementwise_flops=4 * numbers) if mixes else Cost(elementwise_flops=numbers)

    def ends_cost(self, stack: LayerStack, shape: Shape) -> Cost:
        """The norm of the embedding, and backout."""
        each, backs_out = 3 * (self.embedding != "raw"), self.backout_layer is not None
        return Cost(params=int(backs_out), elementwise_flops=(each + 2 * backs_out) * shape.total_tokens * stack.d_model)

    def build(self, stack: LayerStack) -> "tuple[list[ResidualScalars], StreamAndEmbeddingEnds]":
        """Builds two scalars for each sublayer, or for the first of each block."""
        return [ResidualScalars(self, site) for site in stack.sites], StreamAndEmbeddingEnds(self, stack)


class StreamAndEmbedding(NamedTuple):
    """The depth state: the stream, the embeddings it began with or their norm, and the stream after block m once it is."""

    stream: Stream
    embedding: Stream
    middle: tuple[Stream, ...] = ()


class ResidualScalars(DepthMixer, config=ResidualScalarsConfig):
    """See `ResidualScalarsConfig`."""

    def __init__(self, config: ResidualScalarsConfig, site: SublayerPosition) -> None:
        super().__init__()
        unit = unit_of(site, config.granularity)
        self.mixes, self.keeps = unit.opens, site.closes_block and site.block == config.backout_block(site.stack)
        if self.mixes:
            stream, embedding = config.starts(unit, n_units(site.stack, config.granularity))
            self.stream_weight = self.parameter("stream_weight", (1,), Constant(stream), "mixing", stacked=1)
            self.embedding_weight = self.parameter("embedding_weight", (1,), Constant(embedding), "mixing", stacked=1)

    def read(self, state: StreamAndEmbedding, layout: Layout = None, cache: Any = None) -> tuple[Stream, Stream, Any]:
        """Returns a x + b x_0, or inside a block x, as view and as carry."""
        mixed = state.stream
        if self.mixes:
            mixed = state.stream * self.stream_weight + state.embedding * self.embedding_weight
        return mixed, mixed, cache

    def write(self, state: StreamAndEmbedding, update: Stream, context: Views, carry: Stream) -> StreamAndEmbedding:
        """Returns the mixed stream plus the update, and the embedding."""
        stream = carry + update
        return StreamAndEmbedding(stream, state.embedding, (stream,) if self.keeps else state.middle)

    def explain(self, done: Read | Write) -> Explanation:
        """Returns the sum of stream and embedding."""
        if isinstance(done, Write) or not self.mixes:
            return Explanation()
        weights = per_token(torch.cat((self.stream_weight, self.embedding_weight)), done.views)
        return Explanation((WeightedSum(done.views, "read", ("stream", "embedding"), tuple(done.state[:2]), weights),))


class StreamAndEmbeddingEnds(DepthEnds):
    """The state starts as the stream and x_0; the head reads the stream, without a part of the one after block m."""

    def __init__(self, config: ResidualScalarsConfig, stack: LayerStack) -> None:
        super().__init__()
        self.config, self.block = config, config.backout_block(stack)
        if self.block is not None:
            start = BACKOUT_START if config.init == "nanochat" else 0.0
            self.backout_weight = self.parameter("backout_weight", (1,), Constant(start), "mixing")

    def enter(self, embeddings: Stream, layout: Layout = None, cache: Any = None) -> tuple[StreamAndEmbedding, Any]:
        """Returns the first stream, and x_0."""
        if self.config.embedding == "raw":
            return StreamAndEmbedding(embeddings, embeddings), cache
        added = rms_norm(embeddings, None, torch.finfo(statistics_dtype(embeddings)).eps, self.config.impl)
        return StreamAndEmbedding(embeddings if self.config.embedding == "normalised" else added, added), cache

    def leave(self, state: StreamAndEmbedding, layout: Layout = None, cache: Any = None) -> tuple[Stream, Any]:
        """Returns the stream, or x - c x_m."""
        return state.stream if self.block is None else state.stream - state.middle[0] * self.backout_weight, cache

    def explain(self, done: Read) -> Explanation:
        """Returns the difference of the stream and the one after block m."""
        if self.block is None:
            return Explanation()
        weights = per_token(torch.cat((torch.ones_like(self.backout_weight), -self.backout_weight)), done.views)
        names, sources = ("stream", unit_name(self.block + 1)), (done.state.stream, *done.state.middle)
        return Explanation((WeightedSum(done.views, "read", names, sources, weights),))
