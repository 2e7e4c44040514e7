"""Gated DeltaNet: a global mixer of linear cost, whose memory is a state of fixed size per head.

Letters: B batch, T position, D width, E emitted numbers, H heads, K key width, V value width, C channels.
"""

import math
from typing import Literal, NamedTuple, Self

import torch
import torch.nn.functional as F
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.errors import ConfigError
from twoaxis.core.layout import TokenLayout
from twoaxis.core.parameters import Constant, LogOfUniform, Normal, SoftplusInverse, extra_output, matrix_std, with_extra
from twoaxis.core.position import SublayerPosition
from twoaxis.core.views import Views
from twoaxis.local import BranchSWAConfig, CanonConfig, Local
from twoaxis.local.base import Parts
from twoaxis.local.places import LocalPlaces, Places, PlacesConfig, mix_locally
from twoaxis.ops.gated_delta import gated_delta
from twoaxis.ops.norm import rms_norm
from twoaxis.ops.precision import Impl, statistics_dtype
from twoaxis.ops.rope import RotationTable
from twoaxis.ops.scores import linear_scores
from twoaxis.sequence.base import HeadOptions, OutputOptions, SequenceConfig, SequenceMixer


class GatedDeltaNetConfig(OutputOptions, HeadOptions, PlacesConfig, SequenceConfig):
    """Writes every token into a decaying state of fixed size, over what the state held for its key, and reads the state.

    Equation: S_t = a_t S_(t-1) (I - b_t k_t k_t^T) + b_t v_t k_t^T;
              y_t = W_o concat_h (RMSNorm(S_t q_t / sqrt(K)) * silu(W_g x_t));
              q, k, v = local(W x), q and k scaled to length 1 per head;
              a = exp(-exp(A_log) softplus(W_a x + dt_bias)), b = sigmoid(W_b x), one number each per head
    Source:   Gated Delta Networks, arXiv:2412.06464, eq. 10; fla-org/flash-linear-attention at bc3b101,
              layers/gated_deltanet.py
    Deviates: the SiLU behind the short convolution is an option of projected_local, so that none follows without one, where the
              reference keeps it. One convolution covers q, k and v side by side, which is the reference's three. b is at most
              1 (the reference can double it), exp(A_log) is at least 0.0001 (the reference: U(0, 16)), and the output norm has
              the eps of the model. Nothing crosses a document border; engines are plain PyTorch, no kernel of another library
              is called. ShortSWA in the branches has no public code
    Shapes:   context [B T D] -> update [B T D]; lengths, a, b, the state and the output gate in float32 (float64 for float64)
    Init:     NONE, or EXACT with output_init="zero"; matrices as in attention, exp(A_log) ~ U(0.0001, 16), softplus(dt_bias)
              log-uniform between 0.001 and 0.1, gain 1
    Cost:     params D*H*(2*K + 3*V + 2) + 2*H + V, and those of the local mixers; pair flops those of the recurrence, 6*K*V
              per head and token (the fused engine runs about twice as many at K = 64); cache H*K*V numbers, however many tokens
    Args:
        n_heads: heads H.
        head_dim: width K of queries and keys; None means d_model / n_heads (published: 3/4 of it).
        value_dim: width V of values; None means 2 K, as published.
        input_local: a local mixer of the context.
        projected_local: a local mixer of queries, keys and values, before they are scaled: the published short convolution by
            default. The author of ShortSWA proposed it for this place: `local_swa` has projections of its own, `branch_swa` has
            none, and takes its scores from each branch or from queries and keys.
        projected_over: one local mixer of all three `joint`, or one of each `branch` with parameters of its own.
        update_local: a local mixer of the update before it enters the residual stream.
        qk_eps: added to the squared length of queries and keys.
        output_init: `scaled` or `zero`.
        impl: `fused` or `reference`.

    Raises:
        ConfigError: heads that do not divide the width, or a local mixer that does not fit the branches.

    Example:
        >>> GatedDeltaNetConfig(head_dim=12, projected_local={"kind": "local_swa", "window": 16}).value_width(64)
        24
    """

    kind: Literal["gated_delta_net"] = "gated_delta_net"
    value_dim: int | None = Field(default=None, ge=1)
    projected_local: Local = CanonConfig(form="plain", activation="silu")
    projected_over: Literal["joint", "branch"] = "joint"
    qk_eps: float = Field(default=1e-6, gt=0)
    impl: Impl = "fused"

    @model_validator(mode="after")
    def _apart_once(self) -> Self:
        if self.projected_over == "branch" and (
            self.projected_local is None or isinstance(self.projected_local, BranchSWAConfig)
        ):
            got = "without projected_local" if self.projected_local is None else "with branch_swa, which keeps branches apart"
            raise ConfigError(f"projected_over='branch' {got}: must be 'joint'; leave it out")
        return self

    @property
    def branch_heads(self) -> tuple[int, ...]:
        """As many heads of queries, keys and values."""
        return (self.n_heads,) * 3

    def branches(self, d_model: int) -> Parts:
        """The heads with the widths of keys and of values."""
        K = self.key_width(d_model)
        return tuple((self.n_heads, width) for width in (K, K, self.value_width(d_model)))

    def without_local(self) -> Self:
        """The same sublayer without local mixers."""
        return self.replace(input_local=None, projected_local=None, update_local=None, projected_over="joint")

    def mixed_apart(self, d_model: int) -> tuple[int, ...] | None:
        """The channels of each branch, if each has a local mixer."""
        return tuple(heads * width for heads, width in self.branches(d_model)) if self.projected_over == "branch" else None

    @property
    def pair_window(self) -> int:
        """One token, since the state holds the others."""
        return 1

    @property
    def receptive_field(self) -> None:
        """No bound: the state decays and drops no token."""
        return None

    def check(self, d_model: int) -> None:
        """Raises ConfigError if the heads do not divide the width, or do not fit a local mixer."""
        super().check(d_model)
        self.placed(d_model)

    def value_width(self, d_model: int) -> int:
        """Width of the values of one head."""
        return self.value_dim or 2 * self.key_width(d_model)

    def local_channels(self, site: SublayerPosition) -> Places:
        """Channels of the input, of all heads concatenated, and of the update."""
        D = site.d_model
        return Places(D, self.n_heads * (2 * self.key_width(D) + self.value_width(D)), D)

    def cost(self, site: SublayerPosition, shape: Shape) -> Cost:
        """Costs of projections by their weights, of the recurrence by its three products per token."""
        D, H, N = site.d_model, self.n_heads, shape.total_tokens
        K, V = self.key_width(D), self.value_width(D)
        weights = D * H * (2 * K + 2 * V + 2) + H * V * (D + site.slot.update_extra)
        own = Cost(
            params=weights + 2 * H + V,
            matmul_flops=2 * N * weights,
            pair_flops=6 * K * V * H * N,
            elementwise_flops=N * H * (8 * K + K * V + 9 * V + 8),
        )
        return own + self.local_cost(site, shape)

    def rotations(self, d_model: int) -> frozenset[RotationTable]:
        """Those of the local mixers."""
        return self.local_rotations(d_model)

    def build(self, site: SublayerPosition) -> "GatedDeltaNet":
        """Builds the mixer at this site."""
        self.check(site.d_model)
        return GatedDeltaNet(self, site)


class GatedDeltaNetCache(NamedTuple):
    """The state after the last token, None before the first, and the caches of the local mixers."""

    state: Float[Tensor, "B H V K"] | None
    local: Places


class GatedDeltaNet(LocalPlaces, SequenceMixer, config=GatedDeltaNetConfig):
    """See `GatedDeltaNetConfig`."""

    def __init__(self, config: GatedDeltaNetConfig, site: SublayerPosition) -> None:
        super().__init__()
        self.config = config
        self.norm_eps = site.norm_eps
        H, D = config.n_heads, site.d_model
        self.key_width, V = config.key_width(D), config.value_width(D)
        rows, values = (self.key_width,) * (2 * H) + (V,) * H, (H * V, site.hidden_std(D))
        grows = "both" if config.head_dim is None else "inputs"
        self.qkv = self.linear("qkv", D, sum(rows), values=values, rows=rows, grows=grows)
        self.gate = self.linear("gate", D, H * V)
        self.decay_and_beta = self.parameter("decay_and_beta", (2 * H, D), Normal(matrix_std(D)), "gate", grows="inputs")
        self.A_log = self.parameter("A_log", (H,), LogOfUniform(1e-4, 16.0), "gate")
        self.dt_bias = self.parameter("dt_bias", (H,), SoftplusInverse(0.001, 0.1), "bias")
        self.gain = self.parameter("gain", (V,), Constant(1.0), "norm")
        self.output = self.linear("output", H * V, D, std=config.output_std(site, H * V))
        self.extra = extra_output(self, H * V, site.slot.update_extra)
        self.fill_places(config, site)

    def new_cache(self) -> GatedDeltaNetCache:
        """An empty state, and empty caches of the local mixers."""
        return GatedDeltaNetCache(None, self.new_local_caches())

    def forward(
        self, context: Views, layout: TokenLayout, cache: GatedDeltaNetCache | None = None
    ) -> tuple[Float[Tensor, "B T E"], GatedDeltaNetCache | None]:
        """Returns the gated and projected output of the heads, and the state after these tokens."""
        assert isinstance(context, Tensor)
        given, (state, local) = context, (None, Places()) if cache is None else cache
        context, input_local = mix_locally(self.input_local, context, layout, local.input)
        # Contiguous, or each of three projections would save a copy.
        context = context.flatten(0, 1).unflatten(0, context.shape[:2])
        channels, projected_local = mix_locally(self.projected_local, self.qkv(context), layout, local.projected, given)
        documents = layout.key_documents(channels.shape[1] + (state is not None))
        heads = (*self._heads(channels), *self._gates(context))
        y, state = gated_delta(*heads, state=state, documents=documents, impl=self.config.impl)
        update = with_extra(self.output, self.extra, self._gated(y.transpose(1, 2), context))
        update, local = self.mix_update(update, layout, local, given)
        local = local._replace(input=input_local, projected=projected_local)
        return update, None if cache is None else GatedDeltaNetCache(state, local)

    def _heads(self, channels: Float[Tensor, "B T C"]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys of length 1, and values, each [B H T _]."""
        H, K = self.config.n_heads, self.key_width
        q_k, v = channels.split((2 * H * K, channels.shape[-1] - 2 * H * K), dim=-1)
        # The root mean square of K numbers is their length over sqrt(K), which bfloat16 would round.
        length_one = channels.new_full((K,), 1 / math.sqrt(K), dtype=statistics_dtype(channels))
        q_k = rms_norm(q_k.unflatten(-1, (2 * H, K)), length_one, self.config.qk_eps / K, self.config.impl)
        q, k = q_k.transpose(1, 2).chunk(2, dim=1)
        return q, k, v.unflatten(-1, (H, -1)).transpose(1, 2)

    def _gates(self, context: Float[Tensor, "B T D"]) -> tuple[Float[Tensor, "B H T"], Float[Tensor, "B H T"]]:
        """The logarithm of the decay, and the write strength, of each head."""
        scores = linear_scores(context, self.decay_and_beta, self.config.impl).transpose(0, 1)
        decay, beta = scores.chunk(2, dim=1)
        rate, bias = (x.to(scores.dtype).unsqueeze(-1) for x in (self.A_log, self.dt_bias))
        return -rate.exp() * F.softplus(decay + bias), torch.sigmoid(beta)

    def _gated(self, y: Float[Tensor, "B T H V"], context: Float[Tensor, "B T D"]) -> Float[Tensor, "B T _"]:
        wide = statistics_dtype(y)
        gate = F.silu(self.gate(context).to(wide))
        # Reads are divided by sqrt(K), which only the eps of the norm shows.
        eps = self.norm_eps * self.key_width
        return (rms_norm(y, self.gain, eps, self.config.impl).flatten(2) * gate).to(y.dtype)
