"""Attention Residuals: each sublayer reads a softmax mixture of all earlier outputs instead of their sum.

Letters: B batch, T position, D width, H heads, R key rank, S depth sources.
"""

import math
from dataclasses import replace
from typing import Any, Literal, Self

import torch.nn.functional as F
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.design import InitEquivalence, MixingDesign
from twoaxis.core.errors import ConfigError, problem
from twoaxis.core.parameters import Normal, matrix_std
from twoaxis.core.position import LayerStack, SublayerPosition
from twoaxis.core.views import QKV, Views
from twoaxis.depth.base import Controls, DepthConfig, DepthEnds, DepthMixer, Explanation, Layout, Read, Stream, Write
from twoaxis.depth.depth_query import DepthQuery, ReadForm, Sources
from twoaxis.depth.history import BlockSize, Count, SourceBlocks, check_blocks, source_blocks
from twoaxis.ops.depth_read import passing_factor
from twoaxis.ops.precision import Impl
from twoaxis.ops.two_phase import late_read, passing_early_reads


class AttentionResidualsConfig(DepthConfig):
    """Replaces the residual sum by a softmax over the embedding and the outputs (or block sums) of earlier sublayers.

    Equation: h_g = concat_h(sum_i a_ih v_i[head h]),  a = softmax_i(s),  s_ih = sum_{c in head h} q_c n_ic + log(c_i)?,
              n_i = gain_g * RMSNorm(v_i),  q = w_g (+ W_g RMSNorm(v_newest) with query="token"),  v_0 = embeddings,
              block sums b_n = sum of f over block n; sources of sublayer g: completed blocks, then the running one;
              with a key_rank n_i = RMSNorm(mean of the R numbers that each sublayer of block i emits)
              inkling2: h_g = sum_i a_i n_i,  a = softmax_i(w_g^T n_i / sqrt(D)),  n_i = v_i / rms(v_i): normalised values, no
              gain; three such reads with a query each, for q, k and v, where attention sees all earlier tokens
    Source:   Attention Residuals, arXiv:2603.15031, eq. 2-4 and the listing of the block form; checked against fla-org/
              flash-linear-attention fla/ops/attnres/naive.py. Heads: Multi-Head Attention Residuals, arXiv:2607.27230.
              Key ranks: LR-AttnRes, arXiv:2607.09694. inkling2: transformers 5.24 models/inkling2,
              Inkling2BlockAttentionResidual
    Deviates: the first sublayer has one source, so its query and gain would be dead: they do not exist here. The report writes
              RMSNorm for the keys; its gain, one per read, is that of the public code (fla, Kimi K3, Megatron). Its listing
              tests for a new block inside a layer and disagrees with its own comment: here every block_size-th sublayer opens
              one, as in fla. The report says of its input-dependent query only that it is projected from the hidden state: here
              from the newest key. mixture="sum" is ours. Which parameters the authors decay is not published: here neither
              queries nor gains. inkling2: where layer 0 has global attention, the authors have three norms there, we one;
              their sources are in float32, ours in the dtype of the model; their embedding has an RMSNorm, which is an
              option of the model here (embedding_norm="rms")
    Shapes:   state ((S times [B T D]), (S times [B T]), with a key_rank S times [B T R], and within a block of the two-phase
              schedule its early reads); update [B T D+R] -> state; scores and softmax in float32
    Init:     UP_TO_NORM: zero queries make every read the mean of the sources, which the next norm rescales to the sum;
              EXACT with mixture="sum"; NONE with source_prior="log_count" on uneven or longer blocks, a weighted mean, and for
              inkling2: a mean of normalised sources is not along their sum
    Cost:     params 2*D per read (sublayers 1..G-1 and the final one), D for inkling2, with a key_rank R, R*D once and R rows
              of each sublayer's output matrix; query="token" D*D (R*R) more; flops 4*D per source and token, 2*D per source,
              D per sum, thrice if q, k and v are read apart; state S*(D+1) per token, S = 1 + ceil(g / block_size), R per key
    Published: validation loss 1.737 (full) and 1.746 (blocks of 4) against 1.766 at 436M, arXiv:2603.15031, table 4

    Args:
        form: `report`, or `inkling2` for the reads of Inkling-2, whose blocks are 6 layers (block_size=6, count="layer").
        block_size: sublayers summed into one source; 1 keeps every output (full Attention Residuals); a tuple gives the
            size of each block.
        count: whether block_size counts sublayers, or layers (the transformer blocks) as Kimi K3 does.
        n_heads: heads H, each with its own softmax over its slice of the channels.
        query: one `static` query for all tokens, or one for each `token`.
        key_rank: R, numbers that each sublayer emits as its key in addition to its output; None takes the output as its key.
        key_scale: `none`, or `head`: the softmax temperature of attention, which divides scores by sqrt(D / H), or sqrt(R / H).
        mixture: the weighted `mean` of the sources, or their `sum`: the mean times their number, which with zero queries is
            the plain stream whatever the eps of the next norm.
        source_prior: with a key_rank, `none`, or `log_count`: adds the log of the number of outputs in a source to its score.
        schedule: `per_read` reads all sources at each sublayer; `two_phase` reads the completed ones once for all sublayers
            of a transformer block and merges later ones: the same result.
        impl: `fused` or `reference`.

    Raises:
        ConfigError: sizes that do not add up, heads that do not divide, options of a key_rank without one, the two-phase
            schedule with a query or a key that depends on later outputs, or options that `inkling2` does not have.

    Example:
        >>> AttentionResidualsConfig(block_size=4).sources(6, LayerStack(8, 1e-6, block_lengths=(2, 2, 2, 2)))
        3
    """

    kind: Literal["attention_residuals"] = "attention_residuals"
    form: Literal["report", "inkling2"] = "report"
    block_size: BlockSize = 1
    count: Count = "sublayer"
    n_heads: int = Field(default=1, ge=1)
    query: Literal["static", "token"] = "static"
    key_rank: int | None = Field(default=None, ge=1)
    key_scale: Literal["none", "head"] = "none"
    mixture: Literal["mean", "sum"] = "mean"
    source_prior: Literal["none", "log_count"] = "none"
    schedule: Literal["per_read", "two_phase"] = "per_read"
    impl: Impl = "fused"

    @property
    def design(self) -> MixingDesign:
        """A softmax whose query is a parameter, optionally plus a map of the newest key."""
        inkling2, tokenwise = self.form == "inkling2", self.query == "token"
        value = "f_j, e" if self.block_size == 1 else "sums of f_j over source blocks, e"
        key = f"own {self.key_rank} numbers of f_j" if self.key_rank else "RMSNorm(value), own gain"
        return MixingDesign(
            query="w_g + W_g n_newest" if tokenwise else "parameter w_g",
            key="the value" if inkling2 else key,
            value=f"RMSNorm of {value}" if inkling2 else value,
            normaliser="softmax" if self.mixture == "mean" else "softmax times sources",
            window="all",
            sharing="sublayer",
            injection="replaces the stream" + (", q k v apart" if inkling2 else ""),
            weights="input and reader" if tokenwise else "input",
        )

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        if self.key_rank is None and self.source_prior != "none":
            raise ConfigError(problem("source_prior", self.source_prior, "'none' without a key_rank", "set key_rank"))
        if self.key_rank is not None and self.key_rank % self.n_heads:
            raise ConfigError(problem("key_rank", self.key_rank, f"a multiple of n_heads={self.n_heads}", "change one of them"))
        if self.schedule == "two_phase":
            self.refuse_options(("query", "key_rank"), " with schedule='two_phase'", "use schedule='per_read'")
        if self.form == "inkling2":
            if self.count != "layer":
                raise ConfigError(problem("count", self.count, "'layer' with form='inkling2'", "set count='layer'"))
            of_report = ("n_heads", "query", "key_rank", "key_scale", "mixture", "schedule")
            self.refuse_options(of_report, " with form='inkling2'", "remove it or use form='report'")
        return self

    def prepare(self, stack: LayerStack) -> LayerStack:
        """Refuses blocks and heads that do not fit, and adds the key to what each sublayer emits."""
        check_blocks(self.block_size, self.count, stack)
        if stack.d_model % self.n_heads:
            raise ConfigError(problem("n_heads", self.n_heads, f"a divisor of d_model={stack.d_model}", "change one of them"))
        if self.key_rank is None:
            return stack
        return stack.with_slots(lambda site: replace(site.slot, update_extra=self.key_rank or 0))

    def blocks(self, stack: LayerStack) -> SourceBlocks:
        """The sublayers whose outputs are summed into each source."""
        return source_blocks(self.block_size, self.count, stack)

    def sources(self, index: int, stack: LayerStack) -> int:
        """Sources that sublayer `index` reads."""
        return len(self.blocks(stack).counts(index))

    def splits_views(self, site: SublayerPosition) -> bool:
        """Whether this is global attention of `inkling2` after the first sublayer, which reads nothing."""
        return self.form == "inkling2" and site.index > 0 and site.slot.takes_views and site.slot.window is None

    def read_form(self, index: int, stack: LayerStack) -> ReadForm:
        """How the read before sublayer `index` scores and mixes."""
        blocks, W, inkling2 = self.blocks(stack), self.key_rank or stack.d_model, self.form == "inkling2"
        counts = blocks.counts(index)
        names = ("embedding", *blocks.names)[: len(counts)]
        return ReadForm(
            names=names,
            key_width=W,
            n_heads=self.n_heads,
            impl=self.impl,
            query=self.query,
            keys="plain" if inkling2 else "gained" if self.key_rank is None else "emitted",
            values="normalised" if inkling2 else "raw",
            score_scale=math.sqrt(self.n_heads / W) if inkling2 or self.key_scale == "head" else 1.0,
            read_scale=len(names) if self.mixture == "sum" else 1,
            prior=tuple(map(math.log, counts)) if self.source_prior == "log_count" else None,
        )

    def controls(self) -> Controls:
        """DenseFormer, which sums earlier outputs with free weights, and of several heads the other temperature."""
        scale = {**self.to_data(), "key_scale": "none" if self.key_scale == "head" else "head"}
        static = {"kind": "denseformer", "granularity": "sublayer" if self.block_size == 1 else "block"}
        return Controls(static, temperature=scale if self.n_heads > 1 else None)

    @property
    def init_equivalence(self) -> InitEquivalence:
        """Up to a scale, which the next norm removes."""
        if self.form == "inkling2":
            return InitEquivalence("none", "zero queries read the mean of normalised sources, which is not along their sum")
        if self.source_prior == "log_count" and self.block_size != 1:
            return InitEquivalence("none", "zero queries weigh every source by its number of outputs, not by one")
        if self.mixture == "sum":
            return InitEquivalence("exact", "zero queries read the sum of the sources, which is the plain stream")
        mean = "zero queries read the mean of the sources, the plain stream divided by their number"
        return InitEquivalence("up_to_norm", mean)

    def cost(self, site: SublayerPosition, shape: Shape) -> Cost:
        """One read over the sources, and the running sum with its rms."""
        D, N, R, form = site.d_model, shape.total_tokens, self.key_rank or 0, self.read_form(site.index, site.stack)
        blocks = self.blocks(site.stack)
        runs_on = site.index not in blocks.openings
        write = Cost(elementwise_flops=N * (2 * form.key_width + runs_on * (D + 3 * R)))
        if self.schedule == "two_phase":
            queries = (site.index > 0) + site.stack.block_lengths[site.block] - 1 if site.opens_block else 0
            return form.two_phase_cost(D, N, blocks.completed(site), queries) + write
        read = form.cost(D, N)
        return (read + read + read if self.splits_views(site) else read) + write

    def ends_cost(self, stack: LayerStack, shape: Shape) -> Cost:
        """The final read, and the key and the rms of the embeddings."""
        N, D, form = shape.total_tokens, stack.d_model, self.read_form(stack.n_sublayers, stack)
        weights = D * (self.key_rank or 0)
        enter = Cost(params=weights, matmul_flops=2 * N * weights, elementwise_flops=2 * N * form.key_width)
        return form.cost(D, N) + enter

    def build(self, stack: LayerStack) -> "tuple[list[AttentionResiduals], AttentionResidualsEnds]":
        """Builds a query for each read; in two phases, the first sublayer of a block reads for all of them."""
        mixers = [AttentionResiduals(self, site) for site in stack.sites]
        for site, mixer in zip(stack.sites, mixers, strict=True):
            if self.schedule == "two_phase" and site.opens_block:
                block = mixers[site.index + 1 : site.index + stack.block_lengths[site.block]]
                mixer.later = tuple(one.query for one in block if one.query is not None)
        return mixers, AttentionResidualsEnds(self, stack)


class AttentionResiduals(DepthMixer, config=AttentionResidualsConfig):
    """See `AttentionResidualsConfig`."""

    def __init__(self, config: AttentionResidualsConfig, site: SublayerPosition) -> None:
        super().__init__()
        self.config, self.eps, blocks = config, site.norm_eps, config.blocks(site.stack)
        self.opens_block, self.opens_source = site.opens_block, site.index in blocks.openings
        # Sources that phase 1 reads, and outputs in the newest source after this write.
        self.completed, self.count = blocks.completed(site), blocks.counts(site.index + 1)[-1]
        form, splits_views = config.read_form(site.index, site.stack), config.splits_views(site)
        self.query = DepthQuery(form) if site.index > 0 else None
        self.key_query, self.value_query = (DepthQuery(form) if splits_views else None for _ in range(2))
        # In a tuple, so that only their own mixers register them.
        self.later: tuple[DepthQuery, ...] = ()

    @classmethod
    def build_alone(cls, config: Any, site: SublayerPosition) -> DepthMixer:
        """Builds the mixer of one sublayer, which reads all sources itself."""
        return super().build_alone(config.replace(schedule="per_read"), site)

    def read(self, state: Sources, layout: Layout = None, cache: Any = None) -> tuple[Views, Sources, Any]:
        """Returns the mixture of all sources, or one for q, k and v each, and as the carry the state that readers pass on."""
        if self.config.schedule == "two_phase":
            return *self._read_in_phases(state), cache
        if self.query is None:
            return state.values[0], state, cache
        view, passed = self.query(state)
        if self.key_query is None or self.value_query is None:
            return view, passed, cache
        key, passed = self.key_query(passed)
        value, passed = self.value_query(passed)
        return QKV(view, key, value), passed, cache

    def _read_in_phases(self, state: Sources) -> tuple[Stream, Sources]:
        """Returns the mixture, and the state with the early reads of the later sublayers of the block."""
        config, n, early = self.config, self.completed, state.early
        if readers := [one for one in (self.query, *self.later) if one is not None and self.opens_block]:
            queries, completed = [one.query(state) for one in readers], state.values[:n]
            early, passed = passing_early_reads(completed, state.inverse_rms[:n], queries, config.n_heads, config.impl)
            state = state._replace(values=(*passed, *state.values[n:]), early=early)
        if self.query is None:
            return state.values[0], state
        mixed, late = early[0].mixture, state.values[n:]
        if late:
            mixed = late_read(early[0], late, state.inverse_rms[n:], self.query.query(state), config.impl)
        return self.query.scaled(mixed.to(state.values[0].dtype)), state._replace(early=early[1:])

    def write(self, state: Sources, update: Float[Tensor, "B T W"], context: Views, carry: Sources) -> Sources:
        """Returns the sources with the update as a new one, or added to the running block sum, and the early reads."""
        return carry.with_output(update, self.opens_source, self.count, self.eps, self.config.impl)

    def explain(self, done: Read | Write) -> Explanation:
        """Returns the mixtures of the sources; nothing at the first sublayer."""
        if isinstance(done, Write) or self.query is None:
            return Explanation()
        views, names = (done.views, ("q", "k", "v")) if isinstance(done.views, QKV) else ((done.views,), ("read",))
        each = zip((self.query, self.key_query, self.value_query), views, names, strict=False)
        return Explanation(tuple(query.sum(done.state, view, name) for query, view, name in each if query is not None))


class AttentionResidualsEnds(DepthEnds):
    """The embedding is a source of its own, and the last read has a query of its own."""

    def __init__(self, config: AttentionResidualsConfig, stack: LayerStack) -> None:
        super().__init__()
        self.config, self.eps = config, stack.norm_eps
        self.query = DepthQuery(config.read_form(stack.n_sublayers, stack))
        self.key_map = None
        if config.key_rank is not None:
            D = stack.d_model
            self.key_map = self.parameter("key_map", (config.key_rank, D), Normal(matrix_std(D)), "matrix", grows="inputs")

    def enter(self, embeddings: Stream, layout: Layout = None, cache: Any = None) -> tuple[Sources, Any]:
        """Returns the embedding as the only source."""
        key = embeddings if self.key_map is None else F.linear(embeddings, self.key_map).to(embeddings.dtype)
        factor, key = passing_factor(key, self.eps, self.config.impl)
        return Sources((key,), (factor,)) if self.key_map is None else Sources((embeddings,), (factor,), (key,)), cache

    def leave(self, state: Sources, layout: Layout = None, cache: Any = None) -> tuple[Stream, Any]:
        """Returns the final mixture."""
        return self.query(state)[0], cache

    def explain(self, done: Read) -> Explanation:
        """Returns the final mixture."""
        return Explanation((self.query.sum(done.state, done.views),))
