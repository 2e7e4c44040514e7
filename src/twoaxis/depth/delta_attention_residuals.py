"""Delta Attention Residuals: each sublayer reads the stream plus a softmax mixture of earlier updates.

Letters: B batch, T position, D width, S depth sources.
"""

from typing import Any, Literal, NamedTuple, Self

from jaxtyping import Float
from pydantic import model_validator
from torch import Tensor

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.design import InitEquivalence, MixingDesign
from twoaxis.core.errors import ConfigError, problem
from twoaxis.core.position import LayerStack, SublayerPosition
from twoaxis.core.views import QKV, Views
from twoaxis.depth.base import Controls, DepthConfig, DepthEnds, DepthMixer, Explanation, Layout, Read, Stream, Write
from twoaxis.depth.depth_query import AddedRead, Sources
from twoaxis.depth.history import BlockSize, Count, SourceBlocks, check_blocks, source_blocks
from twoaxis.ops.depth_read import passing_factor
from twoaxis.ops.precision import Impl


class DeltaAttentionResidualsConfig(DepthConfig):
    """Adds to the plain stream, at every read, a softmax mixture of the embedding and of earlier outputs or block deltas.

    Equation: h_g = s_g + alpha_g sum_i a_i v_i,  a = softmax_i(w_g^T (gain_g * RMSNorm(v_i))),  s_{g+1} = s_g + f_g(Norm(h_g)),
              sources v: embedding, then every output (block_size 1) or every block's sum of outputs; out = s_G
    Source:   Delta Attention Residuals, arXiv:2605.18855v1; authors' code wdlctc/delta-attention-residuals-code@fc11c3e,
              Attention-Residuals/modeling_qwen3_attnres.py, and wdlctc/open-attention-residuals for blocks
    Deviates: queries start at zero, as the paper says and the code does not (its host overwrites them). A read of one source
              has no query. The paper calls a null source the identity at the start; RMSNorm(0) = 0 gives it the score of every
              other source, here as in the code. The released blocks append the stream less the previous entry, an alternating
              sum that equals a block's delta only once: entries="as_released" is that. The embedding of the released separate
              values is no source (embedding="never"); their recency bias, which only a retrofit mode reads, does not exist
              here. running_source is ours: with it the sources of the block form add up to the stream, which makes a retrofit
              equal to its origin
    Shapes:   state ([B T D], S times [B T D], S times [B T], the running delta within a block); update [B T D] -> state;
              scores and softmax in float32
    Init:     EXACT with gate="alpha", which starts at 0; UP_TO_NORM where the sources add up to the stream, since their mean
              then only scales it; else NONE: blocks without a running source, no embedding, or entries as released
    Cost:     params 2*D per read of more than one source, D with a null source, 1 with a gate; flops 4*D per source and token;
              state D + S*(D+1) numbers per token
    Published: perplexity 36.83 (blocks 37.08) against 37.39 of Attention Residuals and 38.71 of the residual at 220M,
              arXiv:2605.18855

    Args:
        block_size: sublayers whose outputs are summed into one source; a tuple gives the size of each block.
        count: whether block_size counts sublayers or layers.
        entries: `block_delta`, or `as_released`.
        running_source: whether the delta of the running block is `included` or `excluded`.
        embedding: whether the embedding is a source from the `first_read`, from the `second_read`, or `never`.
        value_routing: `shared`, or `separate`: attention has one read for queries and keys and one for values.
        null_source: `none`, or `learned`: a vector per read, zero at the start, that the softmax may choose.
        gate: `one`, or `alpha`: a learned factor per read, zero at the start.
        impl: `fused` or `reference`.

    Raises:
        ConfigError: sizes that do not add up, options that the released entries lack, or separate values without attention.

    Example:
        >>> DeltaAttentionResidualsConfig(gate="alpha").init_equivalence.relation
        'exact'
    """

    kind: Literal["delta_attention_residuals"] = "delta_attention_residuals"
    block_size: BlockSize = 1
    count: Count = "sublayer"
    entries: Literal["block_delta", "as_released"] = "block_delta"
    running_source: Literal["excluded", "included"] = "excluded"
    embedding: Literal["first_read", "second_read", "never"] = "second_read"
    value_routing: Literal["shared", "separate"] = "shared"
    null_source: Literal["none", "learned"] = "none"
    gate: Literal["one", "alpha"] = "one"
    impl: Impl = "fused"

    @property
    def design(self) -> MixingDesign:
        """A softmax whose query is a parameter, added to the stream."""
        value = "f_j" if self.block_size == 1 else "sums of f_j over source blocks"
        return MixingDesign(
            query="parameter w_g",
            key="RMSNorm(value), own gain",
            value=value if self.embedding == "never" else f"{value}, e",
            normaliser="softmax",
            window="all",
            sharing="sublayer",
            injection="added to what is read, not to the stream" + (", gated" if self.gate == "alpha" else ""),
            weights="input",
        )

    @model_validator(mode="after")
    def _entries_allow(self) -> Self:
        for name, allowed in (("running_source", "excluded"), ("embedding", "second_read")):
            if self.entries == "as_released" and getattr(self, name) != allowed:
                what = f"{allowed!r} with entries='as_released'"
                raise ConfigError(problem(name, getattr(self, name), what, "use entries='block_delta'"))
        return self

    def prepare(self, stack: LayerStack) -> LayerStack:
        """Refuses sizes that do not add up, and separate values where no sublayer takes them."""
        check_blocks(self.block_size, self.count, stack)
        if self.value_routing == "separate" and stack.slots and not any(slot.takes_views for slot in stack.slots):
            allowed = "'shared' where no sublayer takes separate inputs"
            raise ConfigError(problem("value_routing", "separate", allowed, "add an attention sublayer"))
        return super().prepare(stack)

    def splits_views(self, site: SublayerPosition) -> bool:
        """Whether this is attention, and values have a read of their own."""
        return self.value_routing == "separate" and site.slot.takes_views

    def blocks(self, stack: LayerStack) -> SourceBlocks:
        """The sublayers whose outputs make up each source."""
        return source_blocks(self.block_size, self.count, stack)

    def completed(self, index: int, stack: LayerStack) -> int:
        """Sources in the state that enters sublayer `index`, without the running delta; nothing reads after the last."""
        if index == stack.n_sublayers:
            return 0
        openings = self.blocks(stack).openings
        if self.entries == "as_released":
            return sum(opening < index for opening in openings)
        first_read = {"first_read": 0, "second_read": 1, "never": stack.n_sublayers}[self.embedding]
        return (index >= first_read) + sum(0 < opening <= index for opening in openings)

    def runs_on(self, index: int, stack: LayerStack) -> bool:
        """Whether sublayer `index` is inside a block whose delta is still growing."""
        inside = index < stack.n_sublayers and index not in self.blocks(stack).openings
        return inside and self.entries == "block_delta"

    def names(self, site: SublayerPosition) -> tuple[str, ...]:
        """The names of the sources of one read, oldest first after a null source."""
        completed, blocks = self.completed(site.index, site.stack), self.blocks(site.stack).names
        # As released, every entry is the stream where a block opens less the entry before it.
        held = tuple(f"entry {n}" for n in range(len(blocks))) if self.entries == "as_released" else blocks
        if self.entries == "block_delta" and self.embedding != "never" and completed:
            held = ("embedding", *held)
        running = self.running_source == "included" and self.runs_on(site.index, site.stack)
        return (*(("null",) if self.null_source == "learned" else ()), *held[: completed + running])

    def controls(self) -> Controls:
        """DenseFormer, which sums earlier outputs with free weights."""
        return Controls({"kind": "denseformer", "granularity": "sublayer" if self.block_size == 1 else "block"})

    @property
    def init_equivalence(self) -> InitEquivalence:
        """Depends on whether the sources add up to the stream."""
        if self.gate == "alpha":
            return InitEquivalence("exact", "the factor of the mixture starts at zero")
        sizes = self.block_size if isinstance(self.block_size, tuple) else (self.block_size,)
        each = self.count == "sublayer" and set(sizes) == {1}
        whole = self.entries == "block_delta" and (each or self.running_source == "included") and self.embedding != "never"
        if whole:
            return InitEquivalence("up_to_norm", "zero queries add the mean of sources that add up to the stream")
        return InitEquivalence("none", "zero queries add the mean of sources that do not add up to the stream")

    def cost(self, site: SublayerPosition, shape: Shape) -> Cost:
        """One read, or two where values have their own, and the write."""
        read = self._read_cost(len(self.names(site)), site.d_model, shape)
        write = Cost(elementwise_flops=shape.total_tokens * site.d_model * (3 + self.runs_on(site.index, site.stack)))
        return read + (read if self.splits_views(site) else Cost()) + write

    def _read_cost(self, n: int, D: int, shape: Shape) -> Cost:
        N, null, gate = shape.total_tokens, self.null_source == "learned", self.gate == "alpha"
        if n == 0:
            return Cost()
        params = null * D + gate
        if n == 1:
            return Cost(params=params, elementwise_flops=N * D * (1 + gate))
        return Cost(params=params + 2 * D, elementwise_flops=N * (n * (4 * D + 5) + D * (1 + gate)))

    def build(self, stack: LayerStack) -> "tuple[list[DeltaAttentionResiduals], DeltaEnds]":
        """Builds a query for each read, or two where values have their own."""
        return [DeltaAttentionResiduals(self, site) for site in stack.sites], DeltaEnds(self, stack)


class StreamAndDeltas(NamedTuple):
    """The depth state: the plain stream, and the updates as sources.

    Attributes:
        stream: the residual stream.
        values: the completed sources.
        inverse_rms: of every source, the running one included where it is read.
        running: the delta of the running block, or empty.
    """

    stream: Stream
    values: tuple[Stream, ...] = ()
    inverse_rms: tuple[Float[Tensor, "B T"], ...] = ()
    running: tuple[Stream, ...] = ()

    @property
    def sources(self) -> Sources:
        """The completed sources, and the running one where it is read."""
        reads_running = len(self.inverse_rms) > len(self.values)
        return Sources((*self.values, *self.running) if reads_running else self.values, self.inverse_rms)

    def with_sources(self, passed: Sources) -> "StreamAndDeltas":
        """Returns the state with these tensors as the sources that were read."""
        n = len(self.values)
        return self._replace(values=passed.values[:n], running=passed.values[n:] or self.running)


class DeltaAttentionResiduals(DepthMixer, config=DeltaAttentionResidualsConfig):
    """See `DeltaAttentionResidualsConfig`."""

    def __init__(self, config: DeltaAttentionResidualsConfig, site: SublayerPosition) -> None:
        super().__init__()
        self.config, self.eps = config, site.norm_eps
        opens, after, names = config.blocks(site.stack).openings, site.index + 1, config.names(site)
        self.is_first, self.is_last = site.index == 0, after == site.stack.n_sublayers
        self.opens_source, self.closes_source = site.index in opens, after in opens
        self.splits_views = config.splits_views(site)
        null, gated = config.null_source == "learned", config.gate == "alpha"
        form = names, site.d_model, site.norm_eps, null, gated, config.impl
        self.route = AddedRead(*form) if names else None
        self.value_route = AddedRead(*form) if names and self.splits_views else None

    def read(self, state: StreamAndDeltas, layout: Layout = None, cache: Any = None) -> tuple[Views, StreamAndDeltas, Any]:
        """Returns the stream plus the mixture; separately for the values where they have a read of their own.

        The carry is the state as the write should take it: its sources passed on by the readers.
        """
        view, passed = (state.stream, state.sources) if self.route is None else self.route(state.stream, state.sources)
        values = view
        if self.value_route is not None:
            values, passed = self.value_route(state.stream, passed)
        return QKV(view, view, values) if self.splits_views else view, state.with_sources(passed), cache

    def write(self, state: StreamAndDeltas, update: Stream, context: Views, carry: StreamAndDeltas) -> StreamAndDeltas:
        """Returns the stream plus the update, and the sources that it completes."""
        state = carry
        # Under autocast the update may be narrower than the stream that it joins.
        update = update.to(state.stream.dtype)
        stream = state.stream + update
        if self.is_last:
            return StreamAndDeltas(stream)
        values, factors = state.values, state.inverse_rms[: len(state.values)]
        running: tuple[Tensor, ...] = ()
        if self.config.entries == "as_released":
            fresh = [state.stream - values[-1] if values else state.stream] if self.opens_source else []
        else:
            delta = state.running[0] + update if state.running else update
            fresh = [state.stream] if self.is_first and self.config.embedding == "second_read" else []
            if self.closes_source:
                fresh.append(delta)
            else:
                running = (delta,)
        read = [*fresh, *(running if self.config.running_source == "included" else ())]
        passed = [passing_factor(v, self.eps, self.config.impl) for v in read]
        factors, read = (*factors, *(factor for factor, _ in passed)), [v for _, v in passed]
        n = len(fresh)
        return StreamAndDeltas(stream, (*values, *read[:n]), factors, tuple(read[n:]) or running)

    def explain(self, done: Read | Write) -> Explanation:
        """Returns the mixture that is added to the stream, and that of the values where they have their own."""
        if isinstance(done, Write) or self.route is None:
            return Explanation()
        stream, sources = done.state.stream, done.state.sources
        if self.value_route is None:
            return Explanation((self.route.sum(stream, sources, done.views, "read"),))
        view, _, values = done.views
        shared = self.route.sum(stream, sources, view, "q and k")
        return Explanation((shared, self.value_route.sum(stream, sources, values, "v")))


class DeltaEnds(DepthEnds):
    """The stream starts as the embedding, which may be a source at once, and is left as it is."""

    def __init__(self, config: DeltaAttentionResidualsConfig, stack: LayerStack) -> None:
        super().__init__()
        self.config, self.eps = config, stack.norm_eps

    def enter(self, embeddings: Stream, layout: Layout = None, cache: Any = None) -> tuple[StreamAndDeltas, Any]:
        """Returns the embeddings as the stream."""
        if self.config.embedding != "first_read":
            return StreamAndDeltas(embeddings), cache
        factor, source = passing_factor(embeddings, self.eps, self.config.impl)
        return StreamAndDeltas(embeddings, (source,), (factor,)), cache

    def leave(self, state: StreamAndDeltas, layout: Layout = None, cache: Any = None) -> tuple[Stream, Any]:
        """Returns the stream."""
        return state.stream, cache
