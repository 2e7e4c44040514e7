"""Depth attention: before every block each token attends to a causal window of its own earlier states.

Letters: B batch, T position, D width, H heads, K key width, W depth window, S sources, N states that are read, l one of them.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch.nn.functional as F
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.equivalence import InitEquivalence
from twoaxis.core.errors import ConfigError, problem
from twoaxis.core.mixing_design import MixingDesign
from twoaxis.core.parameters import Constant, DeclaredModule, Normal, matrix_std
from twoaxis.core.site import Site, Stack
from twoaxis.core.views import Views
from twoaxis.core.weighted_sum import WeightedSum
from twoaxis.depth.base import DepthConfig, DepthEnds, DepthMixer
from twoaxis.ops.depth_attention import depth_attention, depth_attention_weights
from twoaxis.ops.norm import rms_norm
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
              where z goes: here it enters the stream before the block opens and stays there, and h^(l) is the output of block
              l - 1, before z^(l) is added. Output matrix, norm, heads, window, initial values and a read of h^(L) by the head
              are open too, and options here. No encoding of depth positions, as in the paper
    Shapes:   state ([B T D], up to W-1 times [B T H K] keys and values); softmax in float32 (float64 for float64)
    Init:     EXACT with mode="add" and output_init="zero", the default: W_O = 0 adds nothing and still trains; else NONE
    Cost:     params D + 4*D*H*K once (own: per reader; W = 1: 2*D*H*K, no query and no key; output none: D*H*K fewer), a copy
              on every pipeline rank; per token matmul flops 8*D*H*K per reader and attention flops 4*H*K per source; state
              D + 2*H*K*min(l, W-1) numbers per token; moves 5*D + 2*H*K per source of them per reader, elsewhere 3*D
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
        impl: `fused` or `reference`.

    Raises:
        ConfigError: heads that do not fit the width, or options that exclude each other.

    Example:
        >>> DepthAttentionConfig(window=4).sources(7)
        4
    """

    kind: Literal["depth_attention"] = "depth_attention"
    window: int | None = Field(default=8, ge=1)
    projections: Literal["shared", "own"] = "shared"
    granularity: Literal["block", "sublayer"] = "block"
    mode: Literal["add", "replace"] = "add"
    output: Literal["matrix", "none"] = "matrix"
    output_init: Literal["zero", "scaled"] | None = None
    head: Literal["stream", "read"] = "stream"
    n_heads: int = Field(default=4, ge=1)
    head_dim: int | None = Field(default=None, ge=1)
    states: Literal["normalised", "raw"] = "normalised"
    impl: Impl = "fused"

    unrecorded: ClassVar[Mapping[str, Any]] = {"projections": "own", "granularity": "sublayer"}

    @property
    def design(self) -> MixingDesign:
        """Attention over states: the paper's with one set of matrices and the states between blocks."""
        state = "h_l" if self.granularity == "block" else "x_g"
        whose = state if self.states == "raw" else f"Norm({state})"
        through = " through W_O" if self.output == "matrix" else ""
        # A softmax over one state is 1: what is left is a map.
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

    def n_reads(self, stack: Stack) -> int:
        """Reads in the whole model."""
        return self._read_before(stack, stack.n_sublayers) + (self.head == "read")

    def read_at(self, site: Site) -> int | None:
        """The number of the read before this sublayer, counted from 0; None where there is none."""
        if self.granularity == "sublayer":
            return site.index
        return site.block if site.opens_block else None

    def asks(self, read: int) -> bool:
        """Whether a read has a query: with one source the softmax is 1 whatever it asks."""
        return self.sources(read) > 1

    def kept(self, read: int, stack: Stack) -> int:
        """Keys and values that a read leaves to later ones, its own included."""
        return self.sources(read + 1) - 1 if read + 1 < self.n_reads(stack) else 0

    def parts(self, read: int, stack: Stack) -> int:
        """Matrices that a read multiplies with: for values, for a key that is ever compared, for a query that asks."""
        asks = self.asks(read)
        return 1 + (asks or self.kept(read, stack) > 0) + asks

    def _read_before(self, stack: Stack, index: int) -> int:
        """Reads of sublayers before this one."""
        if self.granularity == "sublayer":
            return index
        if index == stack.n_sublayers:
            return stack.n_blocks
        return stack.sites[index].block + (not stack.sites[index].opens_block)

    def _stands_at(self, read: int, stack: Stack) -> int:
        """The sublayer behind a read; `n_sublayers` is the head."""
        return read if self.granularity == "sublayer" else sum(stack.block_lengths[:read])

    def static_form(self) -> Mapping[str, Any] | None:
        """DenseFormer, which sums earlier outputs with free weights."""
        return {"kind": "denseformer", "granularity": self.granularity}

    @property
    def output_start(self) -> Literal["zero", "scaled"]:
        """Initial value of W_O."""
        return self.output_init or ("zero" if self.mode == "add" else "scaled")

    @property
    def init_equivalence(self) -> InitEquivalence:
        """Exact when the read is added through a zero matrix."""
        if self.mode == "replace":
            return InitEquivalence("none", "the stream is replaced by a random projection of earlier states")
        if self.output == "none" or self.output_start == "scaled":
            return InitEquivalence("none", "a random projection of earlier states is added to the stream")
        return InitEquivalence("exact", "the output projection of the read starts at zero")

    def prepare(self, stack: Stack) -> Stack:
        """Refuses heads that do not divide the width, and without an output matrix those that do not fill it."""
        if self.head_dim is None and stack.d_model % self.n_heads:
            allowed = f"a divisor of d_model={stack.d_model}, or given with a head_dim"
            raise ConfigError(problem("n_heads", self.n_heads, allowed, f"set head_dim, or change n_heads of {self.kind!r}"))
        if self.output == "none" and self.width(stack.d_model) != stack.d_model:
            got, allowed = self.width(stack.d_model), f"d_model={stack.d_model} with output='none'"
            raise ConfigError(problem("n_heads * head_dim", got, allowed, "drop head_dim, or use output='matrix'"))
        return stack

    def cost(self, site: Site, shape: Shape) -> Cost:
        """The projections and the attention over the window, where a read is made, and the write."""
        read, add = self.read_at(site), Cost(elementwise_flops=shape.total_tokens * site.d_model)
        return add if read is None else add + self._read_cost(read, site.stack, shape)

    def ends_cost(self, stack: Stack, shape: Shape) -> Cost:
        """The matrices that all readers share, and the read of the head."""
        shared = Cost(params=self._params(self.most_parts(stack), stack) if self.projections == "shared" else 0)
        return shared + (self._read_cost(self.n_reads(stack) - 1, stack, shape) if self.head == "read" else Cost())

    def most_parts(self, stack: Stack) -> int:
        """Matrices of a set that all readers share; the last read is the one that may ask."""
        return max(self.parts(read, stack) for read in {0, self.n_reads(stack) - 1})

    def _params(self, parts: int, stack: Stack) -> int:
        matrices = parts + (self.output == "matrix")
        return matrices * stack.d_model * self.width(stack.d_model) + stack.d_model * (self.states == "normalised")

    def _read_cost(self, read: int, stack: Stack, shape: Shape) -> Cost:
        D, N, W, n = stack.d_model, shape.total_tokens, self.width(stack.d_model), self.sources(read)
        parts, projects = self.parts(read, stack), self.output == "matrix"
        params = self._params(parts, stack)
        return Cost(
            params=params if self.projections == "own" else 0,
            shared_params=params if self.projections == "shared" else 0,
            matmul_flops=2 * N * D * W * (parts + projects),
            elementwise_flops=N * (4 * n * W + D * (5 if self.states == "normalised" else 1)),
        )

    def build(self, site: Site) -> DepthMixer:
        """Builds the mixer of one sublayer, with matrices of its own.

        Raises:
            ConfigError: matrices that all readers share, which the ends own.
        """
        read = self.read_at(site)
        if read is None:
            return PlainWrite()
        if self.projections == "shared":
            remedy = "build a DepthAxis or a Decoder, which have the ends, or use projections='own'"
            raise ConfigError(problem("projections", self.projections, "'own' for a mixer that is built alone", remedy))
        return DepthAttention(self, site.stack, read, None)

    def build_block(self, sites: Sequence[Site], ends: DepthEnds) -> list[DepthMixer]:
        """Builds the mixers of one block, whose readers use the matrices of the ends when these are shared."""
        if self.projections == "own":
            return [self.build(site) for site in sites]
        assert isinstance(ends, DepthAttentionEnds), "the ends are those that `build_ends` returned"
        reads = [self.read_at(site) for site in sites]
        stack = sites[0].stack
        return [PlainWrite() if read is None else DepthAttention(self, stack, read, ends) for read in reads]

    def build_ends(self, stack: Stack) -> "DepthAttentionEnds":
        """Builds the ends."""
        return DepthAttentionEnds(self, stack)


class StreamAndMemory(NamedTuple):
    """The depth state: the stream, and the keys and values of earlier states that later reads can see."""

    stream: Float[Tensor, "B T D"]
    keys: tuple[Float[Tensor, "B T H K"], ...]
    values: tuple[Float[Tensor, "B T H K"], ...]


class Reader(DeclaredModule):
    """Reads the stream and its memory, with matrices of its own or with those of a lender."""

    config: DepthAttentionConfig

    def declare(self, stack: Stack, parts: int) -> None:
        """Declares the matrices (queries above keys above values; the last `parts` of these three), W_O and the gain."""
        config, D, W = self.config, stack.d_model, self.config.width(stack.d_model)
        self.projection = self.parameter("projection", (parts * W, D), Normal(matrix_std(D)), "matrix")
        if config.output == "matrix":
            # Not an nn.Linear: a host that fills those anew would end the equivalence with the plain model.
            scaled = Normal(matrix_std(W) / math.sqrt(2 * stack.n_blocks))
            start = Constant(0.0) if config.output_start == "zero" else scaled
            self.output = self.parameter("output", (D, W), start, "matrix")
        if config.states == "normalised":
            self.gain = self.parameter("gain", (D,), Constant(1.0), "norm")

    def prepare_read(self, stack: Stack, read: int, lender: "Reader | None" = None) -> None:
        """Sets the constants of one read; its matrices are those of the lender, or else its own."""
        config = self.config
        self.eps, self.parts, self.keeps = stack.norm_eps, config.parts(read, stack), config.kept(read, stack)
        self.asks = config.asks(read)
        self.names = tuple(_state_name(config, i) for i in range(read + 1 - config.sources(read), read + 1))
        # In a tuple, a module stays with the one that lends it.
        self._lender = () if lender is None else (lender,)

    @property
    def matrices(self) -> "Reader":
        """The module that owns the matrices."""
        return self._lender[0] if self._lender else self

    def heads(self, x: Float[Tensor, "B T D"]) -> list[Float[Tensor, "B T H K"]]:
        """The query and the key, where there are such, and the value."""
        config, matrices = self.config, self.matrices
        context = rms_norm(x, matrices.gain, self.eps) if config.states == "normalised" else x
        # A read that needs fewer matrices than the set has leaves out the first ones.
        rows = self.parts * config.width(x.shape[-1])
        parts = F.linear(context, matrices.projection[-rows:]).chunk(self.parts, dim=-1)
        return [part.unflatten(-1, (config.n_heads, -1)).contiguous() for part in parts]

    def stream_and_memory(self, state: StreamAndMemory) -> StreamAndMemory:
        """The stream with what is read, and the keys and values for the next read."""
        x = state.stream
        *asking, value = self.heads(x)
        mixed, keys, values = value, (), ()
        if asking:
            keys, values = (*state.keys, asking[-1]), (*state.values, value)
            if self.asks:
                mixed = depth_attention(asking[0], keys, values, self.config.impl)
            keys, values = (past[len(past) - self.keeps :] for past in (keys, values))
        return StreamAndMemory(self.joined(x, mixed.flatten(2)), keys, values)

    def joined(self, x: Float[Tensor, "B T D"], mixed: Float[Tensor, "B T W"]) -> Float[Tensor, "B T D"]:
        """The stream with what is read."""
        update = F.linear(mixed, self.matrices.output) if self.config.output == "matrix" else mixed
        update = update.to(x.dtype)
        return x + update if self.config.mode == "add" else update

    def sums(self, state: StreamAndMemory, made: Tensor) -> tuple[WeightedSum, ...]:
        """The mixture of values, per head, before its output projection."""
        if not self.asks:
            return ()
        query, key, value = self.heads(state.stream)
        weights = depth_attention_weights(query, (*state.keys, key))
        values = tuple(v.flatten(2) for v in (*state.values, value))
        return (WeightedSum(made, "read", self.names, values, weights, finish=partial(self.joined, state.stream)),)


def _state_name(config: DepthAttentionConfig, i: int) -> str:
    if i == 0:
        return "embedding"
    return f"state at {i}" if config.granularity == "sublayer" else f"state after block {i - 1}"


class DepthAttention(Reader, DepthMixer, config=DepthAttentionConfig):
    """See `DepthAttentionConfig`: the mixer of a sublayer that reads.

    Args:
        config: the options.
        stack: all sublayers.
        read: the number of this read, counted from 0.
        lender: the ends, when all readers share their matrices.
    """

    def __init__(self, config: DepthAttentionConfig, stack: Stack, read: int, lender: Reader | None) -> None:
        super().__init__()
        self.config = config
        self.prepare_read(stack, read, lender)
        if lender is None:
            self.declare(stack, self.parts)

    def read(self, state: StreamAndMemory) -> tuple[Float[Tensor, "B T D"], StreamAndMemory]:
        """Returns the stream with what is read, as the view and, with the memory after it, as the carry."""
        carry = self.stream_and_memory(state)
        return carry.stream, carry

    def read_sums(
        self, state: StreamAndMemory, views: Float[Tensor, "B T D"], carry: StreamAndMemory
    ) -> tuple[WeightedSum, ...]:
        """The mixture of values, per head, before its output projection."""
        return self.sums(state, views)

    def write(
        self, state: StreamAndMemory, update: Float[Tensor, "B T D"], context: Views, carry: StreamAndMemory
    ) -> StreamAndMemory:
        """Returns the stream plus the update, and the memory that the read has left."""
        return carry._replace(stream=carry.stream + update)


class PlainWrite(DepthMixer):
    """A sublayer between two reads: it sees the stream and adds to it."""

    def read(self, state: StreamAndMemory) -> tuple[Float[Tensor, "B T D"], None]:
        """Returns the stream."""
        return state.stream, None

    def write(self, state: StreamAndMemory, update: Float[Tensor, "B T D"], context: Views, carry: None) -> StreamAndMemory:
        """Returns the stream plus the update, and the memory as it was."""
        return state._replace(stream=state.stream + update)


class DepthAttentionEnds(Reader, DepthEnds):
    """The stream starts as the embeddings without a memory; the matrices that all readers share live here."""

    def __init__(self, config: DepthAttentionConfig, stack: Stack) -> None:
        super().__init__()
        self.config, self.lends = config, config.projections == "shared"
        last = config.n_reads(stack) - 1
        if self.lends:
            self.declare(stack, config.most_parts(stack))
        elif config.head == "read":
            self.declare(stack, config.parts(last, stack))
        if config.head == "read":
            self.prepare_read(stack, last)

    def enter(self, embeddings: Float[Tensor, "B T D"]) -> StreamAndMemory:
        """Returns the embeddings and an empty memory."""
        return StreamAndMemory(embeddings, (), ())

    def leave(self, state: StreamAndMemory) -> Float[Tensor, "B T D"]:
        """Returns the stream, with what the head reads where it does."""
        return self.stream_and_memory(state).stream if self.config.head == "read" else state.stream

    def leave_sums(self, state: StreamAndMemory, left: Float[Tensor, "B T D"]) -> tuple[WeightedSum, ...]:
        """The mixture of values that the head reads."""
        return self.sums(state, left) if self.config.head == "read" else ()
