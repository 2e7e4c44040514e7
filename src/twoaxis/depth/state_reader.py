"""Attention of a token to its own earlier states, whose keys and values are in the depth state.

Letters: B batch, T position, D width, H heads, K key width, W numbers in all heads.
"""

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from twoaxis.core.cost import Cost
from twoaxis.core.parameters import Constant, DeclaredModule, Fused, Grows, Normal, matrix_std
from twoaxis.core.views import WeightedSum
from twoaxis.depth.base import Explanation, Stream
from twoaxis.ops.depth_attention import depth_attention, depth_attention_weights
from twoaxis.ops.norm import rms_norm
from twoaxis.ops.precision import statistics_dtype

COMPARED = ("query_gain", "key_gain")
"""Gains of norms, of which a read without a query has the last, and one that compares nothing has none."""


class StreamAndMemory(NamedTuple):
    """The depth state: the stream, and the keys and values of earlier states in the window of later reads."""

    stream: Stream
    keys: tuple[Float[Tensor, "B T H K"], ...]
    values: tuple[Float[Tensor, "B T H K"], ...]


@dataclass(frozen=True)
class StateRead:
    """One read.

    Attributes:
        names: of the states in its window, its own last.
        keeps: keys and values that it keeps for later reads, its own included.
    """

    names: tuple[str, ...] = field(compare=False)
    keeps: int

    @property
    def has_query(self) -> bool:
        """Whether it has a query: over one state the softmax is 1 with any query."""
        return len(self.names) > 1

    @property
    def parts(self) -> int:
        """Matrices that it multiplies with: for values, for a key that is ever compared, for a query."""
        return 1 + (self.has_query or self.keeps > 0) + self.has_query


@dataclass(frozen=True)
class ReaderForm:
    """The form of all reads of a model.

    Attributes:
        d_model: D.
        width: W.
        n_heads: H.
        output: how W_O starts, a zero or a scaled matrix; None takes the heads as they are.
        n_blocks: of the model, which scale the start of W_O.
        adds: whether the read is added to the stream, or takes its place.
        grows: the dimensions of a head that grow with the model.
        norm_eps: eps of every norm.
        states: `normalised` before they are projected, or `raw`.
        qk_norm: `none`, or `head`: norms of queries and keys.
        temperature: `fixed`, or `learned`: a factor on the scores of each head.
    """

    d_model: int
    width: int
    n_heads: int
    output: Literal["zero", "scaled"] | None
    n_blocks: int
    adds: bool
    grows: Grows
    norm_eps: float
    states: Literal["normalised", "raw"]
    qk_norm: Literal["none", "head"]
    temperature: Literal["fixed", "learned"]

    @property
    def head_dim(self) -> int:
        """K."""
        return self.width // self.n_heads

    def params(self, parts: int) -> int:
        """Parameters of this many matrices, and of the output, gains and temperatures if they exist."""
        scales = (parts - 1) * self.head_dim * (self.qk_norm == "head") + self.n_heads * self._learns(parts)
        gain = self.d_model * (self.states == "normalised")
        return (parts + (self.output is not None)) * self.d_model * self.width + gain + scales

    def _learns(self, parts: int) -> bool:
        return self.temperature == "learned" and parts == 3

    def cost(self, read: StateRead, tokens: int, shares: bool) -> Cost:
        """Counts the projections and the attention of one read, with matrices of its own or shared ones."""
        D, W, n, params = self.d_model, self.width, len(read.names), self.params(read.parts)
        return Cost(
            params=0 if shares else params,
            shared_params=params if shares else 0,
            matmul_flops=2 * tokens * D * W * (read.parts + (self.output is not None)),
            elementwise_flops=tokens * (4 * n * W + D * (1 if self.states == "raw" else 5) + W * self._scaling(read.parts)),
        )

    def _scaling(self, parts: int) -> int:
        """Operations for each number of a head: of the norms of query and key, and of the temperature."""
        return 4 * (parts - 1) * (self.qk_norm == "head") + self._learns(parts)


class Reader(DeclaredModule):
    """Reads the stream and its memory, with matrices of its own or of another reader."""

    form: ReaderForm

    def declare(self, parts: int) -> None:
        """Declares the matrices (queries above keys above values; the last `parts` of these three), W_O and the gain."""
        form, D, W = self.form, self.form.d_model, self.form.width
        heads = Fused((W // form.n_heads,) * (parts * form.n_heads))
        # A read joins the stream itself, through W_O if there is one.
        stacked = int(form.output is None or not form.adds)
        each = {"fused": heads, "grows": form.grows, "stacked": stacked}
        self.projection = self.parameter("projection", (parts * W, D), Normal(matrix_std(D)), "matrix", **each)
        if form.output is not None:
            # Not an nn.Linear: hosts initialise those again, which would end the equivalence with the plain model.
            scaled = Normal(matrix_std(W) / math.sqrt(2 * form.n_blocks))
            start = Constant(0.0) if form.output == "zero" else scaled
            self.output = self.parameter("output", (D, W), start, "matrix", stacked=1)
        if form.states == "normalised":
            self.gain = self.parameter("gain", (D,), Constant(1.0), "norm")
        for name in COMPARED[3 - parts :] if form.qk_norm == "head" else ():
            setattr(self, name, self.parameter(name, (form.head_dim,), Constant(1.0), "norm"))
        if form.temperature == "learned" and parts == 3:
            self.temperature = self.parameter("temperature", (form.n_heads,), Constant(1.0), "mixing")

    def prepare_read(self, read: StateRead, owner: "Reader | None" = None) -> None:
        """Sets the constants of one read; its matrices are those of `owner`, or else its own."""
        self.state_read = read
        # In a tuple, so that only its owner registers it.
        self._owner = () if owner is None else (owner,)

    @property
    def matrices(self) -> "Reader":
        """The module that owns the matrices."""
        return self._owner[0] if self._owner else self

    def heads(self, x: Stream) -> list[Float[Tensor, "B T H K"]]:
        """Returns the query and the key, if they exist, and the value."""
        form, parts, matrices = self.form, self.state_read.parts, self.matrices
        context = x if form.states == "raw" else rms_norm(x, matrices.gain, form.norm_eps)
        # A read that needs fewer matrices than the set has leaves out the first ones.
        projected = F.linear(context, matrices.projection[-parts * form.width :]).chunk(parts, dim=-1)
        heads = [part.unflatten(-1, (form.n_heads, -1)).contiguous() for part in projected]
        for place, name in enumerate(COMPARED[3 - parts :] if form.qk_norm == "head" else ()):
            heads[place] = rms_norm(heads[place], getattr(matrices, name), form.norm_eps)
        if form.temperature == "learned" and parts == 3:
            heads[0] = (heads[0] * matrices.temperature.to(statistics_dtype(x)).unsqueeze(-1)).to(heads[0].dtype)
        return heads

    def stream_and_memory(self, state: StreamAndMemory) -> StreamAndMemory:
        """Returns the stream after the read, and the keys and values for the next read."""
        x = state.stream
        *rest, value = self.heads(x)
        mixed, keys, values = value, (), ()
        if rest:
            keys, values = (*state.keys, rest[-1]), (*state.values, value)
            if self.state_read.has_query:
                mixed = depth_attention(rest[0], keys, values)
            keys, values = (past[len(past) - self.state_read.keeps :] for past in (keys, values))
        return StreamAndMemory(self.joined(x, mixed.flatten(2)), keys, values)

    def joined(self, x: Stream, mixed: Float[Tensor, "B T W"]) -> Stream:
        """Returns the stream after the read."""
        update = mixed if self.form.output is None else F.linear(mixed, self.matrices.output)
        update = update.to(x.dtype)
        return x + update if self.form.adds else update

    def explain_read(self, state: StreamAndMemory, made: Tensor) -> Explanation:
        """Returns the mixture of values, per head, before its output projection."""
        if not self.state_read.has_query:
            return Explanation()
        query, key, value = self.heads(state.stream)
        weights = depth_attention_weights(query, (*state.keys, key))
        values = tuple(v.flatten(2) for v in (*state.values, value))
        finish = partial(self.joined, state.stream)
        return Explanation((WeightedSum(made, "read", self.state_read.names, values, weights, finish=finish),))
