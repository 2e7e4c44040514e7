"""Depth attention: before every block each token attends to a causal window of its own earlier states.

Letters: B batch, T position, D width, H heads, K key width, W depth window, S sources, N states that are read, l one of them.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.design import InitEquivalence, MixingDesign
from twoaxis.core.errors import ConfigError, problem
from twoaxis.core.position import LayerStack, SublayerPosition
from twoaxis.core.views import Views
from twoaxis.depth.base import Controls, DepthConfig, DepthEnds, DepthMixer, Explanation, Layout, Read, Stream, Write
from twoaxis.depth.history import Granularity, StreamWrite, n_units, unit_of
from twoaxis.depth.state_reader import Reader, ReaderForm, StateRead, StreamAndMemory
from twoaxis.ops.precision import Impl


class DepthAttentionConfig(DepthConfig):
    """Attends, token by token, to the last W states between blocks: ShortSWA with depth as the position.

    Equation: c_l = [Norm](h^(l)),  q_l = W_Q c_l,  k_i = W_K c_i,  v_i = W_V c_i for i in [max(0, l-W+1), l],
              z^(l) = concat_heads(sum_i softmax_i(q_l^T k_i / sqrt(K)) v_i),
              u = [h^(l) +] [W_O] z^(l),  h^(l+1) = block_l(u); h^(0) is the embedding
    Source:   Residual Stream Duality, arXiv:2603.16039, section 2.2; no code is public
    Deviates: with projections="shared" and granularity="block", z^(l) is the paper's; states="raw" reads h^(l) itself, as in
              the paper's equation, the default a normalised h^(l), as in its Algorithm 1. "own" is another operator, no
              instance of section 2.2: the reader of h^(l) makes q_l, k_l and v_l with its own matrices. The paper leaves open
              where z is added: here to the stream before the block, where it stays, and h^(l) is the output of block
              l - 1, before z^(l) is added. Output matrix, norm, heads, window, initial values and a read of h^(L) by the head
              are open too, and options here. No encoding of depth positions, as in the paper
    Shapes:   state ([B T D], up to W-1 times [B T H K] keys and values); softmax in float32 (float64 for float64)
    Init:     EXACT with mode="add" and output_init="zero", the default: W_O = 0 adds nothing and still trains; else NONE
    Cost:     params D + 4*D*H*K once (own: per reader; W = 1: 2*D*H*K, no query and no key; output none: D*H*K fewer), 2*K with
              qk_norm, H with a learned temperature, a copy on every pipeline rank; per token matmul flops 8*D*H*K per reader
              and attention flops 4*H*K per source; state D + 2*H*K*min(l, W-1) numbers per token
    Published: the paper measures nothing; it argues that this read costs O(T W L D) and a retained history

    Args:
        window: states read, the reader's own included; None reads all of them.
        projections: `shared`: one set of matrices for the whole model; `own`: one set for each reader.
        granularity: the states that are read: those between blocks, or those before each `sublayer`.
        mode: `add` the read to the stream, or `replace` the stream by it.
        output: z through a `matrix` W_O, or as it is (`none`), which takes heads as wide as the model.
        output_init: W_O starts at `zero`, or `scaled`; None means zero with mode="add", else scaled.
        head: sees the last `stream`, or makes a `read` of its own before the final norm.
        n_heads: heads H.
        head_dim: K; None means d_model / n_heads.
        states: `normalised` (with a gain) before they are projected, or `raw`.
        qk_norm: `none`, or an RMSNorm of the query and the key of each `head`, with a gain for all heads.
        temperature: of the softmax: `fixed`, or `learned`: a factor on the scores of each head, 1 at first.
        impl: `fused` or `reference`; the same computation, since the plain form is as fast.

    Raises:
        ConfigError: heads that do not fit the width, or options that exclude each other.

    Example:
        >>> DepthAttentionConfig(window=4).sources(7)
        4
    """

    kind: Literal["depth_attention"] = "depth_attention"
    window: int | None = Field(default=8, ge=1)
    projections: Literal["shared", "own"] = "shared"
    granularity: Granularity = "block"
    mode: Literal["add", "replace"] = "add"
    output: Literal["matrix", "none"] = "matrix"
    output_init: Literal["zero", "scaled"] | None = None
    head: Literal["stream", "read"] = "stream"
    n_heads: int = Field(default=4, ge=1)
    head_dim: int | None = Field(default=None, ge=1)
    states: Literal["normalised", "raw"] = "normalised"
    qk_norm: Literal["none", "head"] = "none"
    temperature: Literal["fixed", "learned"] = "fixed"
    impl: Impl = "fused"

    unrecorded: ClassVar[Mapping[str, Any]] = {"projections": "own", "granularity": "sublayer"}

    @property
    def design(self) -> MixingDesign:
        """Attention over states: the paper's with one set of matrices and the states between blocks."""
        state = "h_l" if self.granularity == "block" else "x_g"
        whose = state if self.states == "raw" else f"Norm({state})"
        through = " through W_O" if self.output == "matrix" else ""
        # A softmax over one state is 1, so that only the map of values remains.
        one = self.window == 1
        return MixingDesign(
            query="none" if one else f"W_Q {whose}",
            key="none" if one else f"W_K {whose}",
            value=f"W_V {whose}",
            normaliser="softmax" if not one else "none" if self.states == "raw" else "norm of the state",
            window="all" if self.window is None else "own state" if one else "last K states",
            sharing="model" if self.projections == "shared" else self.granularity,
            injection=("added to the stream" if self.mode == "add" else "replaces the stream") + through,
            weights="static" if one else "input and reader",
            literal=self.projections == "shared" and self.granularity == "block",
        )

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        if self.window == 1:
            self.refuse_options(("qk_norm", "temperature"), " with window=1, where no key is compared", "remove it")
        if self.output == "none" and self.output_init is not None:
            allowed = "left out with output='none'"
            raise ConfigError(problem("output_init", self.output_init, allowed, "drop it, or use output='matrix'"))
        if self.mode == "replace" and self.output_init == "zero":
            allowed = "'scaled' with mode='replace', where zero would end every gradient"
            raise ConfigError(problem("output_init", self.output_init, allowed, "drop it, or use mode='add'"))
        return self

    def sources(self, read: int) -> int:
        """States that a read sees, its own included."""
        return read + 1 if self.window is None else min(read + 1, self.window)

    def width(self, d_model: int) -> int:
        """Numbers in all heads of one query, key or value."""
        return self.n_heads * (self.head_dim or d_model // self.n_heads)

    def reads(self, stack: LayerStack) -> tuple[StateRead, ...]:
        """All reads of the model, that of the head last if there is one."""
        return tuple(self._read(number, stack) for number in range(self._count(stack)))

    def _count(self, stack: LayerStack) -> int:
        return n_units(stack, self.granularity) + (self.head == "read")

    def _read(self, number: int, stack: LayerStack) -> StateRead:
        after, first = ("state at {}", 0) if self.granularity == "sublayer" else ("state after block {}", 1)
        seen = range(number + 1 - self.sources(number), number + 1)
        keeps = self.sources(number + 1) - 1 if number + 1 < self._count(stack) else 0
        return StateRead(tuple(after.format(i - first) if i else "embedding" for i in seen), keeps)

    def read_at(self, site: SublayerPosition) -> StateRead | None:
        """The read before this sublayer; None where there is none."""
        unit = unit_of(site, self.granularity)
        return self._read(unit.number, site.stack) if unit.opens else None

    def form(self, stack: LayerStack) -> ReaderForm:
        """The form of every reader of this model."""
        start = self.output_init or ("zero" if self.mode == "add" else "scaled")
        return ReaderForm(
            d_model=stack.d_model,
            width=self.width(stack.d_model),
            n_heads=self.n_heads,
            output=start if self.output == "matrix" else None,
            n_blocks=stack.initial_blocks,
            adds=self.mode == "add",
            grows="both" if self.head_dim is None else "inputs",
            norm_eps=stack.norm_eps,
            states=self.states,
            qk_norm=self.qk_norm,
            temperature=self.temperature,
        )

    def controls(self) -> Controls:
        """DenseFormer, which sums earlier outputs with free weights, and of several heads other scales of scores."""
        static = {"kind": "denseformer", "granularity": self.granularity}
        if self.n_heads == 1 or self.window == 1:
            return Controls(static)
        temperature = {**self.to_data(), "temperature": "fixed" if self.temperature == "learned" else "learned"}
        qk_norm = {**self.to_data(), "qk_norm": "none" if self.qk_norm == "head" else "head"}
        return Controls(static, temperature=temperature, qk_norm=qk_norm)

    @property
    def init_equivalence(self) -> InitEquivalence:
        """Exact when the read is added through a zero matrix."""
        if self.mode == "replace":
            return InitEquivalence("none", "the stream is replaced by a random projection of earlier states")
        if self.output == "none" or self.output_init == "scaled":
            return InitEquivalence("none", "a random projection of earlier states is added to the stream")
        return InitEquivalence("exact", "the output projection of the read starts at zero")

    def prepare(self, stack: LayerStack) -> LayerStack:
        """Refuses heads that do not divide the width, and without an output matrix those that do not fill it."""
        if self.head_dim is None and stack.d_model % self.n_heads:
            allowed = f"a divisor of d_model={stack.d_model}, or given with a head_dim"
            raise ConfigError(problem("n_heads", self.n_heads, allowed, f"set head_dim, or change n_heads of {self.kind!r}"))
        if self.output == "none" and self.width(stack.d_model) != stack.d_model:
            got, allowed = self.width(stack.d_model), f"d_model={stack.d_model} with output='none'"
            raise ConfigError(problem("n_heads * head_dim", got, allowed, "drop head_dim, or use output='matrix'"))
        return stack

    def cost(self, site: SublayerPosition, shape: Shape) -> Cost:
        """The projections and the attention over the window where there is a read, and the write."""
        read, add = self.read_at(site), Cost(elementwise_flops=shape.total_tokens * site.d_model)
        if read is None:
            return add
        return add + self.form(site.stack).cost(read, shape.total_tokens, shares=self.projections == "shared")

    def ends_cost(self, stack: LayerStack, shape: Shape) -> Cost:
        """The matrices that all readers share, and the read of the head."""
        reads, form, shares = self.reads(stack), self.form(stack), self.projections == "shared"
        cost = Cost(params=form.params(max(read.parts for read in reads)) if shares else 0)
        return cost + (form.cost(reads[-1], shape.total_tokens, shares) if self.head == "read" else Cost())

    def build(self, stack: LayerStack) -> "tuple[Sequence[DepthMixer], DepthAttentionEnds]":
        """Builds a reader for each state, with matrices of its own or with those of the ends."""
        ends = DepthAttentionEnds(self, stack)
        owner = ends if self.projections == "shared" else None
        mixers = [StreamWrite() if self.read_at(site) is None else DepthAttention(self, site, owner) for site in stack.sites]
        return mixers, ends


class DepthAttention(Reader, DepthMixer, config=DepthAttentionConfig):
    """See `DepthAttentionConfig`: the mixer of a sublayer that reads.

    Args:
        config: the options.
        site: of the sublayer.
        owner: the ends, when all readers share their matrices.
    """

    def __init__(self, config: DepthAttentionConfig, site: SublayerPosition, owner: Reader | None) -> None:
        super().__init__()
        self.form, read = config.form(site.stack), config.read_at(site)
        assert read is not None, "a sublayer that reads nothing adds to the stream alone"
        self.prepare_read(read, owner)
        if owner is None:
            self.declare(read.parts)

    @classmethod
    def build_alone(cls, config: Any, site: SublayerPosition) -> DepthMixer:
        """Builds the mixer of one sublayer, with matrices of its own.

        Raises:
            ConfigError: matrices that all readers share, which the ends own.
        """
        if config.projections == "shared" and config.read_at(site) is not None:
            remedy = "build a DepthAxis or a Decoder, which have the ends, or use projections='own'"
            raise ConfigError(problem("projections", config.projections, "'own' for a mixer that is built alone", remedy))
        return super().build_alone(config, site)

    def read(self, state: StreamAndMemory, layout: Layout = None, cache: Any = None) -> tuple[Stream, StreamAndMemory, Any]:
        """Returns the stream after the read as the view, and the stream and the next memory as the carry."""
        carry = self.stream_and_memory(state)
        return carry.stream, carry, cache

    def write(self, state: StreamAndMemory, update: Stream, context: Views, carry: StreamAndMemory) -> StreamAndMemory:
        """Returns the stream plus the update, and the memory after the read."""
        return carry._replace(stream=carry.stream + update)

    def explain(self, done: Read | Write) -> Explanation:
        """Returns the mixture of values, per head, before its output projection."""
        return Explanation() if isinstance(done, Write) else self.explain_read(done.state, done.views)


class DepthAttentionEnds(Reader, DepthEnds):
    """The stream starts as the embeddings without a memory; the ends own the matrices that all readers share."""

    def __init__(self, config: DepthAttentionConfig, stack: LayerStack) -> None:
        super().__init__()
        self.config, self.form, self.shares_parameters = config, config.form(stack), config.projections == "shared"
        reads = config.reads(stack)
        if self.shares_parameters:
            self.declare(max(read.parts for read in reads))
        elif config.head == "read":
            self.declare(reads[-1].parts)
        if config.head == "read":
            self.prepare_read(reads[-1])

    def enter(self, embeddings: Stream, layout: Layout = None, cache: Any = None) -> tuple[StreamAndMemory, Any]:
        """Returns the embeddings and an empty memory."""
        return StreamAndMemory(embeddings, (), ()), cache

    def leave(self, state: StreamAndMemory, layout: Layout = None, cache: Any = None) -> tuple[Stream, Any]:
        """Returns the stream, after the read of the head if there is one."""
        return self.stream_and_memory(state).stream if self.config.head == "read" else state.stream, cache

    def explain(self, done: Read) -> Explanation:
        """Returns the mixture of values in the read of the head, if there is one."""
        return self.explain_read(done.state, done.views) if self.config.head == "read" else Explanation()
