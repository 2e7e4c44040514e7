"""Attention Residuals: each sublayer reads a softmax mixture of all earlier outputs instead of their sum.

Letters: B batch, T position, D width, H heads, R key rank, S depth sources.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Self

import torch.nn.functional as F
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.equivalence import InitEquivalence
from twoaxis.core.errors import ConfigError, problem
from twoaxis.core.mixing_design import MixingDesign
from twoaxis.core.parameters import Normal, matrix_std
from twoaxis.core.site import Site, Slot, Stack
from twoaxis.core.source_blocks import BlockSize, Count, block_names, check_blocks, openings
from twoaxis.core.views import QKV, Views
from twoaxis.core.weighted_sum import WeightedSum
from twoaxis.depth.base import DepthConfig, DepthEnds, DepthMixer
from twoaxis.depth.depth_query import DepthQuery, ReadForm, Sources
from twoaxis.ops.depth_read import source_factor
from twoaxis.ops.precision import Impl
from twoaxis.ops.two_phase import EarlyRead, early_reads, late_read


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
              from the newest key. mixture="sum" is ours. What the authors decay is not known to us: here neither queries nor
              gains. inkling2: where layer 0 has global attention, the authors put three norms behind its one input, we one;
              their sources are in float32, ours in the dtype of the model; their embedding is behind an RMSNorm, which is an
              option of the model here (embedding_norm="rms")
    Shapes:   state ((S times [B T D]), (S times [B T]), with a key_rank S times [B T R], and within a block of the two-phase
              schedule its early reads); update [B T D+R] -> state; scores and softmax in float32
    Init:     UP_TO_NORM: zero queries make every read the mean of the sources, which the next norm rescales to the sum;
              EXACT with mixture="sum"; NONE with source_prior="log_count" on uneven or longer blocks, which is a weighted mean,
              and NONE for inkling2: a mean of normalised sources is not along their sum
    Cost:     params 2*D per read (sublayers 1..G-1 and the final one), D for inkling2, R with a key_rank and R*D once; with
              query="token" D*D (R*R) more; flops 4*D per source and token, 2*D once per source, D per sum, thrice where q, k
              and v are read apart; state S*(D+1) numbers per token with S = 1 + ceil(g / block_size), R more per source with a
              key_rank; moves (S + 2)*D, 2*D more inside a source block, of numbers per token and sublayer
    Published: validation loss 1.737 (full) and 1.746 (blocks of 4) against 1.766 at 436M, arXiv:2603.15031, table 4

    Args:
        form: `report`, or `inkling2` for the reads of Inkling-2, whose blocks are 6 layers (block_size=6, count="layer").
        block_size: sublayers summed into one source; 1 keeps every output (full Attention Residuals); a tuple gives the
            size of each block.
        count: whether block_size counts sublayers, or layers (the transformer blocks) as Kimi K3 does.
        n_heads: heads H, each with its own softmax over its slice of the channels.
        query: one `static` query for all tokens, or one for each `token`.
        key_rank: R, numbers that each sublayer emits as its key beside its output; None takes the output as its key.
        key_scale: with a key_rank, `none`, or `head`: scores are divided by sqrt(R / H).
        mixture: the weighted `mean` of the sources, or their `sum`: the mean times their number, which with zero queries is
            the plain stream whatever the eps of the next norm.
        source_prior: with a key_rank, `none`, or `log_count`: adds the log of the number of outputs in a source to its score.
        schedule: `per_read` reads all sources at each sublayer; `two_phase` reads the completed ones once for all sublayers
            of a transformer block and merges later ones: the same result.
        impl: `fused` or `reference`.

    Raises:
        ConfigError: sizes that do not add up, heads that do not divide, options of a key_rank without one, the two-phase
            schedule with a query or a key that it cannot know ahead, or options that `inkling2` does not have.

    Example:
        >>> AttentionResidualsConfig(block_size=4).sources(6, Stack(8, 1e-6, block_lengths=(2, 2, 2, 2)))
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
        """A softmax whose query is a parameter, or asks for each token."""
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
        for name in ("key_scale", "source_prior"):
            if self.key_rank is None and getattr(self, name) != "none":
                raise ConfigError(problem(name, getattr(self, name), "'none' without a key_rank", "set key_rank"))
        if self.key_rank is not None and self.key_rank % self.n_heads:
            allowed = f"a multiple of n_heads={self.n_heads}"
            raise ConfigError(problem("key_rank", self.key_rank, allowed, "change one of them"))
        if self.schedule == "two_phase" and (self.query == "token" or self.key_rank is not None):
            name = "query" if self.query == "token" else "key_rank"
            remedy = "use schedule='per_read'"
            raise ConfigError(problem(name, getattr(self, name), "the default with schedule='two_phase'", remedy))
        return self

    @model_validator(mode="after")
    def _inkling2_is_whole(self) -> Self:
        if self.form == "report":
            return self
        if self.count != "layer":
            allowed = "'layer' with form='inkling2', which counts its blocks in layers"
            raise ConfigError(problem("count", self.count, allowed, "set count='layer'"))
        for name in ("n_heads", "query", "key_rank", "mixture", "schedule"):
            if getattr(self, name) != type(self).model_fields[name].default:
                allowed = "left out with form='inkling2'"
                raise ConfigError(problem(name, getattr(self, name), allowed, "remove it or use form='report'"))
        return self

    def prepare(self, stack: Stack) -> Stack:
        """Refuses blocks and heads that do not fit, and asks each sublayer for its key."""
        check_blocks(self.block_size, self.count, stack)
        if stack.d_model % self.n_heads:
            raise ConfigError(problem("n_heads", self.n_heads, f"a divisor of d_model={stack.d_model}", "change one of them"))
        if self.key_rank is None:
            return stack
        slots = stack.slots or (Slot(),) * stack.n_sublayers
        return replace(stack, slots=tuple(replace(slot, update_extra=self.key_rank) for slot in slots))

    def opens(self, stack: Stack) -> tuple[int, ...]:
        """The sublayers whose output opens a source."""
        return openings(self.block_size, self.count, stack)

    def sources(self, index: int, stack: Stack) -> int:
        """Sources that sublayer `index` reads: the embedding, completed blocks, and the running block if any."""
        return 1 + sum(opening < index for opening in self.opens(stack))

    def counts(self, index: int, stack: Stack) -> tuple[int, ...]:
        """Outputs in each source that sublayer `index` reads."""
        return (1, *(end - start for start, end in self._spans(index, stack)))

    def _spans(self, index: int, stack: Stack) -> list[tuple[int, int]]:
        """The first sublayer of each source but the embedding that sublayer `index` reads, and the one behind its last."""
        starts = [opening for opening in self.opens(stack) if opening < index]
        return list(zip(starts, [*starts, index][1:], strict=True))

    def names(self, index: int, stack: Stack) -> tuple[str, ...]:
        """What each source that sublayer `index` reads is called."""
        return ("embedding", *block_names(self.opens(stack), stack))[: self.sources(index, stack)]

    def splits_views(self, site: Site) -> bool:
        """Before the global attention of `inkling2`, but for the first sublayer, which reads nothing."""
        return self.form == "inkling2" and site.index > 0 and site.slot.takes_views and site.slot.window is None

    def read_form(self, index: int, stack: Stack) -> ReadForm:
        """How the read before sublayer `index` scores and mixes."""
        names, W = self.names(index, stack), self.key_width(stack.d_model)
        keys = "plain" if self.form == "inkling2" else "gained" if self.key_rank is None else "emitted"
        scaled = self.form == "inkling2" or self.key_scale == "head"
        prior = self.source_prior == "log_count"
        return ReadForm(
            names=names,
            key_width=W,
            n_heads=self.n_heads,
            impl=self.impl,
            query=self.query,
            keys=keys,
            values="normalised" if self.form == "inkling2" else "raw",
            score_scale=math.sqrt(self.n_heads / W) if scaled else 1.0,
            read_scale=len(names) if self.mixture == "sum" else 1,
            prior=tuple(math.log(n) for n in self.counts(index, stack)) if prior else None,
        )

    def key_width(self, d_model: int) -> int:
        """Numbers in one key."""
        return self.key_rank or d_model

    def static_form(self) -> Mapping[str, Any] | None:
        """DenseFormer, which sums earlier outputs with free weights."""
        return {"kind": "denseformer", "granularity": "sublayer" if self.block_size == 1 else "block"}

    @property
    def init_equivalence(self) -> InitEquivalence:
        """Up to the scale that a norm removes."""
        if self.form == "inkling2":
            return InitEquivalence("none", "zero queries read the mean of normalised sources, which is not along their sum")
        if self.source_prior == "log_count" and self.block_size != 1:
            return InitEquivalence("none", "zero queries weigh every source by its number of outputs, not by one")
        if self.mixture == "sum":
            return InitEquivalence("exact", "zero queries read the sum of the sources, which is the plain stream")
        return InitEquivalence(
            "up_to_norm", "zero queries read the mean of the sources, the plain stream divided by their number"
        )

    def waiting(self, site: Site) -> range:
        """The sublayers whose early reads are in the state that enters this one: itself and the later ones of its block."""
        opens_or_reads_itself = site.opens_block or self.schedule == "per_read"
        end = site.index - site.place + site.stack.block_lengths[site.block]
        return range(end, end) if opens_or_reads_itself else range(site.index, end)

    def cost(self, site: Site, shape: Shape) -> Cost:
        """One read over the sources, and the running sum with its rms."""
        runs_on = site.index not in self.opens(site.stack)
        numbers = 2 * self.key_width(site.d_model) + runs_on * (site.d_model + 3 * (self.key_rank or 0))
        write = Cost(elementwise_flops=shape.total_tokens * numbers)
        if self.schedule == "two_phase":
            return self._two_phase_cost(site, shape) + write
        read = self._read_cost(site.index, site.stack, shape)
        return (read + read + read if self.splits_views(site) else read) + write

    def ends_cost(self, stack: Stack, shape: Shape) -> Cost:
        """The final read, and the key and the rms of the embeddings."""
        N, width = shape.total_tokens, self.key_width(stack.d_model)
        weights = stack.d_model * (self.key_rank or 0)
        enter = Cost(params=weights, matmul_flops=2 * N * weights, elementwise_flops=2 * N * width)
        return self._read_cost(stack.n_sublayers, stack, shape) + enter

    def _read_cost(self, index: int, stack: Stack, shape: Shape) -> Cost:
        n, N, D = self.sources(index, stack), shape.total_tokens, stack.d_model
        H, W = self.n_heads, self.key_width(D)
        if n == 1:
            return Cost()
        per_token = self.query == "token"
        by_product = H == 1 and not per_token and self.key_rank is None
        matrix = W * W if per_token else 0
        # The factors of normalised values are one more product per weight.
        per_source = 2 * D + 2 * W * (not by_product) + (5 if self.form == "report" else 6) * H
        return Cost(
            params=self._query_params(D),
            matmul_flops=2 * N * (matrix + n * D * by_product),
            elementwise_flops=N * (n * per_source + W * per_token + D * (self.mixture == "sum")),
        )

    def _query_params(self, d_model: int) -> int:
        W = self.key_width(d_model)
        gain = self.key_rank is None and self.form == "report"
        return W + d_model * gain + (W * W if self.query == "token" else 0)

    def _two_phase_cost(self, site: Site, shape: Shape) -> Cost:
        """Phase 1 where a block opens, for all its sublayers, and the merging of what came later."""
        N, D, H = shape.total_tokens, site.d_model, self.n_heads
        early = completed(self, site)
        late = self.sources(site.index, site.stack) - early
        asks = site.index > 0
        flops = matmul = 0
        if site.opens_block:
            Q = asks + site.stack.block_lengths[site.block] - 1
            flops, matmul = N * early * Q * (2 * D + 5 * H), 2 * N * early * Q * D if H == 1 else 0
            flops += N * early * Q * 2 * D * (H > 1)
        if asks and late:
            flops += N * (late * (4 * D + 5 * H) + 2 * D)
        flops += N * D * (asks and self.mixture == "sum")
        return Cost(
            params=asks * self._query_params(D),
            matmul_flops=matmul,
            elementwise_flops=flops,
        )

    def build(self, site: Site) -> "AttentionResiduals":
        """Builds the mixer of one sublayer, which reads all sources itself."""
        return AttentionResiduals(self, site)

    def build_block(self, sites: Sequence[Site], ends: DepthEnds) -> list[DepthMixer]:
        """Builds the mixers of one block; in two phases, the first one asks for all of them."""
        if self.schedule == "per_read":
            return [self.build(site) for site in sites]
        mixers = [TwoPhaseResiduals(self, site) for site in sites]
        mixers[0].later = tuple(mixer.query for mixer in mixers[1:] if mixer.query is not None)
        return list(mixers)

    def build_ends(self, stack: Stack) -> "AttentionResidualsEnds":
        """Builds the ends."""
        return AttentionResidualsEnds(self, stack)


def completed(config: AttentionResidualsConfig, site: Site) -> int:
    """Sources that no sublayer of this block changes any more when the block opens."""
    opening = site.index - site.place
    runs_on = opening > 0 and opening not in config.opens(site.stack)
    return config.sources(opening, site.stack) - runs_on


class AttentionResiduals(DepthMixer, config=AttentionResidualsConfig):
    """See `AttentionResidualsConfig`."""

    def __init__(self, config: AttentionResidualsConfig, site: Site) -> None:
        super().__init__()
        self.config, self.eps = config, site.norm_eps
        self.width = site.d_model
        self.opens_source = site.index in config.opens(site.stack)
        # Outputs in the newest source after this write.
        self.count = config.counts(site.index + 1, site.stack)[-1]
        form = config.read_form(site.index, site.stack)
        self.query = DepthQuery(form) if site.index > 0 else None
        splits_views = config.splits_views(site)
        self.key_query, self.value_query = (DepthQuery(form) if splits_views else None for _ in range(2))

    def read(self, state: Sources) -> tuple[Views, Any]:
        """Returns the mixture of all sources, or one for q, k and v each; the only source itself at the first sublayer."""
        if self.query is None:
            return state.values[0], None
        if self.key_query is None or self.value_query is None:
            return self.query(state), None
        return QKV(self.query(state), self.key_query(state), self.value_query(state)), None

    def read_sums(self, state: Sources, views: Views, carry: Any) -> tuple[WeightedSum, ...]:
        """The mixtures of the sources; none at the first sublayer."""
        if self.query is None:
            return ()
        if not isinstance(views, QKV):
            return (self.query.sum(state, views),)
        queries = (self.query, self.key_query, self.value_query)
        each = zip(queries, views, ("q", "k", "v"), strict=True)
        return tuple(query.sum(state, view, name) for query, view, name in each if query is not None)

    def write(self, state: Sources, update: Float[Tensor, "B T W"], context: Views, carry: Any) -> Sources:
        """Returns the sources with the update as a new one, or added to the running block sum."""
        values, factors, keys, _ = state
        # Under autocast the update may be narrower than the stream that it joins.
        update = update.to(values[0].dtype)
        extra = update[..., self.width :]
        if keys:
            update = update[..., : self.width].contiguous()
        if not self.opens_source:
            update = values[-1] + update
            values, factors = values[:-1], factors[:-1]
            if keys:
                extra = keys[-1] + (extra - keys[-1]) / self.count
                keys = keys[:-1]
        if not keys:
            return Sources((*values, update), (*factors, source_factor(update, self.eps, self.config.impl)))
        key = extra.contiguous()
        factor = source_factor(key, self.eps, self.config.impl)
        return Sources((*values, update), (*factors, factor), (*keys, key))


class TwoPhaseResiduals(AttentionResiduals):
    """Reads the completed sources for its whole block when it opens one, and else merges into what was read for it."""

    def __init__(self, config: AttentionResidualsConfig, site: Site) -> None:
        super().__init__(config, site)
        self.completed = completed(config, site)
        self.opens_block = site.opens_block
        # In a tuple, so that only their own mixers register them.
        self.later: tuple[DepthQuery, ...] = ()

    def read(self, state: Sources) -> tuple[Float[Tensor, "B T D"], tuple[EarlyRead, ...]]:
        """Returns the mixture, and the early reads of the later sublayers of the block."""
        config, (values, factors, _, early) = self.config, state
        if self.opens_block:
            asking = (*(() if self.query is None else (self.query,)), *self.later)
            queries = [module.query(state) for module in asking]
            ready = values[: self.completed], factors[: self.completed]
            early = early_reads(*ready, queries, config.n_heads, config.impl) if queries else early
        if self.query is None:
            return values[0], early
        own, rest = early[0], tuple(early[1:])
        late = values[self.completed :]
        mixed = own.mixture
        if late:
            mixed = late_read(own, late, factors[self.completed :], self.query.query(state), config.impl)
        return self.query.scaled(mixed.to(values[0].dtype)), rest

    def write(self, state: Sources, update: Float[Tensor, "B T D"], context: Views, carry: tuple[EarlyRead, ...]) -> Sources:
        """Returns the sources as usual, and the early reads that still wait."""
        return super().write(state, update, context, None)._replace(early=carry)


class AttentionResidualsEnds(DepthEnds):
    """The embedding is a source of its own, and the last read has a query of its own."""

    def __init__(self, config: AttentionResidualsConfig, stack: Stack) -> None:
        super().__init__()
        self.config, self.eps = config, stack.norm_eps
        self.query = DepthQuery(config.read_form(stack.n_sublayers, stack))
        self.key_map = None
        if config.key_rank is not None:
            start = Normal(matrix_std(stack.d_model))
            self.key_map = self.parameter("key_map", (config.key_rank, stack.d_model), start, "matrix")

    def enter(self, embeddings: Float[Tensor, "B T D"]) -> Sources:
        """Returns the embedding as the only source."""
        if self.key_map is None:
            return Sources((embeddings,), (source_factor(embeddings, self.eps, self.config.impl),))
        key = F.linear(embeddings, self.key_map).to(embeddings.dtype)
        return Sources((embeddings,), (source_factor(key, self.eps, self.config.impl),), (key,))

    def leave(self, state: Sources) -> Float[Tensor, "B T D"]:
        """Returns the final mixture."""
        return self.query(state)

    def leave_sums(self, state: Sources, left: Float[Tensor, "B T D"]) -> tuple[WeightedSum, ...]:
        """The final mixture."""
        return (self.query.sum(state, left),)
