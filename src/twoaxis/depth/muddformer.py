"""MUDD: after a block, each input of the next one becomes a sum of all block outputs so far, with weights of the token.

Letters: B batch, T position, D width, S sources of one sum, C ways (sums), K hidden width, L blocks.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, Self

from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.equivalence import InitEquivalence
from twoaxis.core.errors import ConfigError, problem
from twoaxis.core.mixing_design import MixingDesign
from twoaxis.core.parameters import Constant, DeclaredModule, Normal, Values
from twoaxis.core.site import Site, Stack
from twoaxis.core.views import QKV, Views
from twoaxis.core.weighted_sum import WeightedSum, per_token, unit_name
from twoaxis.depth.base import DepthConfig, DepthEnds, DepthMixer
from twoaxis.ops.mix import mix
from twoaxis.ops.norm import rms_norm
from twoaxis.ops.precision import Impl
from twoaxis.ops.weight_mlp import GELUForm, weight_mlp

POST_GAIN = 1e-3
"""What the gains of the norm after a sum start at."""


class BlockOutputs(NamedTuple):
    """The depth state.

    Attributes:
        sources: the block outputs (or their norms) that later sums read, oldest first; the embedding is the first of all.
        stream: between blocks the newest output as it is; inside a block what it has so far.
        base: inside a parallel block what it read on the residual way, unless that is the newest source; else nothing.
    """

    sources: tuple[Float[Tensor, "B T D"], ...]
    stream: Float[Tensor, "B T D"]
    base: tuple[Float[Tensor, "B T D"], ...] = ()


class MUDDFormerConfig(DepthConfig):
    """Multiway dynamic dense connections: queries, keys, values and the residual each read their own sum of block outputs.

    Equation: X_i = R_{i-1} + what the sublayers of block i add,  X_0 = R_0 = embeddings
              w_cj = a_cj + W_2 gelu(W_1 RMSNorm(X_i)) for way c and source j <= i, free in size and sign
              (Q_i, K_i, V_i, R_i) = sum_j w_cj X_j: what the first sublayer of block i + 1 reads, and what it adds to
              after the last block one sum R_L, which the final norm sees
              sequential: later sublayers read R and what the block has added so far;  parallel: they read R
              source_norm: the sums read RMSNorm(X_j), with a gain for each j;  post_norm: X_i + RMSNorm(sum_j w_cj X_j)
    Source:   MUDDFormer, arXiv:2502.12170v2, section 3 and eq. 10; authors' code Caiyun-AI/MUDDFormer, pytorch/ and jax/
    Deviates: the weights of the sums and their gains do not decay here; the authors' training code decays every parameter of
              the model by 0.1: optimizer.groups=[{pattern="*", weight_decay=0.1}]. `post_norm` alone starts with a = 0 here;
              their training code then keeps a one-hot, so that inputs start as 2 X_i. Their PyTorch code is for inference and
              starts at random. The first block sees X_0 in all ways through one norm, as in their PyTorch code; their training
              code has three
    Shapes:   state: tuple of [B T D], the outputs still to be read and the stream; weights and sums in float32, rounded once
    Init:     EXACT: W_1 ~ N(0, 1/D), W_2 = 0, a one-hot on the newest output (0 with a post_norm). parallel: NONE, since later
              sublayers of a block do not read what earlier ones added; source_norm alone: NONE, since sums start as a norm
    Cost:     params K*(D + C*S) + C*S per block with a sum of S = i + 1 sources, K = C*S; matrix product flops 2*K*(D + C*S)
              and 2*C*S*D more per token; state at most (L + 1)*D numbers per token; nothing carried from token to token
    Published: perplexity and tasks of MUDDPythia-2.8B equal those of Pythia-6.9B, with 0.23% more parameters and 0.4% more
              compute; in general those of Transformers with 1.8 to 2.4 times the compute (arXiv:2502.12170v2, abstract).
              0.23% is of the blocks; the released models, `round64` with `expand_last=4`, have 0.31% to 0.32% of the whole. The
              authors recommend both norms for deep models; without them a model of 24 blocks diverged in wdlctc/
              hyper-connection-factory

    Args:
        ways: `qkvr`, separate inputs for queries, keys, values and the residual, or `single`, one sum for all.
        weights: `dynamic`, or `static` for the parameters a alone.
        residual: `sequential`, or `parallel` as in Pythia.
        hidden: K = C*S as in the `paper`, or `round64`, (C*S // 64 + 1) * 64, as in the released models.
        expand_last: factor of C*S in K after the last block, before rounding; 4 in the released models.
        gelu: `erf` (their PyTorch code) or `tanh` (their training code).
        source_norm: `rms` normalises the sources (PreDANorm) and gives the input of W_1 a gain.
        post_norm: which sums get a norm and join X_i (PostDANorm): `none`, `all` (the paper), or `residual` (their training
            code: the residual way alone; the other sums join X_i as they are).
        dilation: a sum reads every `dilation`-th output, counted back from the newest.
        period: blocks between two sums; the others pass their output on.
        window: a sum reads the embedding and this many newest outputs; None reads them all.
        weight_eps: eps of the norm before W_1; None is that of the model (their training code has 1e-6 whatever the model has).
        impl: `fused` or `reference`.

    Raises:
        ConfigError: options that exclude each other, or separate inputs for a sublayer that takes one.

    Example:
        >>> MUDDFormerConfig(window=2).sums(4)
        {1: (0, 1), 2: (0, 1, 2), 3: (0, 2, 3), 4: (0, 3, 4)}
    """

    kind: Literal["muddformer"] = "muddformer"
    ways: Literal["qkvr", "single"] = "qkvr"
    weights: Literal["dynamic", "static"] = "dynamic"
    residual: Literal["sequential", "parallel"] = "sequential"
    hidden: Literal["paper", "round64"] = "paper"
    expand_last: int = Field(default=1, ge=1)
    gelu: GELUForm = "erf"
    source_norm: Literal["none", "rms"] = "none"
    post_norm: Literal["none", "all", "residual"] = "none"
    dilation: int = Field(default=1, ge=1)
    period: int = Field(default=1, ge=1)
    window: int | None = Field(default=None, ge=1)
    weight_eps: float | None = Field(default=None, gt=0)
    impl: Impl = "fused"

    @property
    def design(self) -> MixingDesign:
        """Free weights that the newest output makes."""
        dynamic = self.weights == "dynamic"
        sources = "all" if self.window is None else "e, last n"
        period = "" if self.period == 1 else f", every {self.period} blocks"
        return MixingDesign(
            query="MLP(RMSNorm(X_i))" if dynamic else "none",
            key="none: one output for each source" if dynamic else "none",
            value="X_j, e" if self.source_norm == "none" else "RMSNorm(X_j), RMSNorm(e)",
            normaliser="none",
            window=sources if self.dilation == 1 else f"{sources}, 1 of {self.dilation}",
            sharing="block",
            injection="replaces the stream" + (", q k v r apart" if self.ways == "qkvr" else "") + period,
            weights="input and reader" if dynamic else "static",
        )

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        if self.window is not None and self.dilation > 1:
            raise ConfigError(problem("window", self.window, "None when dilation > 1", "set dilation=1 or remove window"))
        if self.weights == "static":
            for name in ("hidden", "expand_last", "gelu", "weight_eps"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    allowed = "left out, since static weights have no hidden layer"
                    raise ConfigError(problem(name, getattr(self, name), allowed, "remove it or use weights='dynamic'"))
        return self

    def sums(self, n_blocks: int) -> dict[int, tuple[int, ...]]:
        """The outputs that are summed after each block with a sum, oldest first; 0 is the embedding, 1 the first block's."""
        k = self.dilation
        found = {i: tuple(range(i % k, i + 1, k)) for i in range(self.period, n_blocks + 1, self.period)}
        if self.window is None:
            return found
        return {i: tuple(j for j in read if j == 0 or j > i - self.window) for i, read in found.items()}

    def splits_views(self, site: Site) -> bool:
        """At the first sublayer of a block that reads sums on separate ways."""
        return self.ways == "qkvr" and site.opens_block and site.block in self.sums(site.stack.n_blocks)

    def n_ways(self, stack: Stack, block: int) -> int:
        """Ways C of the sum after this many blocks."""
        return 4 if self.ways == "qkvr" and block < stack.n_blocks else 1

    def hidden_width(self, n_weights: int, is_last: bool) -> int:
        """The hidden width K for this many weights of a token; 0 for static ones."""
        if self.weights == "static":
            return 0
        width = n_weights * (self.expand_last if is_last else 1)
        return width if self.hidden == "paper" else (width // 64 + 1) * 64

    def static_form(self) -> Mapping[str, Any] | None:
        """The same with static weights, which have no hidden layer."""
        of_the_hidden_layer = ("hidden", "expand_last", "gelu")
        kept = {name: value for name, value in self.to_data().items() if name not in of_the_hidden_layer}
        return {**kept, "weights": "static"} if self.weights == "dynamic" else None

    @property
    def init_equivalence(self) -> InitEquivalence:
        """Exact, unless later sublayers of a block read less, or sums replace the newest output by its norm."""
        if self.residual == "parallel":
            return InitEquivalence("none", "later sublayers of a block do not read what its earlier ones added")
        if self.source_norm == "rms" and self.post_norm == "none":
            return InitEquivalence("none", "the residual starts as the norm of the newest output")
        return InitEquivalence("exact", "every sum starts as the newest output alone")

    def cost(self, site: Site, shape: Shape) -> Cost:
        """One add, and at the first sublayer of a block the sums it reads."""
        add = Cost(elementwise_flops=shape.total_tokens * site.d_model)
        if not site.opens_block:
            return add
        return add + self._sum_cost(site.stack, site.block, shape)

    def ends_cost(self, stack: Stack, shape: Shape) -> Cost:
        """The sum after the last block."""
        return self._sum_cost(stack, stack.n_blocks, shape)

    def _sum_cost(self, stack: Stack, block: int, shape: Shape) -> Cost:
        """The norm of the newest source and the sums that are read after this many blocks."""
        place, D, N = _Place(self, stack, block), stack.d_model, shape.total_tokens
        S, C = len(place.read), self.n_ways(stack, block)
        M, K = C * S, self.hidden_width(C * S, block == stack.n_blocks)
        cost = Cost()
        if place.norms_newest:
            cost += Cost(params=D, elementwise_flops=4 * N * D)
        if not S:
            return cost
        cost += Cost(params=M, elementwise_flops=2 * M * N * D)
        if self.weights == "dynamic":
            gain = D if self.source_norm == "rms" else 0
            maps = K * (D + M)
            flops = N * (3 * D + 9 * K + M)
            cost += Cost(maps + gain, 2 * N * maps, elementwise_flops=flops)
        if self.post_norm != "none":
            P = _post_normed(self, C)
            cost += Cost(params=P * D, elementwise_flops=N * D * (4 * P + C))
        return cost

    def build(self, site: Site) -> "MUDDFormer":
        """Builds the mixer of one sublayer."""
        return MUDDFormer(self, site)

    def build_ends(self, stack: Stack) -> "MUDDFormerEnds":
        """Builds the ends."""
        return MUDDFormerEnds(self, stack)


def _post_normed(config: MUDDFormerConfig, n_ways: int) -> int:
    """How many sums get a norm: the last ones."""
    return {"none": 0, "all": n_ways, "residual": 1}[config.post_norm]


class _Place:
    """What is read after `block` blocks, and what the state holds from there on, inside the next block and after it.

    Attributes:
        read: the outputs that are summed here, or nothing.
        kept: the outputs up to the newest here that later sums read.
        norms_newest: whether the newest output gets its norm here.
        base_is_kept: whether the base of the next block is its newest source.
        holds_base: whether the state that is asked for holds a base.
    """

    def __init__(self, config: MUDDFormerConfig, stack: Stack, block: int) -> None:
        sums = config.sums(stack.n_blocks)
        self.block = block
        self.read = sums.get(block, ())
        self.kept = _read_later(sums, block)
        self.norms_newest = config.source_norm == "rms" and (block in self.read or block in self.kept)
        self.base_is_kept = not self.read and config.source_norm == "none" and block in self.kept
        self.holds_base = False

    @staticmethod
    def before(config: MUDDFormerConfig, stack: Stack, index: int) -> "_Place":
        """The place whose outputs the state holds before sublayer `index`."""
        if index == stack.n_sublayers or stack.sites[index].opens_block:
            block = stack.n_blocks if index == stack.n_sublayers else stack.sites[index].block
            return _Place(config, stack, block - 1)
        place = _Place(config, stack, stack.sites[index].block)
        place.holds_base = config.residual == "parallel" and not place.base_is_kept
        return place


def _read_later(sums: Mapping[int, tuple[int, ...]], block: int) -> tuple[int, ...]:
    """The outputs of up to this many blocks that the sums of later blocks read."""
    return tuple(sorted({source for i, read in sums.items() if i > block for source in read if source <= block}))


class Sum(DeclaredModule):
    """What is read after one block: a norm of its output where sources have one, and a sum for each way."""

    def __init__(self, config: MUDDFormerConfig, stack: Stack, block: int) -> None:
        super().__init__()
        place, before = _Place(config, stack, block), _Place(config, stack, block - 1)
        self.config, self.eps, D = config, stack.norm_eps, stack.d_model
        self.names = tuple(unit_name(source) for source in place.read)
        self.weight_eps = stack.norm_eps if config.weight_eps is None else config.weight_eps
        # Positions in what is there: the outputs held before, and the newest behind them.
        held = (*before.kept, block)
        self.sources = tuple(held.index(source) for source in place.read)
        self.kept = tuple(held.index(source) for source in place.kept)
        self.n_ways = config.n_ways(stack, block)
        self.norms_newest = place.norms_newest
        if self.norms_newest:
            self.source_gain = self.parameter("source_gain", (D,), Constant(1.0), "norm")
        if not self.sources:
            return
        C, S = self.n_ways, len(self.sources)
        newest = 0.0 if config.post_norm != "none" else 1.0
        self.static = self.parameter("static", (C, S), Values((*(0.0,) * (S - 1), newest) * C), "mixing")
        if config.weights == "dynamic":
            K = config.hidden_width(C * S, block == stack.n_blocks)
            self.to_hidden = self.parameter("to_hidden", (K, D), Normal(D**-0.5), "mixing")
            self.to_weights = self.parameter("to_weights", (C * S, K), Constant(0.0), "mixing")
            gained = config.source_norm == "rms"
            self.input_gain = self.parameter("input_gain", (D,), Constant(1.0), "norm") if gained else None
        if config.post_norm != "none":
            shape = (_post_normed(config, C), D)
            self.post_gain = self.parameter("post_gain", shape, Constant(POST_GAIN), "norm")

    def forward(
        self, held: tuple[Float[Tensor, "B T D"], ...], newest: Float[Tensor, "B T D"]
    ) -> tuple[tuple[Float[Tensor, "B T D"], ...], tuple[Float[Tensor, "B T D"], ...]]:
        """Returns what each way reads, or the newest output alone where nothing is summed, and the sources to keep."""
        held = self._held(held, newest)
        kept = tuple(held[index] for index in self.kept)
        if not self.sources:
            return (newest,), kept
        ways = mix([held[index] for index in self.sources], self.weights(newest), self.config.impl)
        return tuple(self._joined(c, way, newest) for c, way in enumerate(ways)), kept

    def sums(
        self, held: tuple[Float[Tensor, "B T D"], ...], newest: Float[Tensor, "B T D"], made: Sequence[Tensor]
    ) -> tuple[WeightedSum, ...]:
        """The sums with their weights, one for each way, before their norms; none where nothing is summed."""
        if not self.sources:
            return ()
        held = self._held(held, newest)
        sources = tuple(held[index] for index in self.sources)
        results = ("q", "k", "v", "residual") if self.n_ways > 1 else ("read",)
        found = []
        for c, (tensor, result, weights) in enumerate(zip(made, results, self.weights(newest), strict=True)):
            finish = partial(self._joined, c, newest=newest)
            found.append(WeightedSum(tensor, result, self.names, sources, per_token(weights, newest), finish=finish))
        return tuple(found)

    def _held(self, held: tuple[Tensor, ...], newest: Tensor) -> tuple[Tensor, ...]:
        """The outputs held before, and the newest, behind its norm where sources have one."""
        return (*held, rms_norm(newest, self.source_gain, self.eps, self.config.impl) if self.norms_newest else newest)

    def weights(self, newest: Float[Tensor, "B T D"]) -> Float[Tensor, "C S *each"]:
        """Returns the weight of every source in every way: one number for each token, or one for all if static."""
        config = self.config
        if config.weights == "static":
            return self.static
        inputs = (newest, self.to_hidden, self.to_weights, self.static.flatten(), self.input_gain)
        return weight_mlp(*inputs, self.weight_eps, config.gelu, config.impl).unflatten(0, self.static.shape)

    def _joined(self, c: int, way: Tensor, newest: Tensor) -> Tensor:
        """The sum of way c; where the last ways have norms, the newest output plus it, behind its norm if it has one."""
        if self.config.post_norm == "none":
            return way
        normed = c - (self.n_ways - len(self.post_gain))
        return newest + (way if normed < 0 else rms_norm(way, self.post_gain[normed], self.eps, self.config.impl))


class MUDDFormer(DepthMixer, config=MUDDFormerConfig):
    """See `MUDDFormerConfig`."""

    def __init__(self, config: MUDDFormerConfig, site: Site) -> None:
        super().__init__()
        place = _Place(config, site.stack, site.block)
        self.opens_block, self.closes_block = site.opens_block, site.closes_block
        self.is_parallel, self.base_is_kept = config.residual == "parallel", place.base_is_kept
        self.sum = Sum(config, site.stack, site.block) if site.opens_block else None
        self.splits_views = config.splits_views(site)

    def read(self, state: BlockOutputs) -> tuple[Views, Any]:
        """Returns the sums in the first sublayer of a block, later what the block has so far or what it began with."""
        if self.sum is not None:
            ways, sources = self.sum(state.sources, state.stream)
            return QKV(*ways[:3]) if self.splits_views else ways[0], (sources, ways[-1])
        if not self.is_parallel:
            return state.stream, None
        return state.sources[-1] if self.base_is_kept else state.base[0], None

    def read_sums(self, state: BlockOutputs, views: Views, carry: Any) -> tuple[WeightedSum, ...]:
        """The sum of each way, where a block opens that reads sums."""
        if self.sum is None:
            return ()
        made = (*views, carry[1]) if isinstance(views, QKV) else (views,)
        return self.sum.sums(state.sources, state.stream, made)

    def write(self, state: BlockOutputs, update: Float[Tensor, "B T D"], context: Views, carry: Any) -> BlockOutputs:
        """Returns the state with the update added to the residual way."""
        sources, base = carry if self.opens_block else (state.sources, state.stream)
        # Under autocast the update may be narrower than the stream that it joins.
        stream = base + update.to(base.dtype)
        if self.closes_block or not self.is_parallel or self.base_is_kept:
            return BlockOutputs(sources, stream)
        return BlockOutputs(sources, stream, (base,) if self.opens_block else state.base)


class MUDDFormerEnds(DepthEnds):
    """The embedding is the first source, and the last sum is left."""

    def __init__(self, config: MUDDFormerConfig, stack: Stack) -> None:
        super().__init__()
        self.sum = Sum(config, stack, stack.n_blocks)

    def enter(self, embeddings: Float[Tensor, "B T D"]) -> BlockOutputs:
        """Returns the embeddings as the newest output."""
        return BlockOutputs((), embeddings)

    def leave(self, state: BlockOutputs) -> Float[Tensor, "B T D"]:
        """Returns the sum after the last block, or its output where nothing is summed."""
        ways, _ = self.sum(state.sources, state.stream)
        return ways[-1]

    def leave_sums(self, state: BlockOutputs, left: Float[Tensor, "B T D"]) -> tuple[WeightedSum, ...]:
        """The last sum, if any."""
        return self.sum.sums(state.sources, state.stream, (left,))
