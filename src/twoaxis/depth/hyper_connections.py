"""Hyper-Connections: several residual streams, which every sublayer reads, mixes and writes with learned weights.

Letters: B batch, T position, D width, n streams.
"""

from typing import Any, ClassVar, Literal, Self

import torch
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.design import InitEquivalence, MixingDesign
from twoaxis.core.parameters import Constant, DeclaredModule, Fused, Values
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
              corl-team/lime, src/lm/hc.py, lucidrains/hyper-connections 0.4.11 (`rms_gain`) and DepthBench at 8cc2fd7 (`rms`)
    Deviates: the paper also scales initial outputs of sublayers with sqrt(n); here the fresh model is the plain one. The paper
              has `layer` and `layer_affine`. lucidrains has the gain less 1, and the norm of a row for its rms, at least 1e-12.
              corl-team/lime decays s_a and s_b: optimizer.groups=[{pattern="*.dynamic.*_scale", weight_decay=0.1}]
    Shapes:   state n times [B T D]; update [B T D] -> state; scores, tanh and weights in float32, streams rounded once
    Init:     UP_TO_NORM (n = 1, or a mean as read-out: EXACT): a one-hot at g mod n for sublayer g, R the identity, b = 1,
              maps 0: the streams stay n copies of the plain stream, of which the read takes one and the final norm sees the sum
    Cost:     params n*(n + 2) per sublayer, dynamic (n + 2)*D + 2 more, and D or 2*D for a norm that learns; flops per token
              2*n*(n + 2)*D, dynamic twice that, and 3*n*D or 4*n*D for norms; state n*D numbers, none between tokens
    Published: loss of OLMo-1B on V2 after 500B tokens, tables 1 and 2: plain 2.811, dynamic n = 1 2.819, 2 2.802, 4 2.781, 8
              2.778, static 2 2.799, 4 2.791; unbounded, the matrices amplify by about 3000 at 27B, arXiv:2512.24880

    Args:
        preset: `paper`, or `depthbench`, which fixes the norm `rms`.
        n_streams: residual streams; the paper's choice is 4. With 1 only scalars remain, which hurts in the paper.
        weights: `dynamic` adds a number to each weight that depends on the token; `static` weights are parameters alone.
        norm: of what is scored: LayerNorm, `layer`, or with gain and bias, `layer_affine`; RMSNorm, `rms`, or with a gain and
            no eps, `rms_gain`, of lucidrains.
        activation: of the scores, `tanh` or `none`.
        scale_init: start of s_a and s_b.
        layer_eps: eps of the LayerNorm.
        rms_eps: eps of the norm `rms`.
        residual: R is `free`, or the `identity`. A sum of a matrix and numbers of the token has no bounds: those are in `mhc`.
        read_out: `sum` or `mean` of the streams.
        impl: `fused` or `reference`.

    Raises:
        ConfigError: n_streams below 1, options of dynamic weights for static ones, or one that the preset fixes otherwise.

    Example:
        >>> HyperConnectionsConfig(n_streams=2).init_equivalence.relation
        'up_to_norm'
    """

    kind: Literal["hyper_connections"] = "hyper_connections"
    preset: Literal["paper", "depthbench"] = "paper"
    n_streams: int = Field(default=4, ge=1)
    weights: Literal["dynamic", "static"] = "dynamic"
    norm: Literal["layer", "layer_affine", "rms_gain", "rms"] = "layer"
    activation: Literal["tanh", "none"] = "tanh"
    scale_init: float = 0.01
    layer_eps: float = Field(default=1e-5, gt=0)
    rms_eps: float = Field(default=1e-8, gt=0)
    residual: Literal["free", "identity"] = "free"
    read_out: Literal["sum", "mean"] = "sum"
    impl: Impl = "fused"
    presets: ClassVar = {"depthbench": {"norm": "rms", "activation": "tanh"}}

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
            of_scores = ("norm", "activation", "scale_init", "layer_eps", "rms_eps")
            self.refuse_options(of_scores, ", since static weights have no scores", "remove it or use weights='dynamic'")
        return self

    def controls(self) -> Controls:
        """The same with static weights, and the same without mixing."""
        static = {"kind": self.kind, "weights": "static", "n_streams": self.n_streams}
        unmixed = {**self.to_data(), "residual": "identity"} if self.residual == "free" and self.n_streams > 1 else None
        return Controls(static if self.weights == "dynamic" else None, streams=self.n_streams, unmixed=unmixed)

    @property
    def init_equivalence(self) -> InitEquivalence:
        """Up to a scale, which the final norm removes; exact with one stream, and with a mean."""
        if self.n_streams == 1 or self.read_out == "mean":
            return InitEquivalence("exact", "every stream is read, kept and written with weight 1, and so is their mean")
        return InitEquivalence("up_to_norm", "all streams are copies of the plain stream, and their sum is n times as large")

    def cost(self, site: SublayerPosition, shape: Shape) -> Cost:
        """One read, one mixing write and, for dynamic weights, their scores."""
        n, D, N = self.n_streams, site.d_model, shape.total_tokens
        columns = n + 2 if self.residual == "free" else 2
        sums, weights = 2 * n * columns * D * N, n * columns
        if self.weights == "static":
            return Cost(params=weights, elementwise_flops=sums)
        learned, norm = {"layer": (0, 4), "layer_affine": (2 * D, 4), "rms_gain": (D, 3), "rms": (0, 3)}[self.norm]
        scores = N * n * (norm * D + 4 * columns)
        return Cost(params=weights + columns * D + 2 + learned, matmul_flops=sums, elementwise_flops=sums + scores)

    def ends_cost(self, stack: LayerStack, shape: Shape) -> Cost:
        """The sum or mean of the streams."""
        return Cost(elementwise_flops=(self.n_streams - (self.read_out == "sum")) * stack.d_model * shape.total_tokens)

    def build(self, stack: LayerStack) -> "tuple[list[HyperConnections], ParallelEnds]":
        """Builds the weights of each sublayer."""
        return [HyperConnections(self, site) for site in stack.sites], ParallelEnds(self.n_streams, read_out=self.read_out)


class HyperConnections(StreamsMixer, config=HyperConnectionsConfig):
    """See `HyperConnectionsConfig`."""

    def __init__(self, config: HyperConnectionsConfig, site: SublayerPosition) -> None:
        super().__init__(config.impl)
        n = config.n_streams
        one_hot = tuple(float(j == site.index % n) for j in range(n))
        self.read_weights = self.parameter("read_weights", (n,), Values(one_hot), "mixing")
        mixes, identity = config.residual == "free", tuple(float(i == j) for j in range(n) for i in range(n))
        start = Values(identity)
        self.residual_weights = self.parameter("residual_weights", (n, n), start, "mixing", stacked=1) if mixes else None
        self.write_weights = self.parameter("write_weights", (n,), Constant(1.0), "mixing")
        self.dynamic = DynamicWeights(config, site.d_model) if config.weights == "dynamic" else None

    @property
    def _static(self) -> Float[Tensor, "n columns"]:
        columns = (self.read_weights.unsqueeze(1), self.residual_weights, self.write_weights.unsqueeze(1))
        return torch.cat([column for column in columns if column is not None], dim=1)

    def read(self, state: Streams, layout: Layout = None, cache: Any = None) -> tuple[Stream, Mixing, Any]:
        """Returns the weighted sum of the streams, and the streams and weights for the write."""
        if self.dynamic is not None:
            return *self.dynamic(state, self._static), cache
        (view,) = mix(state, self.read_weights.unsqueeze(0))
        return view, Mixing(state, self.residual_weights, self.write_weights.unsqueeze(0)), cache

    def read_sum(self, state: Streams, view: Stream) -> WeightedSum:
        """Returns the sum of the streams that is read."""
        weights = self.read_weights
        if self.dynamic is not None:
            weights = hyper_weights(state, self._static, *self.dynamic.inputs(state), self.dynamic.rule)[:, 0]
        return WeightedSum(view, "read", piece_names(len(state), 1), state, per_token(weights, view))


class DynamicWeights(DeclaredModule):
    """The numbers that each token adds to the static weights: row j of them from stream j."""

    def __init__(self, config: HyperConnectionsConfig, d_model: int) -> None:
        super().__init__()
        self.config, n = config, config.n_streams
        eps = {"rms": config.rms_eps, "rms_gain": 0.0}.get(config.norm, config.layer_eps)
        self.rule = ScoreRule("rms" if config.norm.startswith("rms") else "layer", eps, config.activation)
        # The rows score the read, the n destinations of the residual where it is free, and the write.
        mixes = config.residual == "free"
        fused, stacked = Fused((1, n, 1) if mixes else (1, 1)), int(mixes)
        shape, start = (sum(fused.sizes), d_model), Constant(0.0)
        self.maps = self.parameter("maps", shape, start, "matrix", fused=fused, grows="inputs", stacked=stacked)
        self.mixing_scale = self.parameter("mixing_scale", (1,), Constant(config.scale_init), "gate", stacked=stacked)
        self.write_scale = self.parameter("write_scale", (1,), Constant(config.scale_init), "gate")
        learns = config.norm in ("layer_affine", "rms_gain")
        self.gain = self.parameter("gain", (d_model,), Constant(1.0), "norm") if learns else None
        self.bias = self.parameter("bias", (d_model,), Constant(0.0), "bias") if config.norm == "layer_affine" else None

    @outside_autocast
    def forward(self, state: Streams, static: Float[Tensor, "n columns"]) -> tuple[Stream, Mixing]:
        """Returns the weighted sum of the streams, and the streams and weights for the write."""
        view, weights, streams = hyper_read(state, static, *self.inputs(state), self.rule, self.config.impl)
        return view, Mixing(streams, weights[:, :-1] if weights.shape[1] > 1 else None, weights[:, -1].unsqueeze(0))

    def inputs(self, state: Streams) -> tuple[Tensor, Tensor, Tensor | None]:
        """The scales, the maps, and the offset of scores if any."""
        scale = torch.cat((self.mixing_scale.expand(len(self.maps) - 1), self.write_scale))
        maps = self.maps.to(statistics_dtype(state[0]))
        offset = None if self.bias is None else (maps * self.bias).sum(-1)
        return scale, maps if self.gain is None else maps * self.gain, offset
