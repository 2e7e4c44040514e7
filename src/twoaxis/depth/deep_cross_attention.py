"""DeepCrossAttention: queries, keys and values each read a sum of the deltas of all earlier blocks, with learned weights.

Letters: B batch, T position, D width, S columns (sources) of one read, C ways (1, or 3 for q, k and v), L blocks.
"""

from collections.abc import Sequence
from typing import Any, Literal, Self

from pydantic import Field, model_validator
from torch import Tensor

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.design import InitEquivalence, MixingDesign
from twoaxis.core.errors import ConfigError, problem
from twoaxis.core.parameters import Constant, DeclaredModule, Normal
from twoaxis.core.position import LayerStack, SublayerPosition
from twoaxis.core.views import QKV, Views, WeightedSum, per_token, span_name, unit_name
from twoaxis.depth.base import Controls, DepthConfig, DepthMixer, Explanation, Layout, Read, Stream, Write
from twoaxis.depth.history import History, HistoryEnds
from twoaxis.ops.grn import Activation, grn, grn_scores
from twoaxis.ops.mix import mix
from twoaxis.ops.precision import Impl

DEAD_AT_ZERO = "relu has slope 0 at 0, where all scores start and therefore stay; use another activation or score_std > 0"


class DeepCrossAttentionConfig(DepthConfig):
    """Feeds each block sums of the deltas of all earlier blocks, weighted per feature and per token; no stream is carried.

    Equation: g = sum_j (b_j + s_j) * D_j,  s_j = sigma(w^T D_j) one number per token, over the columns D_j; D_0 = embeddings
              v1: b_j one number, no s;  v2: b_j in R^D, no s;  v3: as above;  dca: v3 for q, k and v, with own b and w each
              block t: A_1 = f_1(Norm(Q)), or f_1(Norm_q(Q), Norm_k(K), Norm_v(V));  A_s = A_{s-1} + f_s(Norm(Q + A_{s-1}))
              D_t = A of the last sublayer (Q is not in it);  the model returns one more g, over D_0 ... D_L
              k: columns D_0, D_1 + ... + D_{t-1-k}, D_{t-k}, ..., D_{t-1}; b_j and w_j belong to places, not to blocks
    Source:   DeepCrossAttention, arXiv:2502.06785v2, section 3 and figure 4; no authors' code. Options of the package
              lucidrains/deep-cross-attention 0.1.1: activation='relu', score_norm='rms', score_std=0.01, middle='drop'
    Deviates: sigma is GELU here: with the paper's ReLU and w = 0 no score ever gets a gradient, and v3 stays v2
              (lucidrains/deep-cross-attention issue 2). GELU keeps the shape and the start, has slope 1/2 at 0, and needs no
              gate at 0, with which w would have no gradient at the start either. activation='relu' is the paper's literal
              form; its scores are declared dead. The paper leaves open the kind of norm (RMSNorm here), whether v1, v2 and v3
              end in one more g as dca does (here they do) and what decays (here neither b nor w). The eps of score_norm is the
              model's; the package has that of the dtype. Its biases of feed-forwards and its unused norm of attention are part
              of its model. k with the sum of the middle has no public code. Blocks may have any number of sublayers
    Shapes:   state (S times [B T D], and inside a block Q and A); scores and sums in float32, rounded once
    Init:     EXACT: b = 1 and w = 0, for every k; NONE with score_std > 0 or a dropped middle
    Cost:     params per read and way S*D + D (per_source: 2*S*D; v2: S*D; v1: S), S = min(t, k + 2) in block t, and as much for
              one way over min(L + 1, k + 2) at the end; per token, way and column matrix product flops 2*D and 4*D more (v1,
              v2: 2*D in all); state S*D numbers per token, 2*D more inside a block; saves one number per token, way and column
    Published: perplexity on LM1B, arXiv:2502.06785v2: 6 blocks (tables 5 and 7) plain 18.98, v1 18.80, v2 18.43, v3 18.41, dca
              18.06: the scores add nothing measurable to v2, separate reads do; 24 blocks (table 1) plain 15.14, k=1 14.48, k=2
              14.41, k=24 14.35. Its table 7 counts more parameters than its formula; `per_source` gives these counts

    Args:
        variant: `v1`, `v2`, `v3` (one read per block), or `dca`.
        k: newest columns that stay separate; None keeps all deltas separate.
        middle: the deltas between are one column with their `sum` (paper), or the read keeps the first k and the newest k
            columns and they `drop` out (package).
        score_vector: one w `shared` by all columns, or one `per_source`.
        score_norm: scores see D_j itself (`none`, paper), or its RMSNorm with a gain that all ways share (`rms`, package).
        activation: sigma; all of them are 0 at 0.
        score_std: standard deviation of w at the start.
        impl: `fused` or `reference`.

    Raises:
        ConfigError: options of scores without scores, a dropped middle without k, or separate reads for a sublayer that takes
            one input.

    Example:
        >>> [DeepCrossAttentionConfig(k=2).n_columns(block + 1) for block in range(7)]
        [1, 2, 3, 4, 4, 4, 4]
    """

    kind: Literal["deep_cross_attention"] = "deep_cross_attention"
    variant: Literal["v1", "v2", "v3", "dca"] = "dca"
    k: int | None = Field(default=None, ge=1)
    middle: Literal["sum", "drop"] = "sum"
    score_vector: Literal["shared", "per_source"] = "shared"
    score_norm: Literal["none", "rms"] = "none"
    activation: Activation = "gelu"
    score_std: float = Field(default=0.0, ge=0)
    impl: Impl = "fused"

    @property
    def design(self) -> MixingDesign:
        """Free weights, plus one score per source in variants with scores."""
        scored = self.has_scores
        return MixingDesign(
            query="parameter w" if scored else "none",
            key="D_j" if scored else "none",
            value="D_j, e",
            normaliser=f"none: b_j + {self.activation}(score)" if scored else "none",
            window="all" if self.k is None else "e, last k, rest in one" if self.middle == "sum" else "first and last k",
            sharing="block",
            injection="replaces the stream" + (", q k v apart" if self.variant == "dca" else ""),
            weights="input" if scored else "static",
        )

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        if not self.has_scores:
            reason, remedy = f", since {self.variant!r} has no scores", "remove it or use variant='v3' or 'dca'"
            self.refuse_options(("score_vector", "score_norm", "activation", "score_std"), reason, remedy)
        if self.middle == "drop" and self.k is None:
            raise ConfigError(problem("middle", "drop", "'sum' when k is None", "set k, the columns to keep on each side"))
        return self

    @property
    def has_scores(self) -> bool:
        """Whether a weight depends on its source."""
        return self.variant in ("v3", "dca")

    def controls(self) -> Controls:
        """The first variant, whose weights do not depend on the input."""
        return Controls(
            None if self.variant == "v1" else {"kind": self.kind, "variant": "v1", "k": self.k, "middle": self.middle}
        )

    @property
    def init_equivalence(self) -> InitEquivalence:
        """Exact while scores start at 0 and nothing is dropped."""
        if self.score_std:
            return InitEquivalence("none", "scores start at random")
        if self.middle == "drop":
            return InitEquivalence("none", "the deltas between the first k and the newest k columns are dropped")
        return InitEquivalence("exact", "every read starts as the plain sum of all deltas")

    @property
    def n_ways(self) -> int:
        """Separate reads of the first sublayer of a block."""
        return 3 if self.variant == "dca" else 1

    def n_columns(self, n_deltas: int) -> int:
        """Columns of a read of this many deltas, the embedding among them."""
        if self.k is None:
            return n_deltas
        return min(n_deltas, 2 * self.k if self.middle == "drop" else self.k + 2)

    def names(self, n_deltas: int) -> tuple[str, ...]:
        """The names of the columns of a read of this many deltas."""
        deltas = tuple(unit_name(unit) for unit in range(n_deltas))
        k = self.k
        if k is None or self.n_columns(n_deltas) == n_deltas:
            return deltas
        if self.middle == "drop":
            return (*deltas[:k], *deltas[-k:])
        return (deltas[0], span_name("block", 0, n_deltas - k - 2), *deltas[-k:])

    def splits_views(self, site: SublayerPosition) -> bool:
        """Whether a block opens here, and queries, keys and values have separate reads."""
        return site.opens_block and self.n_ways == 3

    def cost(self, site: SublayerPosition, shape: Shape) -> Cost:
        """The reads where a block opens, one or two adds elsewhere, and one more where a delta joins the middle."""
        width, after = shape.total_tokens * site.d_model, site.block + 2
        merges = site.closes_block and self.middle == "sum" and self.n_columns(after) < after
        cost = Cost(elementwise_flops=width * (merges + 2 * (not site.opens_block)))
        return cost + (self._read_cost(site.block + 1, self.n_ways, site.d_model, shape) if site.opens_block else Cost())

    def ends_cost(self, stack: LayerStack, shape: Shape) -> Cost:
        """The last read."""
        return self._read_cost(stack.n_blocks + 1, 1, stack.d_model, shape)

    def _read_cost(self, n_deltas: int, C: int, D: int, shape: Shape) -> Cost:
        S, N = self.n_columns(n_deltas), shape.total_tokens
        if not self.has_scores:
            return Cost(params=C * S * (1 if self.variant == "v1" else D), elementwise_flops=2 * C * S * N * D)
        vectors = 1 if self.score_vector == "shared" else S
        norm = self.score_norm == "rms"
        return Cost(
            params=C * D * (S + vectors) + D * norm,
            matmul_flops=2 * C * S * N * D,
            elementwise_flops=S * N * D * (4 * C + 2 * norm),
        )

    def build(self, stack: LayerStack) -> "tuple[list[DeepCrossAttention], DeltasEnds]":
        """Builds a read for each block and for the head."""
        return [DeepCrossAttention(self, site) for site in stack.sites], DeltasEnds(self, stack)


class GRN(DeclaredModule):
    """A generalised residual: one weighted sum of the columns for each way."""

    def __init__(self, config: DeepCrossAttentionConfig, n_deltas: int, n_ways: int, stack: LayerStack) -> None:
        super().__init__()
        self.config, self.eps, D = config, stack.norm_eps, stack.d_model
        self.names, n_columns = config.names(n_deltas), config.n_columns(n_deltas)
        shape = (n_ways, n_columns) if config.variant == "v1" else (n_ways, n_columns, D)
        self.bias = self.parameter("bias", shape, Constant(1.0), "mixing")
        self.score_gain = None
        if config.has_scores:
            dead = DEAD_AT_ZERO if config.activation == "relu" and not config.score_std else None
            start = Normal(config.score_std) if config.score_std else Constant(0.0)
            vectors = 1 if config.score_vector == "shared" else n_columns
            self.score_weight = self.parameter("score_weight", (n_ways, vectors, D), start, "mixing", dead, grows="inputs")
            if config.score_norm == "rms":
                self.score_gain = self.parameter("score_gain", (D,), Constant(1.0), "norm", dead)

    def forward(self, columns: tuple[Stream, ...]) -> tuple[Stream, ...]:
        """Returns one sum for each way."""
        config = self.config
        if not config.has_scores:
            return mix(columns, self.bias)
        return grn(columns, self.bias, self.score_weight, config.activation, self.score_gain, self.eps, config.impl)

    def explain(self, columns: tuple[Stream, ...], made: Sequence[Tensor]) -> Explanation:
        """Returns the sums with their weights, one for each way."""
        weights: Sequence[Tensor] = [per_token(way, made[0]) for way in self.bias]
        if self.config.has_scores:
            inputs = (self.score_weight, self.config.activation, self.score_gain, self.eps)
            scores = grn_scores(columns, *inputs).unsqueeze(-1)
            weights = [bias + score for bias, score in zip(weights, scores, strict=True)]
        results = ("q", "k", "v") if len(made) > 1 else ("read",)
        ways = zip(made, results, weights, strict=True)
        return Explanation(tuple(WeightedSum(one, result, self.names, columns, weight) for one, result, weight in ways))


class DeepCrossAttention(DepthMixer, config=DeepCrossAttentionConfig):
    """See `DeepCrossAttentionConfig`; sources are its columns: the embedding, the sum of the middle, the newest deltas."""

    def __init__(self, config: DeepCrossAttentionConfig, site: SublayerPosition) -> None:
        super().__init__()
        self.config, self.closes_block = config, site.closes_block
        self.splits_views = config.splits_views(site)
        self.grn = GRN(config, site.block + 1, config.n_ways, site.stack) if site.opens_block else None

    def read(self, state: History, layout: Layout = None, cache: Any = None) -> tuple[Views, Stream, Any]:
        """Returns the sums of the columns, or inside a block its query input plus the delta so far; carries the query input."""
        if self.grn is None:
            added, query = state.inside
            return query + added, query, cache
        ways = self.grn(state.sources)
        return (QKV(*ways) if self.splits_views else ways[0]), ways[0], cache

    def write(self, state: History, update: Stream, context: Views, carry: Stream) -> History:
        """Returns the state with the update added to the delta of the block, which becomes a column when the block closes."""
        added = state.added(update)
        if not self.closes_block:
            return History(state.sources, (added, carry))
        return History(self._with_column(state.sources, added))

    def _with_column(self, columns: tuple[Tensor, ...], delta: Tensor) -> tuple[Tensor, ...]:
        k = self.config.k
        columns = (*columns, delta)
        if k is None or len(columns) <= self.config.n_columns(len(columns)):
            return columns
        if self.config.middle == "drop":
            return (*columns[:k], *columns[k + 1 :])
        return (columns[0], columns[1] + columns[2], *columns[3:])

    def explain(self, done: Read | Write) -> Explanation:
        """Returns the sums of the columns, where a block opens."""
        if isinstance(done, Write) or self.grn is None:
            return Explanation()
        return self.grn.explain(done.state.sources, tuple(done.views) if self.splits_views else (done.views,))


class DeltasEnds(HistoryEnds):
    """The embedding is the first column; the model returns one more sum of the columns."""

    def __init__(self, config: DeepCrossAttentionConfig, stack: LayerStack) -> None:
        super().__init__()
        self.grn = GRN(config, stack.n_blocks + 1, 1, stack)

    def leave(self, state: History, layout: Layout = None, cache: Any = None) -> tuple[Stream, Any]:
        """Returns the sum of the columns."""
        return self.grn(state.sources)[0], cache

    def explain(self, done: Read) -> Explanation:
        """Returns the last sum."""
        return self.grn.explain(done.state.sources, (done.views,))
