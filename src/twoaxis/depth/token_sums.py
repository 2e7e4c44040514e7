"""Sums of block outputs with weights computed from the token, one sum for each way of a block.

Letters: B batch, T position, D width, S sources of one sum, C ways (sums), K hidden width.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from twoaxis.core.cost import Cost
from twoaxis.core.parameters import Constant, DeclaredModule, Normal, Values
from twoaxis.core.views import WeightedSum, per_token
from twoaxis.depth.base import Explanation, Stream
from twoaxis.depth.history import Selection
from twoaxis.ops.mix import mix
from twoaxis.ops.norm import rms_norm
from twoaxis.ops.precision import Impl
from twoaxis.ops.weight_mlp import GELUForm, weight_mlp

POST_GAIN = 1e-3
"""The start of the gains of the norm after a sum."""


class BlockOutputs(NamedTuple):
    """The depth state.

    Attributes:
        sources: the block outputs (or their norms) that later sums read, oldest first; the embedding is the first of all.
        stream: between blocks the newest output as it is; inside a block the stream so far.
        base: inside a parallel block its residual input, unless that is the newest source; else empty.
    """

    sources: tuple[Stream, ...]
    stream: Stream
    base: tuple[Stream, ...] = ()


@dataclass(frozen=True)
class SumForm:
    """How the sums after one block are made.

    Attributes:
        selection: outputs that are summed here, and those that later sums read.
        names: of the outputs that are summed.
        n_ways: C.
        hidden: K, or 0 where the weights are static.
        norms_newest: whether the newest output is normalised here, as a source.
        gained: whether the norm before the hidden layer has a gain.
        n_post_normed: number of last ways whose sum is normalised and added to the newest output.
        weight_eps: of the norm before the hidden layer.
        norm_eps: of the other norms.
        d_model: D.
        gelu: of the hidden layer.
        impl: `fused` or `reference`.
    """

    selection: Selection
    names: tuple[str, ...] = field(compare=False)
    n_ways: int
    hidden: int
    norms_newest: bool
    gained: bool
    n_post_normed: int
    weight_eps: float
    norm_eps: float
    d_model: int
    gelu: GELUForm
    impl: Impl

    def cost(self, tokens: int) -> Cost:
        """Counts the norm of the newest source and the sums."""
        D, N, S, C, K, P = self.d_model, tokens, len(self.names), self.n_ways, self.hidden, self.n_post_normed
        M, normed = C * S, self.norms_newest
        cost = Cost(params=D * normed + M, elementwise_flops=N * D * (4 * normed + 2 * M))
        if S and P:
            cost += Cost(params=P * D, elementwise_flops=N * D * (4 * P + C))
        if not S or not K:
            return cost
        maps = K * (D + M)
        return cost + Cost(maps + D * self.gained, 2 * N * maps, elementwise_flops=N * (3 * D + 9 * K + M))


class Sum(DeclaredModule):
    """The read after one block: a norm of its output where sources have one, and a sum for each way."""

    def __init__(self, form: SumForm) -> None:
        super().__init__()
        self.form, D, C, S, K = form, form.d_model, form.n_ways, len(form.selection.read), form.hidden
        if form.norms_newest:
            self.source_gain = self.parameter("source_gain", (D,), Constant(1.0), "norm")
        if not S:
            return
        newest = 0.0 if form.n_post_normed else 1.0
        self.static = self.parameter("static", (C, S), Values((*(0.0,) * (S - 1), newest) * C), "mixing", stacked=2)
        if K:
            self.to_hidden = self.parameter("to_hidden", (K, D), Normal(D**-0.5), "mixing", grows="inputs")
            self.to_weights = self.parameter("to_weights", (C * S, K), Constant(0.0), "mixing", stacked=2)
            self.input_gain = self.parameter("input_gain", (D,), Constant(1.0), "norm") if form.gained else None
        if form.n_post_normed:
            self.post_gain = self.parameter("post_gain", (form.n_post_normed, D), Constant(POST_GAIN), "norm", stacked=1)

    def forward(self, state: BlockOutputs) -> tuple[tuple[Stream, ...], tuple[Stream, ...]]:
        """Returns the input of each way, or the newest output alone where nothing is summed, and the sources to keep."""
        held, newest = self._held(state), state.stream
        read, kept = (tuple(held[index] for index in some) for some in self.form.selection)
        if not read:
            return (newest,), kept
        ways = mix(read, self.weights(newest))
        return tuple(self._joined(c, way, newest) for c, way in enumerate(ways)), kept

    def explain(self, state: BlockOutputs, made: Sequence[Tensor]) -> Explanation:
        """Returns the sums with their weights, one for each way, before their norms; nothing where nothing is summed."""
        form, held, newest = self.form, self._held(state), state.stream
        if not form.selection.read:
            return Explanation()
        sources = tuple(held[index] for index in form.selection.read)
        results = ("q", "k", "v", "residual") if form.n_ways > 1 else ("read",)
        found = []
        for c, (tensor, result, weights) in enumerate(zip(made, results, self.weights(newest), strict=True)):
            finish = partial(self._joined, c, newest=newest)
            found.append(WeightedSum(tensor, result, form.names, sources, per_token(weights, newest), finish=finish))
        return Explanation(tuple(found))

    def _held(self, state: BlockOutputs) -> tuple[Stream, ...]:
        """The outputs in the state and the newest output, normalised where sources are."""
        x, form = state.stream, self.form
        return (*state.sources, rms_norm(x, self.source_gain, form.norm_eps, form.impl) if form.norms_newest else x)

    def weights(self, newest: Stream) -> Float[Tensor, "C S *each"]:
        """Returns the weight of every source in every way: one number for each token, or one for all if static."""
        form = self.form
        if not form.hidden:
            return self.static
        inputs = (newest, self.to_hidden, self.to_weights, self.static.flatten(), self.input_gain)
        return weight_mlp(*inputs, form.weight_eps, form.gelu, form.impl).unflatten(0, self.static.shape)

    def _joined(self, c: int, way: Tensor, newest: Tensor) -> Tensor:
        """The sum of way c, or with post-norms the newest output plus that sum, normalised if the way has a post-norm."""
        form = self.form
        if not form.n_post_normed:
            return way
        normed = c - (form.n_ways - form.n_post_normed)
        return newest + (way if normed < 0 else rms_norm(way, self.post_gain[normed], form.norm_eps, form.impl))
