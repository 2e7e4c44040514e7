"""Hyper-Connections: several residual streams, which every sublayer reads, mixes and writes with learned weights.

Letters: B batch, T position, D width, n streams.
"""

from typing import Any, Literal, Self

import torch
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.design import InitEquivalence, MixingDesign
from twoaxis.core.parameters import Constant, DeclaredModule, Values
from twoaxis.core.position import LayerStack, SublayerPosition
from twoaxis.core.views import WeightedSum, per_token
from twoaxis.depth.base import Controls, DepthConfig, Layout, Stream
from twoaxis.depth.streams import Mixing, ParallelEnds, Streams, StreamsMixer
from twoaxis.ops.hyper_read import ScoreRule, hyper_read, hyper_weights
from twoaxis.ops.mix import mix
from twoaxis.ops.precision import Impl, outside_autocast, statistics_dtype
from twoaxis.ops.streams import piece_names


class HyperConnectionsConfig(DepthConfig):
    """Keeps n residual streams; each sublayer reads their weighted sum, mixes them with a matrix and writes to all of them.

    Equation: u = sum_j a_j S_j,  S'_i = b_i f(Norm(u)) + sum_j R_ji S_j,  S_j = embeddings at first,  h = sum_j S_j at last
              dynamic, from x_j = norm(S_j): a_j = a_j + s_a tanh(w_a^T x_j), R_ji = R_ji + s_a tanh(w_i^T x_j),
              b_j = b_j + s_b tanh(w_b^T x_j); all streams share the maps w; R is [source j, destination i]
    Source:   Hyper-Connections, arXiv:2409.19606v3, algorithm 2, and algorithms 1 and 3 for the two ends; checked against
              corl-team/lime, src/lm/hc.py, and lucidrains/hyper-connections 0.4.11 (`rms_gain`)
    Deviates: the paper also scales the initial output matrices of all sublayers with sqrt(n), to keep the spread of the summed
              streams; here a sublayer's own init stays, so that the fresh model is the plain one and can start from its
              weights. The norm of the scores is that of the paper's model, so that `layer_affine` is the paper's too.
              lucidrains' RMSNorm has its gain less 1 as parameter and divides by the norm of a row, here by its rms of at least
              1e-12. Static weights do not decay and maps do, as in the paper; corl-team/lime, which runs its algorithm 2,
              decays s_a and s_b too: optimizer.groups=[{pattern="*.dynamic.*_scale", weight_decay=0.1}]
    Shapes:   state n times [B T D]; update [B T D] -> state; scores, tanh and weights in float32, streams rounded once
    Init:     UP_TO_NORM (n = 1: EXACT): a one-hot at g mod n for sublayer g, R the identity, b = 1, maps 0: the streams stay
              n copies of the plain stream, of which the read takes one and the final norm sees the sum
    Cost:     params n*(n + 2) per sublayer, dynamic (n + 2)*D + 2 more, and D or 2*D for a norm that learns; flops
              2*n*(n + 2)*D per token and sublayer, dynamic as much again for the scores and 3*n*D or 4*n*D for the norms;
              state n*D numbers per token; nothing carried from token to token
    Published: loss of OLMo-1B on V2 after 500B tokens, arXiv:2409.19606v3 tables 1 and 2: plain 2.811, dynamic n = 1 2.819,
              n = 2 2.802, n = 4 2.781 (without tanh 2.779), n = 8 2.778, static n = 2 2.799, n = 4 2.791. The composite gain of
              the residual matrices is not bounded: about 3000 at 27B, arXiv:2512.24880

    Args:
        n_streams: residual streams; the paper's choice is 4. With 1 only scalars remain, which hurts in the paper.
        weights: `dynamic` adds a number to each weight that depends on the token; `static` weights are parameters alone.
        norm: of the input of the scores: `layer` (LayerNorm without gain and bias), `layer_affine` (with both), or `rms_gain`
            (RMSNorm with a gain and no eps, of lucidrains).
        activation: of the scores, `tanh` or `none`.
        scale_init: start of s_a and s_b.
        layer_eps: eps of the LayerNorm.
        impl: `fused` or `reference`.

    Raises:
        ConfigError: n_streams below 1, or an option of the dynamic weights for static ones.

    Example:
        >>> HyperConnectionsConfig(n_streams=2).init_equivalence.relation
        'up_to_norm'
    """

    kind: Literal["hyper_connections"] = "hyper_connections"
    n_streams: int = Field(default=4, ge=1)
    weights: Literal["dynamic", "static"] = "dynamic"
    norm: Literal["layer", "layer_affine", "rms_gain"] = "layer"
    activation: Literal["tanh", "none"] = "tanh"
    scale_init: float = 0.01
    layer_eps: float = Field(default=1e-5, gt=0)
    impl: Impl = "fused"

    @property
    def design(self) -> MixingDesign:
        """Weights between streams, each plus a number that depends on the token."""
        dynamic, bound = self.weights == "dynamic", "tanh(score)" if self.activation == "tanh" else "score"
        return MixingDesign(
            query="parameter maps" if dynamic else "none",
            key="norm(S_j)" if dynamic else "none",
            value="S_j",
            normaliser=f"none: b + s {bound}" if dynamic else "none",
            window="own state",
            sharing="sublayer",
            injection="written to n streams",
            weights="static" if not dynamic else "input" if self.n_streams == 1 else "input and reader",
        )

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        if self.weights == "static":
            of_scores = ("norm", "activation", "scale_init", "layer_eps")
            self.refuse_options(of_scores, ", since static weights have no scores", "remove it or use weights='dynamic'")
        return self

    def controls(self) -> Controls:
        """The same with static weights."""
        static = {"kind": self.kind, "weights": "static", "n_streams": self.n_streams}
        return Controls(static if self.weights == "dynamic" else None, streams=self.n_streams)

    @property
    def init_equivalence(self) -> InitEquivalence:
        """Up to a scale, which the final norm removes; exact with one stream."""
        if self.n_streams == 1:
            return InitEquivalence("exact", "the one stream is read, kept and written with weight 1")
        return InitEquivalence("up_to_norm", "all streams are copies of the plain stream, and their sum is n times as large")

    def cost(self, site: SublayerPosition, shape: Shape) -> Cost:
        """One read, one mixing write and, for dynamic weights, their scores."""
        n, D, N = self.n_streams, site.d_model, shape.total_tokens
        sums, weights = 2 * n * (n + 2) * D * N, n * (n + 2)
        if self.weights == "static":
            return Cost(params=weights, elementwise_flops=sums)
        learned, norm = {"layer": (0, 4), "layer_affine": (2 * D, 4), "rms_gain": (D, 3)}[self.norm]
        scores = N * n * (norm * D + 4 * (n + 2))
        return Cost(params=weights + (n + 2) * D + 2 + learned, matmul_flops=sums, elementwise_flops=sums + scores)

    def ends_cost(self, stack: LayerStack, shape: Shape) -> Cost:
        """The sum of the streams."""
        return Cost(elementwise_flops=(self.n_streams - 1) * stack.d_model * shape.total_tokens)

    def build(self, stack: LayerStack) -> "tuple[list[HyperConnections], ParallelEnds]":
        """Builds the weights of each sublayer."""
        return [HyperConnections(self, site) for site in stack.sites], ParallelEnds(self.n_streams)


class HyperConnections(StreamsMixer, config=HyperConnectionsConfig):
    """See `HyperConnectionsConfig`."""

    def __init__(self, config: HyperConnectionsConfig, site: SublayerPosition) -> None:
        super().__init__(config.impl)
        n = config.n_streams
        one_hot = tuple(float(j == site.index % n) for j in range(n))
        identity = tuple(float(i == j) for j in range(n) for i in range(n))
        self.read_weights = self.parameter("read_weights", (n,), Values(one_hot), "mixing")
        self.residual_weights = self.parameter("residual_weights", (n, n), Values(identity), "mixing")
        self.write_weights = self.parameter("write_weights", (n,), Constant(1.0), "mixing")
        self.dynamic = DynamicWeights(config, site.d_model) if config.weights == "dynamic" else None

    @property
    def _static(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.read_weights, self.residual_weights, self.write_weights

    def read(self, state: Streams, layout: Layout = None, cache: Any = None) -> tuple[Stream, Mixing, Any]:
        """Returns the weighted sum of the streams, and the streams and weights for the write."""
        if self.dynamic is not None:
            return *self.dynamic(state, *self._static), cache
        (view,) = mix(state, self.read_weights.unsqueeze(0), self.impl)
        return view, Mixing(state, self.residual_weights, self.write_weights.unsqueeze(0)), cache

    def read_sum(self, state: Streams, view: Stream) -> WeightedSum:
        """Returns the sum of the streams that is read."""
        weights = self.read_weights if self.dynamic is None else self.dynamic.read_column(state, *self._static)
        return WeightedSum(view, "read", piece_names(len(state), 1), state, per_token(weights, view))


class DynamicWeights(DeclaredModule):
    """The numbers that each token adds to the static weights: row j of them from stream j."""

    def __init__(self, config: HyperConnectionsConfig, d_model: int) -> None:
        super().__init__()
        self.config, n = config, config.n_streams
        norm, eps = ("rms", 0.0) if config.norm == "rms_gain" else ("layer", config.layer_eps)
        self.rule = ScoreRule(norm, eps, config.activation)
        # The rows score the read, the n destinations of the residual, and the write.
        self.maps = self.parameter("maps", (n + 2, d_model), Constant(0.0), "matrix")
        self.mixing_scale = self.parameter("mixing_scale", (1,), Constant(config.scale_init), "gate")
        self.write_scale = self.parameter("write_scale", (1,), Constant(config.scale_init), "gate")
        if config.norm != "layer":
            self.gain = self.parameter("gain", (d_model,), Constant(1.0), "norm")
        if config.norm == "layer_affine":
            self.bias = self.parameter("bias", (d_model,), Constant(0.0), "bias")

    @outside_autocast
    def forward(self, state: Streams, read: Tensor, residual: Tensor, write: Tensor) -> tuple[Stream, Mixing]:
        """Returns the weighted sum of the streams, and the streams and weights for the write."""
        n = len(state)
        view, weights, streams = hyper_read(state, *self._inputs(state, read, residual, write), self.rule, self.config.impl)
        return view, Mixing(streams, weights[:, :n], weights[:, n].unsqueeze(0))

    @outside_autocast
    def read_column(self, state: Streams, read: Tensor, residual: Tensor, write: Tensor) -> Float[Tensor, "n B T"]:
        """Returns the weights of the read for each token."""
        return hyper_weights(state, *self._inputs(state, read, residual, write), self.rule)[:, 0]

    def _inputs(self, state: Streams, read: Tensor, residual: Tensor, write: Tensor) -> tuple[Tensor, Tensor, Tensor, Any]:
        """The static weights, their scales, the maps, and the offset of scores if any."""
        config, n, dtype = self.config, len(state), statistics_dtype(state[0])
        static = torch.cat((read.unsqueeze(1), residual, write.unsqueeze(1)), dim=1)
        scale = torch.cat((self.mixing_scale.expand(n + 1), self.write_scale))
        maps, offset = self.maps.to(dtype), None
        if config.norm == "layer_affine":
            offset = (maps * self.bias).sum(-1)
        if config.norm != "layer":
            maps = maps * self.gain
        return static, scale, maps, offset
