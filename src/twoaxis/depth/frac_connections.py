"""Frac-Connections: the residual stream cut into fractions, between which every sublayer reads, mixes and writes.

Letters: B batch, T position, D width, n streams, m fractions of a stream, P = n m pieces, C columns of weights.
"""

from typing import Any, Literal, Self

import torch
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.design import InitEquivalence, MixingDesign
from twoaxis.core.errors import ConfigError, problem
from twoaxis.core.parameters import Constant, DeclaredModule, Fused, Values
from twoaxis.core.position import LayerStack, SublayerPosition
from twoaxis.core.views import WeightedSum
from twoaxis.depth.base import Controls, DepthConfig, Layout, Stream
from twoaxis.depth.streams import Mixing, ParallelEnds, Streams, StreamsMixer
from twoaxis.ops.hyper_read import ScoreRule, hyper_read, hyper_weights
from twoaxis.ops.precision import Impl, outside_autocast, statistics_dtype
from twoaxis.ops.streams import mix_pieces, piece_names, pieces_of

LAYER_EPS = 1e-5


class FracConnectionsConfig(DepthConfig):
    """Cuts each residual stream into m fractions; a sublayer reads, mixes and writes them with a matrix over fractions.

    Equation: u_f = sum_j Y_jf X_j,  X'_i = B_i y_i + sum_j A_ji X_j,  y = f(Norm(u)) cut as X, u joined again (paper)
              lucidrains, over the pieces of n streams: X'_(s,f) = sum_g B_g(s,f) y_g + sum_j A_j(s,f) X_j, h = sum of streams
              dynamic, from x_j = norm(X_j): Y, A += s_a tanh(w^T x_j), B_i += s_b tanh(w_b^T x_i), in lucidrains' form
              B_g(s,f) += s_b tanh(w_f^T x_(s,g)); all pieces share the maps w; Y and A are [source, destination]
    Source:   Frac-Connections, arXiv:2503.14125; lucidrains/hyper-connections 0.4.11 with num_fracs > 1
    Deviates: paper: none that we know; no authors' code was found to compare with. Its norm is taken from its models, LayerNorm
              without gain and bias; s_a scales Y and A alike, as in Hyper-Connections; decay is not published, here the
              maps alone decay. lucidrains' package builds its static weights as [read | residual] columns and uses them as
              (fraction, [read, residual]); the tensors here follow the use, and start as that construction makes them
    Shapes:   state n times [B T D]; update [B T D] -> state; scores, tanh and weights in float32, streams rounded once
    Init:     EXACT (paper): Y = A = I, B = 1, maps 0. NONE (lucidrains with m > 1), by the layout above
    Cost:     params P*(P + m + 1) per sublayer, dynamic C*D/m + 2 more with C = 2*m + 1 (lucidrains: 2*m + P, and D/m for its
              gain); flops 2*D/m per weight and token, and for dynamic ones 2*C*D and 3*D or 4*D per stream; without mixing
              P*P weights and P of C less; state n*D numbers per token, which is that of the plain model for the paper's n = 1;
              nothing carried from token to token
    Published: OLMoE-7B with m = 4, arXiv:2503.14125: loss 0.012 below plain, average accuracy 68.30 -> 68.65; OLMo2-1B
              62.5 -> 63.2; Hyper-Connections with 4 streams converge faster

    Args:
        n_fractions: fractions of each stream; must divide d_model. The paper's choice is 4.
        form: `paper` (diagonal B), or `lucidrains` (every fraction of the update is added to every piece).
        n_streams: streams that are cut, 1 in the paper. More of them are Hyper-Connections between fractions, which belong here
            and not to `hyper_connections`, since it is the fractions that make weights a matrix over pieces.
        weights: `dynamic` adds a number to each weight that depends on the token; `static` weights are parameters alone.
        scale_init: start of s_a and s_b.
        residual: A is `free`, or the `identity`, with which pieces are read and written alike but never mixed.
        impl: `fused` or `reference`.

    Raises:
        ConfigError: fractions that do not divide d_model, or several streams in the paper's form.

    Example:
        >>> FracConnectionsConfig(n_fractions=2).init_equivalence.relation
        'exact'
    """

    kind: Literal["frac_connections"] = "frac_connections"
    n_fractions: int = Field(default=4, ge=1)
    form: Literal["paper", "lucidrains"] = "paper"
    n_streams: int = Field(default=1, ge=1)
    weights: Literal["dynamic", "static"] = "dynamic"
    scale_init: float = 0.01
    residual: Literal["free", "identity"] = "free"
    impl: Impl = "fused"

    @property
    def design(self) -> MixingDesign:
        """Weights between fractions, each plus a number that depends on the token."""
        dynamic = self.weights == "dynamic"
        return MixingDesign(
            query="parameter maps" if dynamic else "none",
            key="norm(fraction)" if dynamic else "none",
            value="fractions of S_j",
            normaliser="none: b + s tanh(score)" if dynamic else "none",
            window="own state",
            sharing="sublayer",
            injection="written to fractions",
            weights="input and reader" if dynamic else "static",
        )

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        if self.form == "paper" and self.n_streams > 1:
            allowed = "1 in the paper's form"
            raise ConfigError(problem("n_streams", self.n_streams, allowed, "set form='lucidrains' or n_streams=1"))
        if self.weights == "static":
            reason, remedy = ", since static weights have no scores", "remove it or use weights='dynamic'"
            self.refuse_options(("scale_init",), reason, remedy)
        return self

    def prepare(self, stack: LayerStack) -> LayerStack:
        """Refuses fractions that do not divide d_model."""
        if stack.d_model % self.n_fractions:
            allowed = f"a divisor of d_model={stack.d_model}"
            raise ConfigError(problem("n_fractions", self.n_fractions, allowed, "change either of them"))
        return stack

    @property
    def pieces(self) -> int:
        """Fractions of all streams."""
        return self.n_streams * self.n_fractions

    @property
    def columns(self) -> tuple[int, ...]:
        """Weights of each piece: as a source of the read, as a source of each piece if they mix, and for the write."""
        mixing = (self.pieces,) if self.residual == "free" else ()
        return (self.n_fractions, *mixing, 1 if self.form == "paper" else self.n_fractions)

    def controls(self) -> Controls:
        """The same with static weights, and the same without mixing."""
        static = {**self.to_data(), "weights": "static"} if self.weights == "dynamic" else None
        unmixed = {**self.to_data(), "residual": "identity"} if self.residual == "free" and self.pieces > 1 else None
        return Controls(static, streams=self.n_streams, unmixed=unmixed)

    @property
    def init_equivalence(self) -> InitEquivalence:
        """Exact in the paper's form."""
        if self.form == "lucidrains" and self.n_fractions > 1:
            return InitEquivalence("none", "the package fills its static weights in another order than it uses them")
        if self.n_streams > 1:
            return InitEquivalence("up_to_norm", "all streams are copies of the plain one, and their sum is n times as large")
        return InitEquivalence("exact", "every fraction is read, kept and written with weight 1, and no other one")

    def cost(self, site: SublayerPosition, shape: Shape) -> Cost:
        """One read, one mixing write and, for dynamic weights, their scores."""
        m, P, C, N = self.n_fractions, self.pieces, sum(self.columns), shape.total_tokens
        E, mixed = site.d_model // m, P * P if self.residual == "free" else 0
        writes = P if self.form == "paper" else m * P
        static = Cost(params=mixed + P * (m + 1), elementwise_flops=2 * E * N * (P * m + mixed + writes))
        if self.weights == "static":
            return static
        learns = self.form == "lucidrains"
        return static + Cost(
            params=C * E + 2 + (E if learns else 0),
            matmul_flops=2 * C * E * P * N,
            elementwise_flops=N * P * ((3 if learns else 4) * E + 4 * C),
        )

    def ends_cost(self, stack: LayerStack, shape: Shape) -> Cost:
        """The sum of the streams."""
        return Cost(elementwise_flops=(self.n_streams - 1) * stack.d_model * shape.total_tokens)

    def build(self, stack: LayerStack) -> "tuple[list[FracConnections], ParallelEnds]":
        """Builds the weights of each sublayer."""
        mixers = [FracConnections(self, site) for site in stack.sites]
        return mixers, ParallelEnds(self.n_streams, self.n_fractions)


class FracConnections(StreamsMixer, config=FracConnectionsConfig):
    """See `FracConnectionsConfig`; the fractions are contiguous slices of the streams."""

    def __init__(self, config: FracConnectionsConfig, site: SublayerPosition) -> None:
        super().__init__(config.impl, config.n_fractions)
        P, m = config.pieces, config.n_fractions
        read, residual = _starts(config, site.index)
        # The update has one row of weights, or one row for each of its fractions.
        self.rows = 1 if config.form == "paper" else m
        self.read_weights = self.parameter("read_weights", (P, m), Values(read), "mixing")
        mixes, start = config.residual == "free", Values(residual)
        self.residual_weights = self.parameter("residual_weights", (P, P), start, "mixing", stacked=1) if mixes else None
        self.write_weights = self.parameter("write_weights", (P,), Constant(1.0), "mixing")
        self.dynamic = DynamicFractions(config, site.d_model) if config.weights == "dynamic" else None

    @property
    def _static(self) -> tuple[Tensor, Tensor | None, Tensor]:
        return self.read_weights, self.residual_weights, self.write_weights

    def read(self, state: Streams, layout: Layout = None, cache: Any = None) -> tuple[Stream, Mixing, Any]:
        """Returns the fractions that are read, concatenated, and the streams and weights for the write."""
        if self.dynamic is not None:
            return *self.dynamic(state, *self._static), cache
        (view,) = mix_pieces(state, None, self.read_weights, None, self.n_fractions, self.impl)
        return view, Mixing(state, self.residual_weights, self.write_weights.expand(self.rows, -1)), cache

    def read_sum(self, state: Streams, view: Stream) -> WeightedSum:
        """Returns the weighted sum of all pieces behind each fraction of the view."""
        m, weights = self.n_fractions, self.read_weights
        if self.dynamic is not None:
            weights = self.dynamic.read_columns(state, *self._static).movedim(1, -1)
        weights = weights[:, None, None] if weights.ndim == 2 else weights
        sources = tuple(piece.repeat(1, 1, m) for piece in pieces_of(state, m))
        names, parts = piece_names(len(state), m), tuple(f"fraction {f}" for f in range(m)) if m > 1 else ()
        weights = weights.expand(-1, *view.shape[:2], -1)
        return WeightedSum(view, "read", names, sources, weights, parts=parts)


def _starts(config: FracConnectionsConfig, index: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The initial read weights [P, m] and residual weights [P, P], row by row."""
    n, m, P = config.n_streams, config.n_fractions, config.pieces
    pieces = [(s, f) for s in range(n) for f in range(m)]
    if config.form == "paper":
        return tuple(float(j == r) for j in range(P) for r in range(m)), tuple(
            float(j == i) for j in range(P) for i in range(P)
        )

    def built(source: tuple[int, int], fraction: int, place: int) -> float:
        # The package builds rows (fraction, stream) and m columns for the read before P for the residual, and then takes
        # the columns as (fraction, [read, streams]).
        row, column = source[1] * n + source[0], fraction * (n + 1) + place
        return float(row == index % n if column < m else row == column - m)

    read = tuple(built(source, fraction, 0) for source in pieces for fraction in range(m))
    return read, tuple(built(source, f, 1 + s) for source in pieces for s, f in pieces)


class DynamicFractions(DeclaredModule):
    """The numbers that each token adds to the static weights: row j of them from piece j."""

    def __init__(self, config: FracConnectionsConfig, d_model: int) -> None:
        super().__init__()
        self.config = config
        learns = config.form == "lucidrains"
        norm, eps = ("rms", 0.0) if learns else ("layer", LAYER_EPS)
        self.rule = ScoreRule(norm, eps, "tanh", config.n_fractions)
        width = d_model // config.n_fractions
        # The rows score the fractions of the read, the destinations of the residual where it is free, and the write.
        fused, stacked = Fused(config.columns), int(config.residual == "free")
        shape, start = (sum(fused.sizes), width), Constant(0.0)
        self.maps = self.parameter("maps", shape, start, "matrix", fused=fused, grows="inputs", stacked=stacked)
        self.mixing_scale = self.parameter("mixing_scale", (1,), Constant(config.scale_init), "gate", stacked=stacked)
        self.write_scale = self.parameter("write_scale", (1,), Constant(config.scale_init), "gate")
        self.gain = self.parameter("gain", (width,), Constant(1.0), "norm") if learns else None

    @outside_autocast
    def forward(self, state: Streams, read: Tensor, residual: Tensor | None, write: Tensor) -> tuple[Stream, Mixing]:
        """Returns the fractions that are read, concatenated, and the streams and weights for the write."""
        n, m = len(state), self.config.n_fractions
        inputs, P = self._inputs(state, read, residual, write), 0 if residual is None else n * m
        view, weights, streams = hyper_read(state, *inputs, None, self.rule, self.config.impl)
        writes = weights[:, P:].transpose(0, 1)
        if self.gain is not None:
            writes = weights[:, P:].unflatten(0, (n, m)).transpose(0, 1).flatten(1, 2)
        return view, Mixing(streams, weights[:, :P] if P else None, writes)

    @outside_autocast
    def read_columns(self, state: Streams, read: Tensor, residual: Tensor | None, write: Tensor) -> Float[Tensor, "P m B T"]:
        """Returns the weights of each token in the fractions that are read."""
        inputs = self._inputs(state, read, residual, write)
        return hyper_weights(state, *inputs, None, self.rule)[:, : self.config.n_fractions]

    def _inputs(self, state: Streams, read: Tensor, residual: Tensor | None, write: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The static weights, their scales, and the maps."""
        n, m = len(state), self.config.n_fractions
        mixing = read if residual is None else torch.cat((read, residual), dim=1)
        # In the paper's form a piece weights its own share of the update; in the other form, the share of its fraction
        # of the update in every fraction of its stream.
        own = write.unsqueeze(1) if self.gain is None else write.view(n, 1, m).expand(n, m, m).flatten(0, 1)
        static = torch.cat((mixing, own), dim=1)
        scale = torch.cat((self.mixing_scale.expand(mixing.shape[1]), self.write_scale.expand(own.shape[1])))
        maps = self.maps if self.gain is None else self.maps.to(statistics_dtype(state[0])) * self.gain
        return static, scale, maps
