"""PaTH attention: positions by reflections that depend on the tokens in between, instead of rotations.

Letters: B batch, T position, D width, E emitted numbers, H heads, G kv-heads, R = H/G, K key width, r rank, P earlier tokens.
"""

import math
from dataclasses import dataclass
from typing import Literal, Self

import torch
import torch.nn.functional as F
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor

from twoaxis.core.cost import Cost, Shape, visible_pairs
from twoaxis.core.key_value_cache import KeyValueCache
from twoaxis.core.layout import TokenLayout
from twoaxis.core.parameters import Constant, Normal, Uniform, extra_output, matrix_std, with_extra
from twoaxis.core.position import SublayerPosition
from twoaxis.core.views import Views
from twoaxis.local.base import TokenHistory
from twoaxis.ops.causal_conv import causal_conv
from twoaxis.ops.norm import rms_norm
from twoaxis.ops.precision import Impl, statistics_dtype
from twoaxis.ops.reflected_attention import PathPast, path_attention
from twoaxis.ops.scores import linear_scores
from twoaxis.sequence.base import GroupedHeadOptions, OutputOptions, SequenceConfig, SequenceMixer


class PathAttentionConfig(OutputOptions, GroupedHeadOptions, SequenceConfig):
    """Attends to all earlier tokens through a product of reflections, one per token in between, which replaces RoPE.

    Equation: y_t = W_o concat_h sum_(j<=t) softmax_j((q_t^T A_t ... A_(j+1) k_j + sum_(s=j+1..t) f_s) / sqrt(K)) v_j,
              A_s = I - beta_s w_s w_s^T,  w = SiLU(conv(M c)) / |SiLU(conv(M c))|,  beta = 2 sigmoid(W_b c + b),
              f = log sigmoid(W_f c + b') with a forget gate (PaTH-FoX), else 0
    Source:   PaTH Attention, arXiv:2505.16381; fla-org/flash-linear-attention at bc3b101, layers/path_attn.py
    Deviates: qk_norm holds in decoding too, which the reference skips in its cached paths; nothing crosses a document border;
              cached keys are in float32 at least, since every step rewrites all of them; engines are plain PyTorch
    Shapes:   context [B T D] -> update [B T D]; softmax, norms, gates, reflections and cached keys in float32 (float64 for
              float64)
    Init:     NONE, or EXACT with output_init="zero"; matrices as in attention, taps U(-1/sqrt(k), 1/sqrt(k)), biases 0: beta is
              near 1, so that a token removes its direction from all earlier keys
    Cost:     params D*(H+2*G)*K + H*K*D + G*(D+1) + k*G*K, for M r*(D + G*K) or D*G*K, with a forget gate H*(D+1), with
              qk_norm 2*K; pair flops 4*H*K per visible pair and 4*G*K per pair of a token and an earlier key, which it
              rewrites: no two continuations share a cache; cache 2*G*K numbers per token, and k-1 tokens of G*K
    Args:
        n_heads: query heads H.
        n_kv_heads: kv-heads G, a divisor of H; None means H. Directions and strengths are those of a kv-head.
        head_dim: K; None means d_model / n_heads.
        w_map: the map M of the direction: `low_rank` (published for MHA), or `full` (published for grouped kv-heads).
        w_rank: r of a low-rank map.
        w_kernel: taps k of the convolution of the direction.
        w_eps: added to the squared length of the direction.
        qk_norm: `none`, or an RMSNorm `per_head` of queries and keys with one gain for all heads.
        forget_gate: `none`, or one `inside_scale` for each query head, divided by sqrt(K) with the scores, as published.
        output_init: `scaled` or `zero`.
        impl: `fused`, in blocks of at most 32 tokens, or `reference`, token by token.

    Raises:
        ConfigError: heads that do not divide the width or each other, and a rank without use.

    Example:
        >>> PathAttentionConfig(n_heads=8, n_kv_heads=2, w_map="full").kv_heads
        2
    """

    kind: Literal["path_attention"] = "path_attention"
    w_map: Literal["low_rank", "full"] = "low_rank"
    w_rank: int = Field(default=32, ge=1)
    w_kernel: int = Field(default=3, ge=2, le=8)
    w_eps: float = Field(default=1e-6, gt=0)
    qk_norm: Literal["none", "per_head"] = "none"
    forget_gate: Literal["none", "inside_scale"] = "none"
    impl: Impl = "fused"

    @model_validator(mode="after")
    def _rank_is_read(self) -> Self:
        if self.w_map == "full":
            self.refuse_options(["w_rank"], " with w_map='full'", "set w_map='low_rank'")
        return self

    @property
    def receptive_field(self) -> None:
        """All earlier tokens."""
        return None

    @property
    def inner_field(self) -> int:
        """The taps of the convolution of directions."""
        return self.w_kernel

    @property
    def gates(self) -> int:
        """Numbers of a token that gates are made of: a strength per kv-head, and a forget gate per query head."""
        return self.kv_heads + (0 if self.forget_gate == "none" else self.n_heads)

    def cost(self, site: SublayerPosition, shape: Shape) -> Cost:
        """Projections by their weights, scores by visible pairs, reflections by the pairs of a token and an earlier key."""
        D, N, H, G = site.d_model, shape.total_tokens, self.n_heads, self.kv_heads
        K = self.key_width(D)
        direction = D * G * K if self.w_map == "full" else self.w_rank * (D + G * K)
        weights = D * (H + 2 * G) * K + H * K * (D + site.slot.update_extra) + direction + D * self.gates
        norms = 0 if self.qk_norm == "none" else 2 * K
        pairs = shape.batch * visible_pairs(shape.tokens, None)
        return Cost(
            params=weights + self.w_kernel * G * K + self.gates + norms,
            matmul_flops=2 * N * weights,
            pair_flops=4 * H * K * pairs + 4 * G * K * (pairs - N),
            elementwise_flops=N * (G * K * (2 * self.w_kernel + 8) + 5 * self.gates + (4 * K * (H + G) if norms else 0)),
        )

    def build(self, site: SublayerPosition) -> "PathAttention":
        """Builds the mixer at this site."""
        self.check(site.d_model)
        return PathAttention(self, site)


@dataclass(frozen=True, eq=False)
class PathAttentionCache:
    """Reflected keys with the sums of forget gates behind them, values, and the last tokens of the convolution."""

    keys: KeyValueCache
    directions: TokenHistory


class PathAttention(SequenceMixer, config=PathAttentionConfig):
    """See `PathAttentionConfig`."""

    def __init__(self, config: PathAttentionConfig, site: SublayerPosition) -> None:
        super().__init__()
        self.config, self.norm_eps = config, site.norm_eps
        H, G, D = config.n_heads, config.kv_heads, site.d_model
        self.head_dim = K = config.key_width(D)
        grows, rows = "both" if config.head_dim is None else "inputs", (K,) * (H + 2 * G)
        self.qkv = self.linear("qkv", D, sum(rows), values=(G * K, site.hidden_std(D)), rows=rows, grows=grows)
        rank = config.w_rank if config.w_map == "low_rank" else None
        self.w_down = None if rank is None else self.linear("w_down", D, rank, grows="inputs")
        outputs = "outputs" if config.head_dim is None else "neither"
        self.w_up = self.linear("w_up", rank or D, G * K, rows=(K,) * G, grows=grows if rank is None else outputs)
        self.taps = self.parameter("taps", (G * K, config.w_kernel), Uniform(1 / math.sqrt(config.w_kernel)), "mixing")
        self.gates = self.parameter("gates", (config.gates, D), Normal(matrix_std(D)), "gate", grows="inputs")
        self.gate_bias = self.parameter("gate_bias", (config.gates,), Constant(0.0), "bias")
        if config.qk_norm == "per_head":
            self.q_gain = self.parameter("q_gain", (K,), Constant(1.0), "norm")
            self.k_gain = self.parameter("k_gain", (K,), Constant(1.0), "norm")
        self.output = self.linear("output", H * K, D, std=config.output_std(site, H * K))
        self.extra = extra_output(self, H * K, site.slot.update_extra)

    def new_cache(self) -> PathAttentionCache:
        """Empty caches."""
        return PathAttentionCache(KeyValueCache(), TokenHistory())

    def forward(
        self, context: Views, layout: TokenLayout, cache: PathAttentionCache | None = None
    ) -> tuple[Float[Tensor, "B T E"], PathAttentionCache | None]:
        """Returns the attention output, and the cache whose keys the new tokens have reflected."""
        assert isinstance(context, Tensor)
        q, k, v = self._heads(context)
        w, directions = self._directions(context, layout, TokenHistory() if cache is None else cache.directions)
        beta, forget_log = self._gates(context)
        earlier = None if cache is None else self._earlier(cache.keys, k, v)
        documents = layout.key_documents((0 if cache is None else cache.keys.length) + context.shape[1])
        y, past = path_attention(
            q, k, v, w, beta, forget_log=forget_log, past=earlier, documents=documents, impl=self.config.impl
        )
        update = with_extra(self.output, self.extra, y.transpose(1, 2).flatten(2))
        return update, None if past is None else PathAttentionCache(_packed(past), directions)

    def _heads(self, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [B _ T K], normalised where they are."""
        H, G = self.config.n_heads, self.config.kv_heads
        q, k, v = self.qkv(context).unflatten(-1, (-1, self.head_dim)).split((H, G, G), dim=2)
        if self.config.qk_norm == "per_head":
            q, k = (rms_norm(x, gain, self.norm_eps, self.config.impl) for x, gain in ((q, self.q_gain), (k, self.k_gain)))
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def _directions(self, context: Tensor, layout: TokenLayout, history: TokenHistory) -> tuple[Tensor, TokenHistory]:
        """Directions of length 1 [B G T K], and the last inputs of their convolution."""
        config, K = self.config, self.head_dim
        x = self.w_up(context if self.w_down is None else self.w_down(context))
        documents = history.documents(layout)
        w = F.silu(causal_conv(x, self.taps, history=history.tokens, documents=documents, impl=config.impl))
        # The root mean square of K numbers is their length over sqrt(K), which bfloat16 would round.
        length_one = w.new_full((K,), 1 / math.sqrt(K), dtype=statistics_dtype(w))
        w = rms_norm(w.unflatten(-1, (-1, K)), length_one, config.w_eps / K, config.impl)
        return w.transpose(1, 2), history.following(x, config.w_kernel)

    def _gates(self, context: Tensor) -> tuple[Float[Tensor, "B G T"], Float[Tensor, "B H T"] | None]:
        """The strength of each reflection, and the logarithm of the forget gates."""
        G, scores = self.config.kv_heads, linear_scores(context, self.gates, self.config.impl).transpose(0, 1)
        scores = scores + self.gate_bias.to(scores.dtype).unsqueeze(-1)
        forget_log = F.logsigmoid(scores[:, G:]) if self.config.forget_gate != "none" else None
        return 2 * torch.sigmoid(scores[:, :G]), forget_log

    def _earlier(self, keys: KeyValueCache, k: Tensor, v: Tensor) -> PathPast:
        """The past that a cache holds; forget gates of the query heads of a kv-head are its last channels."""
        config = self.config
        if keys.length == 0:
            none = k.new_empty(k.shape[0], config.n_heads, 0) if config.forget_gate != "none" else None
            return PathPast(k[:, :, :0], v[:, :, :0], none)
        held, values = keys.past()
        forgotten = held[..., self.head_dim :].transpose(-1, -2).flatten(1, 2) if config.forget_gate != "none" else None
        return PathPast(held[..., : self.head_dim], values, forgotten)


def _packed(past: PathPast) -> KeyValueCache:
    keys, G = past.keys, past.keys.shape[1]
    if past.forgotten is not None:
        keys = torch.cat((keys, past.forgotten.unflatten(1, (G, -1)).transpose(-1, -2)), dim=-1)
    return KeyValueCache.of(keys, past.values)
