"""DeepCrossAttention: queries, keys and values each read a sum of what all earlier blocks added, with learned weights.

Letters: B batch, T position, D width, S columns (sources) of one read, C ways (1, or 3 for q, k and v), L blocks.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Self

from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.equivalence import InitEquivalence
from twoaxis.core.errors import ConfigError, problem
from twoaxis.core.mixing_design import MixingDesign
from twoaxis.core.parameters import Constant, DeclaredModule, Normal
from twoaxis.core.site import Site, Stack
from twoaxis.core.views import QKV, Views
from twoaxis.core.weighted_sum import WeightedSum, per_token, span_name, unit_name
from twoaxis.depth.base import DepthConfig, DepthEnds, DepthMixer
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
              gate at 0, behind which w would have no gradient at the start either. activation='relu' is the paper's literal
              form; its scores are declared dead. The paper leaves open the kind of norm (RMSNorm here), whether v1, v2 and v3
              end in one more g as dca does (here they do) and what decays (here neither b nor w). The eps of score_norm is the
              model's; the package has that of the dtype. Its biases of feed-forwards and its unused norm of attention are part
              of its model. k with the sum of the middle has no public code. Blocks may have any number of sublayers
    Shapes:   state (S times [B T D], and inside a block Q and A); scores and sums in float32, rounded once
    Init:     EXACT: b = 1 and w = 0, for every k; NONE with score_std > 0 or a dropped middle
    Cost:     params per read and way S*D + D (per_source: 2*S*D; v2: S*D; v1: S), S = min(t, k + 2) in block t, and as much for
              one way over min(L + 1, k + 2) at the end; per token, way and column matrix product flops 2*D and 4*D more (v1,
              v2: 2*D in all); state S*D numbers per token, 2*D more inside a block; keeps one number per token, way and column;
              moves (S + ways)*D numbers per token where a block opens, elsewhere 6*D
    Published: perplexity on LM1B, arXiv:2502.06785v2: 6 blocks (tables 5 and 7) plain 18.98, v1 18.80, v2 18.43, v3 18.41, dca
              18.06: the scores add nothing measurable to v2, separate reads do; 24 blocks (table 1) plain 15.14, k=1 14.48, k=2
              14.41, k=24 14.35. Its table 7 counts more parameters than its formula has; `per_source` would give its counts

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
        >>> stack = Stack(d_model=2, norm_eps=1e-6, block_lengths=(2,) * 6)
        >>> [DeepCrossAttentionConfig(k=2).state_floats(stack, 2 * block) for block in range(7)]
        [2, 4, 6, 8, 8, 8, 8]
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
        """Free weights, plus a score of each source by itself where there are scores."""
        scored = self.variant in ("v3", "dca")
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
        for name in ("score_vector", "score_norm", "activation", "score_std") if self.variant in ("v1", "v2") else ():
            if getattr(self, name) != type(self).model_fields[name].default:
                allowed = f"left out, since {self.variant!r} has no scores"
                raise ConfigError(problem(name, getattr(self, name), allowed, "remove it or use variant='v3' or 'dca'"))
        if self.middle == "drop" and self.k is None:
            raise ConfigError(problem("middle", "drop", "'sum' when k is None", "set k, the columns to keep on each side"))
        return self

    def static_form(self) -> Mapping[str, Any] | None:
        """The first variant, whose weights do not depend on the input."""
        return None if self.variant == "v1" else {"kind": self.kind, "variant": "v1", "k": self.k, "middle": self.middle}

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
        """What each column of a read of this many deltas is called."""
        deltas = tuple(unit_name(unit) for unit in range(n_deltas))
        k = self.k
        if k is None or self.n_columns(n_deltas) == n_deltas:
            return deltas
        if self.middle == "drop":
            return (*deltas[:k], *deltas[-k:])
        return (deltas[0], span_name("block", 0, n_deltas - k - 2), *deltas[-k:])

    def splits_views(self, site: Site) -> bool:
        """Where a block opens, if queries, keys and values are read apart."""
        return site.opens_block and self.n_ways == 3

    def _merges(self, site: Site) -> bool:
        """Whether a delta joins the middle when this sublayer has written."""
        after = site.block + 2
        return site.closes_block and self.middle == "sum" and self.n_columns(after) < after

    def cost(self, site: Site, shape: Shape) -> Cost:
        """The reads where a block opens, one or two adds elsewhere, and one more where a delta joins the middle."""
        width = shape.total_tokens * site.d_model
        joins = Cost(elementwise_flops=width * self._merges(site))
        if not site.opens_block:
            return joins + Cost(elementwise_flops=2 * width)
        return joins + self._read_cost(site.block + 1, self.n_ways, site.d_model, shape)

    def ends_cost(self, stack: Stack, shape: Shape) -> Cost:
        """The last read."""
        return self._read_cost(stack.n_blocks + 1, 1, stack.d_model, shape)

    def _read_cost(self, n_deltas: int, C: int, D: int, shape: Shape) -> Cost:
        S, N = self.n_columns(n_deltas), shape.total_tokens
        if self.variant in ("v1", "v2"):
            return Cost(params=C * S * (1 if self.variant == "v1" else D), elementwise_flops=2 * C * S * N * D)
        vectors = 1 if self.score_vector == "shared" else S
        norm = self.score_norm == "rms"
        return Cost(
            params=C * D * (S + vectors) + D * norm,
            matmul_flops=2 * C * S * N * D,
            elementwise_flops=S * N * D * (4 * C + 2 * norm),
        )

    def build(self, site: Site) -> "DeepCrossAttention":
        """Builds the mixer of one sublayer."""
        return DeepCrossAttention(self, site)

    def build_ends(self, stack: Stack) -> "DeltasEnds":
        """Builds the ends."""
        return DeltasEnds(self, stack)


class Deltas(NamedTuple):
    """The depth state.

    Attributes:
        columns: the embedding, the sum of the middle where there is one, and the newest deltas, oldest first.
        inside: inside a block its query input and what its sublayers have added so far; else nothing.
    """

    columns: tuple[Float[Tensor, "B T D"], ...]
    inside: tuple[Float[Tensor, "B T D"], ...] = ()


class GRN(DeclaredModule):
    """A generalised residual: one weighted sum of the columns for each way."""

    def __init__(self, config: DeepCrossAttentionConfig, n_deltas: int, n_ways: int, d_model: int, eps: float) -> None:
        super().__init__()
        self.config, self.eps = config, eps
        self.names, n_columns = config.names(n_deltas), config.n_columns(n_deltas)
        shape = (n_ways, n_columns) if config.variant == "v1" else (n_ways, n_columns, d_model)
        self.bias = self.parameter("bias", shape, Constant(1.0), "mixing")
        self.has_scores = config.variant in ("v3", "dca")
        self.score_gain = None
        if self.has_scores:
            dead = DEAD_AT_ZERO if config.activation == "relu" and not config.score_std else None
            start = Normal(config.score_std) if config.score_std else Constant(0.0)
            vectors = 1 if config.score_vector == "shared" else n_columns
            self.score_weight = self.parameter("score_weight", (n_ways, vectors, d_model), start, "mixing", dead)
            if config.score_norm == "rms":
                self.score_gain = self.parameter("score_gain", (d_model,), Constant(1.0), "norm", dead)

    def forward(self, columns: tuple[Float[Tensor, "B T D"], ...]) -> tuple[Float[Tensor, "B T D"], ...]:
        """Returns one sum for each way."""
        if not self.has_scores:
            return mix(columns, self.bias, self.config.impl)
        activation, impl = self.config.activation, self.config.impl
        return grn(columns, self.bias, self.score_weight, activation, self.score_gain, self.eps, impl)

    def sums(self, columns: tuple[Float[Tensor, "B T D"], ...], made: Sequence[Tensor]) -> tuple[WeightedSum, ...]:
        """The sums with their weights, one for each way."""
        weights: Sequence[Tensor] = [per_token(way, made[0]) for way in self.bias]
        if self.has_scores:
            inputs = (self.score_weight, self.config.activation, self.score_gain, self.eps)
            scores = grn_scores(columns, *inputs).unsqueeze(-1)
            weights = [bias + score for bias, score in zip(weights, scores, strict=True)]
        results = ("q", "k", "v") if len(made) > 1 else ("read",)
        ways = zip(made, results, weights, strict=True)
        return tuple(WeightedSum(tensor, result, self.names, columns, weight) for tensor, result, weight in ways)


class DeepCrossAttention(DepthMixer, config=DeepCrossAttentionConfig):
    """See `DeepCrossAttentionConfig`."""

    def __init__(self, config: DeepCrossAttentionConfig, site: Site) -> None:
        super().__init__()
        self.config, self.closes_block = config, site.closes_block
        self.splits_views = config.splits_views(site)
        self.grn = None
        if site.opens_block:
            self.grn = GRN(config, site.block + 1, config.n_ways, site.d_model, site.norm_eps)

    def read(self, state: Deltas) -> tuple[Views, Float[Tensor, "B T D"]]:
        """Returns the sums of the columns, or inside a block its query input plus what was added; carries the query input."""
        if self.grn is None:
            query, added = state.inside
            return query + added, query
        ways = self.grn(state.columns)
        return (QKV(*ways) if self.splits_views else ways[0]), ways[0]

    def read_sums(self, state: Deltas, views: Views, carry: Float[Tensor, "B T D"]) -> tuple[WeightedSum, ...]:
        """The sums of the columns, where a block opens."""
        if self.grn is None:
            return ()
        return self.grn.sums(state.columns, tuple(views) if isinstance(views, QKV) else (views,))

    def write(self, state: Deltas, update: Float[Tensor, "B T D"], context: Views, carry: Float[Tensor, "B T D"]) -> Deltas:
        """Returns the state with the update added to the delta of the block, which becomes a column when the block closes."""
        # Under autocast the update may be narrower than the columns.
        update = update.to(carry.dtype)
        added = state.inside[1] + update if state.inside else update
        if not self.closes_block:
            return Deltas(state.columns, (carry, added))
        return Deltas(self._with_column(state.columns, added))

    def _with_column(self, columns: tuple[Tensor, ...], delta: Tensor) -> tuple[Tensor, ...]:
        k = self.config.k
        columns = (*columns, delta)
        if k is None or len(columns) <= self.config.n_columns(len(columns)):
            return columns
        if self.config.middle == "drop":
            return (*columns[:k], *columns[k + 1 :])
        return (columns[0], columns[1] + columns[2], *columns[3:])


class DeltasEnds(DepthEnds):
    """The embedding is the first column; the model returns one more sum of the columns."""

    def __init__(self, config: DeepCrossAttentionConfig, stack: Stack) -> None:
        super().__init__()
        self.grn = GRN(config, stack.n_blocks + 1, 1, stack.d_model, stack.norm_eps)

    def enter(self, embeddings: Float[Tensor, "B T D"]) -> Deltas:
        """Returns the embeddings as the only column."""
        return Deltas((embeddings,))

    def leave(self, state: Deltas) -> Float[Tensor, "B T D"]:
        """Returns the sum of the columns."""
        return self.grn(state.columns)[0]

    def leave_sums(self, state: Deltas, left: Float[Tensor, "B T D"]) -> tuple[WeightedSum, ...]:
        """The last sum."""
        return self.grn.sums(state.columns, (left,))
