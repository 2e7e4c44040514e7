"""Manifold-constrained Hyper-Connections: parallel residual streams that are mixed by matrices of bounded gain.

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
from twoaxis.core.parameters import Constant, Fused, Values
from twoaxis.core.position import LayerStack, SublayerPosition
from twoaxis.core.views import WeightedSum, per_token
from twoaxis.depth import mhc_forms
from twoaxis.depth.base import Controls, DepthConfig, Explanation, Layout, Read, State, Stream
from twoaxis.depth.mhc_forms import PRESETS, Coefficients, Form, Init, Preset, ReadOut, ReadTime, Scores
from twoaxis.depth.streams import Mixing, ParallelEnds, Streams, StreamsMixer
from twoaxis.ops.mix import mix
from twoaxis.ops.precision import Impl, outside_autocast, statistics_dtype
from twoaxis.ops.scores import joint_scores, stream_scores
from twoaxis.ops.sinkhorn import Order, Start
from twoaxis.ops.stream_matrices import BOUNDS, Residual, StreamMatrix
from twoaxis.ops.streams import piece_names


class MHCConfig(DepthConfig):
    """Keeps n residual streams; each sublayer reads them, mixes them by a matrix of bounded gain and writes to all of them.

    Equation: u = sum_j a_j S_j,  S'_i = b_i f(Norm(u)) + sum_j R_ji S_j,  S_j = embeddings at first
              z = fn [S_1 ... S_n] / rms(S_1 ... S_n);  t = scale * z + base, in rows of (a, b, R), one scale for each;
              or t = scale * tanh(z) + base
              a = sigmoid(t_a) + read_eps,  b = write_magnitude sigmoid(t_b) + write_eps,  R of t_R in `ops.stream_matrices`
              delayed: u with the a of the sublayer before, (1, 0, ...) at first;  h = sum_j a_j S_j with that of the last
              per_stream: row j of (a, b, R) comes from S_j alone, z_j = fn (gain * S_j / rms(S_j)), one fn for all streams
              learned read-out: h = sum_j w_j S_j, w = sigmoid(scale * z + base) + read_eps
    Source:   mHC, arXiv:2512.24880, eq. 7-9; transformers 5.24 models/deepseek_v4, glm5_next and hy_v4; lucidrains/
              hyper-connections 0.4.11 (v1 and v2 are the same mathematics); DeepSeek-V4.1, arXiv:2609.19969, eq. 6, and
              transformers at 0a2080b models/deepseek_v41; DepthBench at 8cc2fd7; residuals of arXiv:2601.05732 (mHC-lite),
              2601.21579 (KromHC), 2603.20896 (sHC) and 2609.02672 (oHC)
    Deviates: R is [source j, destination i], as in the comb of DeepSeek, whose transpose is applied to the streams; the paper's
              H_res = R^T, and S' = H_res S. The paper does not publish its read-out: `sum`. It gives the scales 0.01 and no
              other initial value: `preserving` is ours. Decay is not published: here fn alone. lucidrains, mHC-lite, KromHC
              and sHC divide by the norm of a row, here by its rms with an eps of 1e-20; the gain of the last three on the
              columns of fn is folded into fn. Softmaxes and `orthogonal` are reconstructions
    Shapes:   state n times [B T D], delayed also the next a [B T n] in float32; update [B T D] -> state; scores, rounds and
              weights in float32, streams rounded once. joint: fn [n*(n+2), n*D] in DeepSeek's order, rows a (n), b (n), R (n*n,
              row-major [source, destination]), columns stream-major; base as the rows; scale [3] of (a, b, R). per_stream:
              fn [n+2, D], rows a, b, R (n destinations), base [n, n+2] in the same columns. R has no rows for `identity`, n!
              for `permutations`, 2 log2(n) for `kronecker`, 8 for `orthogonal` and (n-1)^2 in 3 scales for `spectral`
    Init:     UP_TO_NORM with `preserving` and `depthbench` and no eps on the weights: fn 0, scale 0.01, b = 1, R nearly the
              identity; sublayer g prefers stream g mod n (0.7 of its read, `depthbench` nearly all), so that they diverge. NONE
              with others. R of the first sublayer, whose streams are equal, and of the last one before a sum or mean cannot
              matter (up to convergence and eps): its rows of fn, base and scale get no gradient there
    Cost:     params n*(n + 2)*(n*D + 1) + 3 per sublayer (per_stream: (n + 2)*(D + n) + 3 + D), learned read-out n*n*D + n + 1;
              flops 2*n*(n + 3)*D per token and sublayer for the streams and their norm, joint scores 2*n^2*(n + 2)*D, and
              4*n^2*rounds; state n*D numbers per token, delayed n*(D + 1)
    Published: 27B mixture of experts, arXiv:2512.24880: loss 0.021 below plain; BBH 51.0 (plain 43.8), MMLU 63.4 (59.0)

    Args:
        preset: gives options left out: `paper`, `deepseek_v4` (`_v41`), `glm5`, `lucidrains_v1` (`_v2`), `hy_v4`, `depthbench`.
        n_streams: residual streams; all published models have 4.
        scores: `joint` of all streams together, or `per_stream`.
        norm_eps: eps of the rms in the scores.
        coefficients: `linear` in the scores, or in their `tanh`.
        read: with the `current` weights, or `delayed`, with those of the sublayer before: one pass over the streams.
        residual: `sinkhorn`; `identity`, which mixes nothing; a doubly stochastic mean of `permutations` (n up to 4) or
            `kronecker` product (n = 2^K), without rounds; `spectral`, of norm 1 with negative entries; `source_softmax` or
            `destination_softmax`, with sums of 1 along one axis; or `orthogonal`, a rotation of 4 streams.
        rounds: of Sinkhorn.
        order: `destinations_first` or `sources_first`, the sum that each round divides by first.
        start: `exp`, `exp_minus_max`, `softmax` or `log`.
        start_eps: added to the start of Sinkhorn.
        sum_eps: added to each of its sums.
        read_eps: added to the read weights, also those of a learned read-out.
        write_eps: added to the write weights.
        write_magnitude: the upper end of the write weights.
        read_out: `sum`, `mean` or `learned`; or `last_site`, by the weights of the last sublayer, with a delayed read.
        init: `preserving`; `deepseek_v4`, the placeholder of transformers; or as released `lucidrains`, `hy_v4`, `mhc_lite`
            (KromHC and sHC too) and `depthbench`, which its preset starts with.
        impl: `fused` or `reference`.

    Raises:
        ConfigError: n_streams below 2 or other than the residual needs, options of Sinkhorn without it, or options that
            exclude each other.

    Example:
        >>> MHCConfig(preset="deepseek_v4", rounds=2).form.order
        'destinations_first'
    """

    kind: Literal["mhc"] = "mhc"
    preset: Preset = "paper"
    n_streams: int = Field(default=4, ge=2)
    scores: Scores | None = None
    norm_eps: float | None = Field(default=None, gt=0)
    coefficients: Coefficients | None = None
    read: ReadTime | None = None
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
    init: Init | None = None
    impl: Impl = "fused"

    @property
    def design(self) -> MixingDesign:
        """Weights between streams, made from the streams."""
        return MixingDesign(
            query="parameter maps",
            key="RMSNorm(S_1 ... S_n)" if self.form.scores == "joint" else "RMSNorm(S_j)",
            value="S_j",
            normaliser="sigmoid" if self.form.residual == "identity" else f"sigmoid; {BOUNDS[self.form.residual]}",
            window="own state",
            sharing="sublayer",
            injection="written to n streams",
            weights="input and reader",
        )

    @property
    def form(self) -> Form:
        """The preset with the options that are given."""
        given = {one.name: x for one in fields(Form) if (x := getattr(self, one.name)) is not None}
        return replace(PRESETS[self.preset], **given)

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        form = self.form
        if form.residual != "sinkhorn":
            reason = f", since residual={form.residual!r} has no rounds of Sinkhorn"
            self.refuse_options(mhc_forms.OF_SINKHORN, reason, "remove it or use residual='sinkhorn'")
        # Making the matrix refuses options that exclude each other; not in an assert, which -O drops.
        _ = self.matrix
        form.check(self.write_magnitude)
        return self

    def controls(self) -> Controls:
        """Static hyper-connections, whose weights are free where these are bounded; and the same without mixing."""
        static = {"kind": "hyper_connections", "weights": "static", "n_streams": self.n_streams}
        identity = self.replace(residual="identity", **dict.fromkeys(mhc_forms.OF_SINKHORN)).to_data()
        return Controls(static, streams=self.n_streams, unmixed=identity if self.matrix.groups else None)

    @property
    def init_equivalence(self) -> InitEquivalence:
        """That of the form."""
        return self.form.init_equivalence

    @property
    def matrix(self) -> StreamMatrix:
        """How the residual logits become a matrix."""
        return self.form.matrix(self.n_streams)

    @property
    def groups(self) -> tuple[int, ...]:
        """Scores of a token that share a scale: of the reads, of the writes, and those of the matrix."""
        return (self.n_streams, self.n_streams, *self.matrix.groups)

    def cost(self, site: SublayerPosition, shape: Shape) -> Cost:
        """The scores, the matrix, one read and one mixing write."""
        n, D, N, matrix, groups = self.n_streams, site.d_model, shape.total_tokens, self.matrix, self.groups
        joint, scores, mixes = self.form.scores == "joint", sum(groups), len(groups) > 2
        return matrix.cost(N) + Cost(
            params=scores + len(groups) + 2 * matrix.turns + (scores * n * D if joint else (scores // n + 1) * D),
            matmul_flops=2 * scores * D * N * (n if joint else 1),
            elementwise_flops=N * (6 * n * D + 2 * n * n * D * mixes + 3 * scores),
        )

    def ends_cost(self, stack: LayerStack, shape: Shape) -> Cost:
        """The read-out."""
        n, D, N = self.n_streams, stack.d_model, shape.total_tokens
        if self.form.read_out != "learned":
            scaled = {"sum": 0, "mean": 1, "last_site": n}[self.form.read_out]
            return Cost(elementwise_flops=(n - 1 + scaled) * D * N)
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
        self.config, self.form, self.matrix, self.groups = config, config.form, config.matrix, config.groups
        form, n, joint = self.form, config.n_streams, config.form.scores == "joint"
        base = mhc_forms.starting_logits(form, site.index, n, config.write_magnitude)
        columns = len(base) // n
        shape = (len(base), n * site.d_model) if joint else (columns, site.d_model)
        # Only a residual of its own acts on the streams themselves.
        fused, stacked = Fused(tuple(size if joint else size // n for size in self.groups)), int(len(self.groups) > 2)
        start, scale = mhc_forms.map_start(form.init), mhc_forms.scale_start(form.init)
        self.fn = self.parameter("fn", shape, start, "matrix", fused=fused, grows="inputs", stacked=stacked)
        place = (len(base),) if joint else (n, columns)
        self.base = self.parameter("base", place, Values(tuple(base)), "bias", stacked=stacked)
        self.scale = self.parameter("scale", (len(self.groups),), scale, "gate", stacked=stacked)
        if not joint:
            self.gain = self.parameter("gain", (site.d_model,), Constant(1.0), "norm")
        turns = self.matrix.turns
        self.angle_bounds = self.parameter("angle_bounds", (2,), Constant(1.0), "gate", stacked=1) if turns else None

    def read(self, state: State, layout: Layout = None, cache: Any = None) -> tuple[Stream, Mixing, Any]:
        """Returns the weighted sum of the streams, and the streams and weights for the write."""
        streams: Streams = state[: self.config.n_streams]
        read, residual, write = self.weights(streams)
        delayed = self.form.read == "delayed"
        (view,) = mix(streams, (state[-1].movedim(-1, 0) if delayed else read).unsqueeze(0))
        return view, Mixing(streams, residual, write.unsqueeze(0), read.movedim(0, -1) if delayed else None), cache

    def read_sum(self, state: State, view: Stream) -> WeightedSum:
        """Returns the sum of the streams that is read."""
        streams: Streams = state[: self.config.n_streams]
        read = state[-1].movedim(-1, 0) if self.form.read == "delayed" else self.weights(streams)[0]
        return WeightedSum(view, "read", piece_names(len(streams), 1), streams, per_token(read, view))

    def weights(self, state: Streams) -> tuple[Tensor, Tensor | None, Tensor]:
        """Returns the weights of each token: read [n B T], residual [n n B T] or None, and write [n B T]."""
        read, write, *residual = self._logits(state)
        read, write = torch.sigmoid(read), self.config.write_magnitude * torch.sigmoid(write)
        read = read + self.form.read_eps if self.form.read_eps else read
        write = write + self.form.write_eps if self.form.write_eps else write
        return read, self.matrix.of(residual[0], self.angle_bounds, self.impl) if residual else None, write

    @outside_autocast
    def _logits(self, state: Streams) -> tuple[Tensor, ...]:
        n, dtype, groups = len(state), statistics_dtype(state[0]), self.groups
        if self.form.scores == "joint":
            scores = joint_scores(state, self.fn, self.form.norm_eps, self.impl)
        else:
            groups = tuple(size // n for size in groups)
            maps = self.fn.to(dtype) * self.gain.to(dtype)
            scores = stream_scores(state, maps, self.form.norm_eps, self.impl)
        if self.form.coefficients == "tanh":
            scores = torch.tanh(scores)
        scale = torch.cat([one.expand(size) for one, size in zip(self.scale.to(dtype).split(1), groups, strict=True)])
        logits = torch.addcmul(self.base.to(dtype)[..., None, None], scale[:, None, None], scores)
        read, write, *residual = logits.split((*groups[:2], *(sum(groups[2:]),) * (len(groups) > 2)), dim=-3)
        return (read, write, *residual) if self.form.scores == "joint" else (read.squeeze(1), write.squeeze(1), *residual)


class MHCEnds(ParallelEnds):
    """Every stream starts as the embeddings, and the streams end as their sum, mean, or learned sum."""

    def __init__(self, config: MHCConfig, stack: LayerStack) -> None:
        super().__init__(config.n_streams, read_out=config.form.read_out)
        self.config, self.form = config, config.form
        n = config.n_streams
        if self.form.read_out == "learned":
            base = 0.0 if self.form.init == "deepseek_v4" else mhc_forms.logit(1 / n)
            start = mhc_forms.map_start(self.form.init)
            self.fn = self.parameter("fn", (n, n * stack.d_model), start, "matrix", grows="inputs")
            self.base = self.parameter("base", (n,), Constant(base), "bias")
            self.scale = self.parameter("scale", (1,), mhc_forms.scale_start(self.form.init), "gate")

    def enter(self, embeddings: Stream, layout: Layout = None, cache: Any = None) -> tuple[State, Any]:
        """Returns the embeddings n times; with a delayed read, also the weights of the first one, of stream 0 alone."""
        streams, cache = super().enter(embeddings, layout, cache)
        if self.form.read == "current":
            return streams, cache
        first = torch.eye(1, self.n_streams, dtype=statistics_dtype(embeddings), device=embeddings.device)
        return (*streams, first.expand(*embeddings.shape[:2], -1).contiguous()), cache

    @outside_autocast
    def leave(self, state: State, layout: Layout = None, cache: Any = None) -> tuple[Stream, Any]:
        """Returns the input of the final norm."""
        if self.form.read_out in ("sum", "mean"):
            return super().leave(state, layout, cache)
        return mix(state[: self.n_streams], self._read_out(state).unsqueeze(0))[0], cache

    def explain(self, done: Read) -> Explanation:
        """Returns the read-out by its weights; nothing where all streams have the same weight."""
        if self.form.read_out in ("sum", "mean"):
            return Explanation()
        streams, left = done.state[: self.n_streams], done.views
        weights = per_token(self._read_out(done.state), left)
        return Explanation((WeightedSum(left, "read", piece_names(self.n_streams, 1), streams, weights),))

    @outside_autocast
    def _read_out(self, state: State) -> Float[Tensor, "n B T"]:
        """The weights of the read-out where they differ by token."""
        if self.form.read_out == "last_site":
            return state[-1].movedim(-1, 0)
        streams: Streams = state[: self.n_streams]
        scores = joint_scores(streams, self.fn, self.form.norm_eps, self.config.impl)
        scale, base = (parameter.to(scores.dtype)[:, None, None] for parameter in (self.scale, self.base))
        weights = torch.sigmoid(torch.addcmul(base, scale, scores))
        return weights + self.form.read_eps if self.form.read_eps else weights
