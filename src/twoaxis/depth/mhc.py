"""Manifold-constrained Hyper-Connections: parallel residual streams that are mixed by doubly stochastic matrices.

Letters: B batch, T position, D width, n streams, C rows of the map.
"""

from dataclasses import fields, replace
from typing import Any, Literal, Self

import torch
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.design import InitEquivalence, MixingDesign
from twoaxis.core.errors import ConfigError, problem
from twoaxis.core.parameters import Constant, Values
from twoaxis.core.position import LayerStack, SublayerPosition
from twoaxis.core.views import WeightedSum, per_token
from twoaxis.depth import mhc_forms
from twoaxis.depth.base import Controls, DepthConfig, Explanation, Layout, Read, Stream
from twoaxis.depth.mhc_forms import PRESETS, Form, Init, Preset, ReadOut, Residual, Scores
from twoaxis.depth.streams import Mixing, ParallelEnds, Streams, StreamsMixer
from twoaxis.ops.mix import mix
from twoaxis.ops.precision import Impl, outside_autocast, statistics_dtype
from twoaxis.ops.scores import joint_scores, stream_scores
from twoaxis.ops.sinkhorn import Order, Start, sinkhorn
from twoaxis.ops.streams import mean_streams, piece_names, sum_streams


class MHCConfig(DepthConfig):
    """Keeps n residual streams; each sublayer reads them, mixes them by a doubly stochastic matrix and writes to all of them.

    Equation: u = sum_j a_j S_j,  S'_i = b_i f(Norm(u)) + sum_j R_ji S_j,  S_j = embeddings at first
              z = fn [S_1 ... S_n] / rms(S_1 ... S_n);  t = scale * z + base, in rows of (a, b, R), one scale for each
              a = sigmoid(t_a) + read_eps,  b = write_magnitude sigmoid(t_b) + write_eps,  R = Sinkhorn(t_R) or the identity
              per_stream: row j of (a, b, R) comes from S_j alone, z_j = fn (gain * S_j / rms(S_j)), one fn for all streams
              learned read-out: h = sum_j w_j S_j, w = sigmoid(scale * z + base) + read_eps
    Source:   mHC, arXiv:2512.24880, eq. 7-9; transformers 5.24 models/deepseek_v4, glm5_next and hy_v4;
              lucidrains/hyper-connections 0.4.11 (v1 and v2 are the same mathematics)
    Deviates: R is [source j, destination i], as in the comb of DeepSeek, whose transpose is applied to the streams; the paper's
              H_res is the transpose, H_res = R^T, and S' = H_res S. The paper does not publish its read-out: `sum`. It gives
              the scales 0.01 and no other initial value: `preserving` is ours. Decay is not published: here fn alone.
              lucidrains divides by the norm of a row, here by its rms with an eps of 1e-20
    Shapes:   state n times [B T D]; update [B T D] -> state; scores, rounds and weights in float32, streams rounded once.
              joint: fn [n*(n+2), n*D] in DeepSeek's order, rows a (n), b (n), R (n*n, row-major [source, destination]), columns
              stream-major; base as the rows; scale [3] of (a, b, R). per_stream: fn [n+2, D], rows a, b, R (n destinations),
              base [n, n+2] in the same columns. The identity has no rows for R
    Init:     UP_TO_NORM with `preserving` and no eps on the weights: fn 0, scale 0.01, b = 1, R with the logit 3 on its
              diagonal, and sublayer g reads 0.7 of stream g mod n, so that the streams diverge in training. NONE
              with the authors' inits. R of the first sublayer, whose streams are equal, and of the last one before a sum or
              mean cannot matter (up to convergence and eps): its rows of fn, base and scale get no gradient there
    Cost:     params n*(n + 2)*(n*D + 1) + 3 per sublayer (per_stream: (n + 2)*(D + n) + 3 + D), learned read-out n*n*D + n + 1;
              flops 2*n*(n + 2)*D per token and sublayer for the streams, joint scores 2*n^2*(n + 2)*D, and 4*n^2*rounds;
              state n*D numbers per token; nothing carried from token to token
    Published: 27B mixture of experts, arXiv:2512.24880: loss 0.021 below the plain model; table 4: BBH 51.0 against 43.8 plain
              and 48.9 with Hyper-Connections, MMLU 63.4 against 59.0 and 63.0; the composite gain of the residual matrices is
              at most 1.6, against about 3000 without the constraint

    Args:
        preset: gives the options below that are left out: `paper`; `deepseek_v4`, the form of its
            checkpoints; `glm5`, the same with a mean read-out; `lucidrains_v1` and `lucidrains_v2`; `hy_v4`, without mixing.
        n_streams: residual streams; all published models have 4.
        scores: `joint` of all streams together, or `per_stream`.
        norm_eps: eps of the rms in the scores.
        residual: `sinkhorn`, or `identity`, which mixes nothing.
        rounds: of Sinkhorn.
        order: `destinations_first` or `sources_first`, the sum that each round divides by first.
        start: `exp`, `exp_minus_max`, `softmax` or `log`.
        start_eps: added to the start of Sinkhorn.
        sum_eps: added to each of its sums.
        read_eps: added to the read weights, also those of a learned read-out.
        write_eps: added to the write weights.
        write_magnitude: the upper end of the write weights.
        read_out: `sum`, `mean` or `learned`.
        init: `preserving`; or `deepseek_v4`, the placeholder of transformers, `lucidrains` and `hy_v4` as released.
        impl: `fused` or `reference`.

    Raises:
        ConfigError: n_streams below 2, options of Sinkhorn without it or that exclude each other, or an init that does not fit.

    Example:
        >>> MHCConfig(preset="deepseek_v4", rounds=2).form.order
        'destinations_first'
    """

    kind: Literal["mhc"] = "mhc"
    preset: Preset = "paper"
    n_streams: int = Field(default=4, ge=2)
    scores: Scores | None = None
    norm_eps: float | None = Field(default=None, gt=0)
    residual: Residual | None = None
    rounds: int | None = Field(default=None, ge=1)
    order: Order | None = None
    start: Start | None = None
    start_eps: float | None = Field(default=None, ge=0)
    sum_eps: float | None = Field(default=None, ge=0)
    read_eps: float | None = Field(default=None, ge=0)
    write_eps: float | None = Field(default=None, ge=0)
    write_magnitude: float = Field(default=2.0, gt=0)
    read_out: ReadOut | None = None
    init: Init = "preserving"
    impl: Impl = "fused"

    @property
    def design(self) -> MixingDesign:
        """Weights between streams, made from the streams."""
        return MixingDesign(
            query="parameter maps",
            key="RMSNorm(S_1 ... S_n)" if self.form.scores == "joint" else "RMSNorm(S_j)",
            value="S_j",
            normaliser="sigmoid; Sinkhorn" if self.form.residual == "sinkhorn" else "sigmoid",
            window="own state",
            sharing="sublayer",
            injection="written to n streams",
            weights="input and reader",
        )

    @property
    def form(self) -> Form:
        """The preset with the options that are given."""
        given = {field.name: getattr(self, field.name) for field in fields(Form)}
        return replace(PRESETS[self.preset], **{name: x for name, x in given.items() if x is not None})

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        form = self.form
        if form.residual == "identity":
            reason = ", since the residual is the identity"
            self.refuse_options(mhc_forms.OF_SINKHORN, reason, "remove it or use residual='sinkhorn'")
        # Making the options of Sinkhorn refuses those that exclude each other; not in an assert, which -O drops.
        _ = form.sinkhorn
        if self.init == "preserving" and self.write_magnitude <= 1:
            allowed = "above 1 with init='preserving', which writes with weight 1"
            raise ConfigError(problem("write_magnitude", self.write_magnitude, allowed, "use 2.0, or another init"))
        if self.init == "lucidrains" and form.residual == "identity":
            allowed = "'preserving', 'deepseek_v4' or 'hy_v4' when the residual is the identity"
            raise ConfigError(problem("init", self.init, allowed, "use 'hy_v4', or residual='sinkhorn'"))
        return self

    def controls(self) -> Controls:
        """Static hyper-connections, whose weights are free where these are doubly stochastic."""
        static = {"kind": "hyper_connections", "weights": "static", "n_streams": self.n_streams}
        return Controls(static, streams=self.n_streams)

    @property
    def init_equivalence(self) -> InitEquivalence:
        """Up to the scale of the read and of the read-out; none with another init, or an eps on residual or write weights."""
        form = self.form
        if self.init != "preserving":
            return InitEquivalence("none", f"the init {self.init!r} writes with weights other than 1")
        if form.write_eps or (form.residual == "sinkhorn" and (form.start_eps or form.sum_eps)):
            return InitEquivalence(
                "none", "each write is off by its eps, about 1e-6; without eps this init keeps the plain stream"
            )
        return InitEquivalence(
            "up_to_norm", "all streams are copies of the plain stream, read and left with any sum of weights"
        )

    @property
    def n_columns(self) -> int:
        """Weights that each stream has: of the read, of the write, and to every destination."""
        return 2 if self.form.residual == "identity" else self.n_streams + 2

    def cost(self, site: SublayerPosition, shape: Shape) -> Cost:
        """The scores, the rounds, one read and one mixing write."""
        n, D, N, form, columns = self.n_streams, site.d_model, shape.total_tokens, self.form, self.n_columns
        joint = form.scores == "joint"
        weights, scales = n * columns, 3 if form.residual == "sinkhorn" else 2
        sinkhorn_flops = 4 * n * n * form.rounds + 2 * n * n * D if form.residual == "sinkhorn" else 0
        return Cost(
            params=weights + scales + (weights * n * D if joint else (columns + 1) * D),
            matmul_flops=2 * weights * D * N * (n if joint else 1),
            elementwise_flops=N * (6 * n * D + sinkhorn_flops + 3 * weights),
        )

    def ends_cost(self, stack: LayerStack, shape: Shape) -> Cost:
        """The read-out."""
        n, D, N = self.n_streams, stack.d_model, shape.total_tokens
        if self.form.read_out != "learned":
            return Cost(elementwise_flops=(n - 1 + (self.form.read_out == "mean")) * D * N)
        flops = N * (4 * n * D + 3 * n)
        return Cost(params=n * n * D + n + 1, matmul_flops=2 * n * n * D * N, elementwise_flops=flops)

    def build(self, stack: LayerStack) -> "tuple[list[MHC], MHCEnds]":
        """Builds the maps of each sublayer and of a learned read-out."""
        return [MHC(self, site) for site in stack.sites], MHCEnds(self, stack)


class MHC(StreamsMixer, config=MHCConfig):
    """See `MHCConfig`."""

    def __init__(self, config: MHCConfig, site: SublayerPosition) -> None:
        super().__init__(config.impl)
        # Resolved once, so that a compiled read finds plain values.
        self.config, self.form, self.sinkhorn = config, config.form, config.form.sinkhorn
        n, columns, joint = config.n_streams, config.n_columns, self.form.scores == "joint"
        rows = mhc_forms.starting_logits(config.init, site.index, n, columns - 2, config.write_magnitude)
        base = [x for row in rows for x in row]
        if joint:
            base = [row[0] for row in rows] + [row[1] for row in rows] + [x for row in rows for x in row[2:]]
        shape = (n * columns, n * site.d_model) if joint else (columns, site.d_model)
        self.fn = self.parameter("fn", shape, mhc_forms.map_start(config.init), "matrix")
        self.base = self.parameter("base", (n * columns,) if joint else (n, columns), Values(tuple(base)), "bias")
        self.scale = self.parameter("scale", (min(3, columns),), mhc_forms.scale_start(config.init), "gate")
        if not joint:
            self.gain = self.parameter("gain", (site.d_model,), Constant(1.0), "norm")

    def read(self, state: Streams, layout: Layout = None, cache: Any = None) -> tuple[Stream, Mixing, Any]:
        """Returns the weighted sum of the streams, and the streams and weights for the write."""
        read, residual, write = self.weights(state)
        (view,) = mix(state, read.unsqueeze(0), self.impl)
        return view, Mixing(state, residual, write.unsqueeze(0)), cache

    def read_sum(self, state: Streams, view: Stream) -> WeightedSum:
        """Returns the sum of the streams that is read."""
        read, _, _ = self.weights(state)
        return WeightedSum(view, "read", piece_names(len(state), 1), state, per_token(read, view))

    def weights(self, state: Streams) -> tuple[Tensor, Tensor | None, Tensor]:
        """Returns the weights of each token: read [n B T], residual [n n B T] or None, and write [n B T]."""
        read, write, *residual = self._logits(state)
        read = torch.sigmoid(read)
        write = self.config.write_magnitude * torch.sigmoid(write)
        if self.form.read_eps:
            read = read + self.form.read_eps
        if self.form.write_eps:
            write = write + self.form.write_eps
        matrix = sinkhorn(residual[0], self.sinkhorn, self.impl) if residual else None
        return read, matrix, write

    @outside_autocast
    def _logits(self, state: Streams) -> tuple[Tensor, ...]:
        n, each, dtype = len(state), 1, statistics_dtype(state[0])
        if self.form.scores == "joint":
            each, scores = n, joint_scores(state, self.fn, self.form.norm_eps, self.impl)
        else:
            maps = self.fn.to(dtype) * self.gain.to(dtype)
            scores = stream_scores(state, maps, self.form.norm_eps, self.impl)
        sizes = (each, each, n * each)[: len(self.scale)]
        scale = torch.cat([one.expand(size) for one, size in zip(self.scale.to(dtype).split(1), sizes, strict=True)])
        logits = torch.addcmul(self.base.to(dtype)[..., None, None], scale[:, None, None], scores)
        read, write, *residual = logits.split(sizes, dim=-3)
        if self.form.scores == "joint":
            return read, write, *(part.unflatten(0, (n, n)) for part in residual)
        return read.squeeze(1), write.squeeze(1), *residual


class MHCEnds(ParallelEnds):
    """Every stream starts as the embeddings, and the streams end as their sum, mean, or learned sum."""

    def __init__(self, config: MHCConfig, stack: LayerStack) -> None:
        super().__init__(config.n_streams)
        self.config, self.form = config, config.form
        n = config.n_streams
        if self.form.read_out == "learned":
            base = 0.0 if config.init == "deepseek_v4" else mhc_forms.logit(1 / n)
            self.fn = self.parameter("fn", (n, n * stack.d_model), mhc_forms.map_start(config.init), "matrix")
            self.base = self.parameter("base", (n,), Constant(base), "bias")
            self.scale = self.parameter("scale", (1,), mhc_forms.scale_start(config.init), "gate")

    @outside_autocast
    def leave(self, state: Streams, layout: Layout = None, cache: Any = None) -> tuple[Stream, Any]:
        """Returns the input of the final norm."""
        if self.form.read_out == "learned":
            return mix(state, self._read_out(state).unsqueeze(0), self.config.impl)[0], cache
        return sum_streams(state) if self.form.read_out == "sum" else mean_streams(state), cache

    def explain(self, done: Read) -> Explanation:
        """Returns the learned read-out; nothing where all streams have the same weight."""
        if self.form.read_out != "learned":
            return Explanation()
        state, left = done.state, done.views
        weights = per_token(self._read_out(state), left)
        return Explanation((WeightedSum(left, "read", piece_names(len(state), 1), state, weights),))

    @outside_autocast
    def _read_out(self, state: Streams) -> Float[Tensor, "n B T"]:
        """The weights of a learned read-out."""
        dtype = statistics_dtype(state[0])
        scores = joint_scores(state, self.fn, self.form.norm_eps, self.config.impl)
        scale, base = (parameter.to(dtype)[:, None, None] for parameter in (self.scale, self.base))
        weights = torch.sigmoid(torch.addcmul(base, scale, scores))
        return weights + self.form.read_eps if self.form.read_eps else weights
