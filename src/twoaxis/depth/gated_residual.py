"""Gated residual: parallel residual streams that are read through a low-rank elementwise gate and never mixed.

Letters: B batch, T position, D width, n streams.
"""

from typing import Any, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.design import InitEquivalence, MixingDesign
from twoaxis.core.parameters import Constant, DeclaredModule, Normal, Values, matrix_std
from twoaxis.core.position import LayerStack, SublayerPosition
from twoaxis.core.views import WeightedSum
from twoaxis.depth.base import Controls, DepthConfig, Explanation, Layout, Read, Stream
from twoaxis.depth.streams import Mixing, ParallelEnds, Streams, StreamsMixer
from twoaxis.ops.gated_read import gated_parts, gated_read
from twoaxis.ops.precision import Impl
from twoaxis.ops.streams import piece_names

OWN_GAIN = 1.5
"""The gain of the stream that a sublayer favours under the `preserving` init; the gains of all n streams have the mean 1."""


class GatedResidualConfig(DepthConfig):
    """Keeps n residual streams; each sublayer reads the mean of the normalised streams, each times an elementwise gate.

    Equation: y_j = gain_j * S_j / rms(S_j),  y = (y_1 ... y_n),  gate = sigmoid(up silu(down y / n))
              u = 1/n sum_j gate_j * y_j,  S'_j = S_j + w_j f(Norm(u)),  w = 2 sigmoid(inject y / n)
              S_j = embeddings at first;  h is one more such read
    Source:   transformers 5.24 models/qwen4_exp, Qwen4ExpTextGatedResidual; its paper, arXiv:2608.30320, is known to us from
              citations only
    Deviates: the blocks of Qwen4Exp have no norm but this one, and none follows its last read; here every sublayer and the head
              keep their norm. Gains are stored as they multiply, there as their difference from 1
    Shapes:   state n times [B T D]; update [B T D] -> state; norms, gates and write weights in float32, streams rounded once;
              down [rank, n*D], up [n*D, rank], inject [n, n*D], gain [n, D]: columns and rows stream-major
    Init:     UP_TO_NORM with `preserving`: up = 0 and inject = 0, so that all gates are 1/2 and all write weights 1; sublayer g
              has the gain 1.5 for stream g mod n and (n - 1.5)/(n - 1) for the others, since with equal gains the streams would
              stay equal in training. NONE with `normal`: gain 1, maps ~ N(0, 0.25 / fan in)
    Cost:     params n*D*(2*rank + n + 1) per sublayer, n*D*(2*rank + 1) for the last read; flops 2*n*D*(2*rank + n) + 14*n*D
              per token and sublayer; state n*D numbers per token; nothing carried from token to token
    Published: loss 1.762 in its paper, as with full Attention Residuals there (second-hand). The configuration of
              Qwen3.8-Flash-Next in transformers has 4 streams and rank 320 by default

    Args:
        n_streams: residual streams.
        rank: hidden width of the gate.
        init: `preserving` or `normal`.
        impl: `fused` or `reference`.

    Raises:
        ConfigError: n_streams or rank below 1.

    Example:
        >>> GatedResidualConfig(init="normal").init_equivalence.relation
        'none'
    """

    kind: Literal["gated_residual"] = "gated_residual"
    n_streams: int = Field(default=4, ge=1)
    rank: int = Field(default=320, ge=1)
    init: Literal["preserving", "normal"] = "preserving"
    impl: Impl = "fused"

    @property
    def design(self) -> MixingDesign:
        """A gate for each feature of each stream."""
        return MixingDesign(
            query="parameter maps",
            key="RMSNorm(S_1 ... S_n)",
            value="RMSNorm(S_j)",
            normaliser="sigmoid, by feature",
            window="own state",
            sharing="sublayer",
            injection="written to n streams",
            weights="input and reader",
        )

    def controls(self) -> Controls:
        """None of its own; it has several streams."""
        return Controls(streams=self.n_streams)

    @property
    def init_equivalence(self) -> InitEquivalence:
        """Up to the scale of the read, or none."""
        if self.init == "normal":
            return InitEquivalence("none", "random gates differ from feature to feature, and random write weights are not 1")
        return InitEquivalence("up_to_norm", "all streams are copies of the plain stream, read divided by their rms")

    def cost(self, site: SublayerPosition, shape: Shape) -> Cost:
        """The gated read, and a write to every stream."""
        n, D, N = self.n_streams, site.d_model, shape.total_tokens
        # The logits of the write weights, their sigmoid, and the factor 2.
        write = Cost(params=n * n * D, matmul_flops=2 * n * n * D * N, elementwise_flops=2 * n * D * N)
        return self._read_cost(D, shape) + write

    def ends_cost(self, stack: LayerStack, shape: Shape) -> Cost:
        """The last read."""
        return self._read_cost(stack.d_model, shape)

    def _read_cost(self, D: int, shape: Shape) -> Cost:
        n, N, r = self.n_streams, shape.total_tokens, self.rank
        return Cost(params=n * D * (2 * r + 1), matmul_flops=4 * r * n * D * N, elementwise_flops=12 * n * D * N)

    def build(self, stack: LayerStack) -> "tuple[list[GatedResidual], GatedResidualEnds]":
        """Builds a gate for each sublayer and for the last read."""
        return [GatedResidual(self, site) for site in stack.sites], GatedResidualEnds(self, stack)


class StreamGate(DeclaredModule):
    """The gated read, and with `writes` the logits of the write weights."""

    def __init__(self, config: GatedResidualConfig, stack: LayerStack, index: int, writes: bool) -> None:
        super().__init__()
        n, D, preserving = config.n_streams, stack.d_model, config.init == "preserving"
        self.impl: Impl = config.impl
        self.eps = stack.norm_eps
        others = (n - OWN_GAIN) / (n - 1) if n > 1 else 1.0
        own = OWN_GAIN if n > 1 else 1.0
        gains = [own if j == index % n else others for j in range(n)]
        gain = Values(tuple(g for g in gains for _ in range(D))) if preserving else Constant(1.0)
        self.gain = self.parameter("gain", (n, D), gain, "norm")
        self.down = self.parameter("down", (config.rank, n * D), Normal(matrix_std(n * D)), "matrix", grows="inputs")
        up = Constant(0.0) if preserving else Normal(matrix_std(config.rank))
        self.up = self.parameter("up", (n * D, config.rank), up, "matrix", grows="outputs")
        self.inject = None
        if writes:
            inject = Constant(0.0) if preserving else Normal(matrix_std(n * D))
            self.inject = self.parameter("inject", (n, n * D), inject, "matrix", grows="inputs")

    def forward(self, state: Streams) -> tuple[Stream, Float[Tensor, "n B T"] | None]:
        """Returns the view, and the logits of the write weights."""
        return gated_read(state, self.gain, self.down, self.up, self.inject, self.eps, self.impl)

    def sum(self, state: Streams, made: Stream) -> WeightedSum:
        """Returns the gated mean of the normalised streams; the weight of a feature is its gate over n."""
        normalised, gates = gated_parts(state, self.gain, self.down, self.up, self.eps)
        weights = torch.stack(gates) / len(state)
        return WeightedSum(made, "read", piece_names(len(state), 1), tuple(normalised), weights)


class GatedResidual(StreamsMixer, config=GatedResidualConfig):
    """See `GatedResidualConfig`."""

    def __init__(self, config: GatedResidualConfig, site: SublayerPosition) -> None:
        super().__init__(config.impl)
        self.gate = StreamGate(config, site.stack, site.index, writes=True)

    def read(self, state: Streams, layout: Layout = None, cache: Any = None) -> tuple[Stream, Mixing, Any]:
        """Returns the gated mean of the normalised streams, and the write weights."""
        view, logits = self.gate(state)
        return view, Mixing(state, None, 2 * torch.sigmoid(logits).unsqueeze(0)), cache

    def read_sum(self, state: Streams, view: Stream) -> WeightedSum:
        """Returns the gated mean of the normalised streams."""
        return self.gate.sum(state, view)


class GatedResidualEnds(ParallelEnds):
    """Every stream starts as the embeddings, and the streams end in one more gated read."""

    def __init__(self, config: GatedResidualConfig, stack: LayerStack) -> None:
        super().__init__(config.n_streams)
        self.gate = StreamGate(config, stack, stack.n_sublayers, writes=False)

    def leave(self, state: Streams, layout: Layout = None, cache: Any = None) -> tuple[Stream, Any]:
        """Returns the gated mean of the normalised streams."""
        return self.gate(state)[0], cache

    def explain(self, done: Read) -> Explanation:
        """Returns the last gated mean."""
        return Explanation((self.gate.sum(done.state, done.views),))
