"""MUDD: after a block, each input of the next one becomes a sum of all block outputs so far, with weights of the token.

Letters: B batch, T position, D width, S sources of one sum, C ways (sums), K hidden width, L blocks.
"""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.design import InitEquivalence, MixingDesign
from twoaxis.core.errors import ConfigError, problem
from twoaxis.core.position import LayerStack, SublayerPosition
from twoaxis.core.views import QKV, Views, unit_name
from twoaxis.depth.base import Controls, DepthConfig, DepthEnds, DepthMixer, Explanation, Layout, Read, Stream, Write
from twoaxis.depth.history import Sums, read_later, selection, strided_sums
from twoaxis.depth.token_sums import BlockOutputs, Sum, SumForm
from twoaxis.ops.precision import Impl
from twoaxis.ops.weight_mlp import GELUForm


class MUDDFormerConfig(DepthConfig):
    """Multiway dynamic dense connections: queries, keys, values and the residual each read their own sum of block outputs.

    Equation: X_i = R_{i-1} + updates of block i,  X_0 = R_0 = embeddings
              w_cj = a_cj + W_2 gelu(W_1 RMSNorm(X_i)) for way c and source j <= i, free in size and sign
              (Q_i, K_i, V_i, R_i) = sum_j w_cj X_j: the inputs of the first sublayer of block i + 1, and the stream it adds to
              after the last block one sum R_L, which the final norm sees
              sequential: later sublayers read R plus the updates of the block so far;  parallel: they read R
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
        post_norm: sums that are normalised and added to X_i (PostDANorm): `none`, `all` (the paper), or `residual`
            (their training code: the residual way alone; the other sums are added to X_i without a norm).
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
        """Free weights computed from the newest output."""
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
            of_hidden, remedy = ("hidden", "expand_last", "gelu", "weight_eps"), "remove it or use weights='dynamic'"
            self.refuse_options(of_hidden, ", since static weights have no hidden layer", remedy)
        return self

    def sums(self, n_blocks: int) -> Sums:
        """The outputs that are summed after each block with a sum, oldest first; 0 is the embedding, 1 the first block's."""
        return strided_sums(n_blocks, self.period, self.dilation, self.window)

    def splits_views(self, site: SublayerPosition) -> bool:
        """At the first sublayer of a block that reads sums on separate ways."""
        return self.ways == "qkvr" and site.opens_block and site.block in self.sums(site.stack.n_blocks)

    def sum_form(self, stack: LayerStack, block: int) -> SumForm:
        """How the sums after this many blocks are made."""
        sums, is_last = self.sums(stack.n_blocks), block == stack.n_blocks
        read, n_ways = sums.get(block, ()), 4 if self.ways == "qkvr" and not is_last else 1
        is_source = block in read or block in read_later(sums, block)
        hidden = n_ways * len(read) * (self.expand_last if is_last else 1)
        hidden = hidden if self.hidden == "paper" else (hidden // 64 + 1) * 64
        return SumForm(
            selection=selection(sums, block),
            names=tuple(map(unit_name, read)),
            n_ways=n_ways,
            hidden=hidden if self.weights == "dynamic" else 0,
            norms_newest=self.source_norm == "rms" and is_source,
            gained=self.source_norm == "rms",
            n_post_normed={"none": 0, "all": n_ways, "residual": 1}[self.post_norm],
            weight_eps=stack.norm_eps if self.weight_eps is None else self.weight_eps,
            norm_eps=stack.norm_eps,
            d_model=stack.d_model,
            gelu=self.gelu,
            impl=self.impl,
        )

    def controls(self) -> Controls:
        """The same with static weights, which have no hidden layer."""
        if self.weights == "static":
            return Controls()
        kept = {name: value for name, value in self.to_data().items() if name not in ("hidden", "expand_last", "gelu")}
        return Controls({**kept, "weights": "static"})

    @property
    def init_equivalence(self) -> InitEquivalence:
        """Exact, unless later sublayers of a block read less, or sums replace the newest output by its norm."""
        if self.residual == "parallel":
            return InitEquivalence("none", "later sublayers of a block do not read what its earlier ones added")
        if self.source_norm == "rms" and self.post_norm == "none":
            return InitEquivalence("none", "the residual starts as the norm of the newest output")
        return InitEquivalence("exact", "every sum starts as the newest output alone")

    def cost(self, site: SublayerPosition, shape: Shape) -> Cost:
        """One add, and at the first sublayer of a block the sums it reads."""
        add = Cost(elementwise_flops=shape.total_tokens * site.d_model)
        return add + (self.sum_form(site.stack, site.block).cost(shape.total_tokens) if site.opens_block else Cost())

    def ends_cost(self, stack: LayerStack, shape: Shape) -> Cost:
        """The sum after the last block."""
        return self.sum_form(stack, stack.n_blocks).cost(shape.total_tokens)

    def build(self, stack: LayerStack) -> "tuple[list[MUDDFormer], MUDDFormerEnds]":
        """Builds the sums before each block and the last one."""
        return [MUDDFormer(self, site) for site in stack.sites], MUDDFormerEnds(self, stack)


class MUDDFormer(DepthMixer, config=MUDDFormerConfig):
    """See `MUDDFormerConfig`."""

    def __init__(self, config: MUDDFormerConfig, site: SublayerPosition) -> None:
        super().__init__()
        block, sums = site.block, config.sums(site.stack.n_blocks)
        self.opens_block, self.closes_block = site.opens_block, site.closes_block
        self.is_parallel = config.residual == "parallel"
        # Without a sum before it, a parallel block adds to its newest source.
        self.base_is_kept = block not in sums and config.source_norm == "none" and block in read_later(sums, block)
        self.sum = Sum(config.sum_form(site.stack, block)) if site.opens_block else None
        self.splits_views = config.splits_views(site)

    def read(self, state: BlockOutputs, layout: Layout = None, cache: Any = None) -> tuple[Views, Any, Any]:
        """Returns the sums in the first sublayer of a block, later the stream of the block, or its input if parallel."""
        if self.sum is not None:
            ways, sources = self.sum(state)
            return QKV(*ways[:3]) if self.splits_views else ways[0], (sources, ways[-1]), cache
        if not self.is_parallel:
            return state.stream, None, cache
        return state.sources[-1] if self.base_is_kept else state.base[0], None, cache

    def write(self, state: BlockOutputs, update: Stream, context: Views, carry: Any) -> BlockOutputs:
        """Returns the state with the update added to the residual way."""
        sources, base = carry if self.opens_block else (state.sources, state.stream)
        # Under autocast the update may be narrower than the stream that it joins.
        stream = base + update.to(base.dtype)
        if self.closes_block or not self.is_parallel or self.base_is_kept:
            return BlockOutputs(sources, stream)
        return BlockOutputs(sources, stream, (base,) if self.opens_block else state.base)

    def explain(self, done: Read | Write) -> Explanation:
        """Returns the sum of each way, where a block opens that reads sums."""
        if isinstance(done, Write) or self.sum is None:
            return Explanation()
        return self.sum.explain(done.state, (*done.views, done.carry[1]) if self.splits_views else (done.views,))


class MUDDFormerEnds(DepthEnds):
    """The embedding is the first source; the last sum is the final hidden state."""

    def __init__(self, config: MUDDFormerConfig, stack: LayerStack) -> None:
        super().__init__()
        self.sum = Sum(config.sum_form(stack, stack.n_blocks))

    def enter(self, embeddings: Stream, layout: Layout = None, cache: Any = None) -> tuple[BlockOutputs, Any]:
        """Returns the embeddings as the newest output."""
        return BlockOutputs((), embeddings), cache

    def leave(self, state: BlockOutputs, layout: Layout = None, cache: Any = None) -> tuple[Stream, Any]:
        """Returns the sum after the last block, or its output where nothing is summed."""
        ways, _ = self.sum(state)
        return ways[-1], cache

    def explain(self, done: Read) -> Explanation:
        """Returns the last sum, if any."""
        return self.sum.explain(done.state, (done.views,))
