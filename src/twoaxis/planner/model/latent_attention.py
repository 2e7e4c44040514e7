"""Attention of DeepSeek-V3 and Kimi: multi-head latent attention (MLA) and Kimi Delta Attention (KDA).

Letters: D width, H heads, C width of the key-value latent, Q of the query latent, P channels of a head without positions, R
channels with positions (one key for all heads), V value channels of a head, K channels of keys and values of one KDA head, k
taps of a convolution, N tokens.
"""

from dataclasses import dataclass, replace
from typing import Literal, Self

from twoaxis.core.cost import Cost, ElementCount, Shape, visible_pairs
from twoaxis.core.position import SublayerInfo, SublayerPosition
from twoaxis.local import CanonConfig
from twoaxis.model.cost import NORMS
from twoaxis.planner.model.part import Part


@dataclass(frozen=True)
class LatentAttention(Part):
    """Attends with keys and values that are projected from a latent, which alone is cached.

    Equation: c_t = Norm(W_c x_t) of width C, r_t = R_t W_r x_t of width R;  k_th = (W_k c_t, r_t),  v_th = W_v c_t;
              q_th = W_q x_t, or W_q Norm(W_a x_t) through Q;  y = W_o concat_h softmax(q k^T) v
    Source:   DeepSeek-V2, arXiv:2405.04434, section 2.1
    Cost:     params D*(C + R) + C + C*H*(P + V) + H*V*D, and D*H*(P + R) or D*Q + Q + Q*H*(P + R); pair flops
              2*H*(P + R + V) per visible pair, or 2*H*(2*C + R) in the absorbed form; cache C + R numbers per token; saved,
              with fused norms, rotations and attention: latents before and after their norms, all heads, the output of
              attention and one statistic per head

    Attributes:
        n_heads: H.
        kv_rank: C.
        q_rank: Q; None without a query latent.
        nope_dim: P.
        rope_dim: R.
        value_dim: V.
        positions: `rotary`, or `none`: the R channels stay shared but are not rotated (Kimi Linear).
        output_gate: `none`, or `full`: a sigmoid map of the token, of D*H*V weights, scales the heads (Kimi K3).
        biases: `none`, or `outer`: the maps from and to the model width have biases.
        form: `widened`, with the heads of every token computed, as in training and prefill; or `absorbed`, which moves W_k to
            the queries and W_v to the outputs, so that heads attend in the latent. Generation uses this form, since the other
            projects the whole cache at every token; products with parameters and the result are the same.

    Example:
        >>> from twoaxis.core.position import LayerStack
        >>> site = LayerStack(7168, 1e-6, (1,)).sites[0]
        >>> deepseek = LatentAttention(n_heads=128, kv_rank=512, q_rank=1536, nope_dim=128, rope_dim=64, value_dim=128)
        >>> deepseek.cost(site, Shape(batch=1, tokens=1, element_bytes=2)).cache_bytes
        1152
    """

    n_heads: int
    kv_rank: int
    q_rank: int | None
    nope_dim: int
    rope_dim: int
    value_dim: int
    positions: Literal["rotary", "none"] = "rotary"
    output_gate: Literal["none", "full"] = "none"
    biases: Literal["none", "outer"] = "none"
    form: Literal["widened", "absorbed"] = "widened"

    def in_generation(self) -> Self:
        """The mixer in the absorbed form."""
        return replace(self, form="absorbed")

    @property
    def kind(self) -> str:
        """The kind of the mixer."""
        return "latent_attention"

    def slot(self, d_model: int) -> SublayerInfo:
        """One input, since keys and values share a latent, and no heads that a depth mixer could mix."""
        return SublayerInfo(self.kind)

    def cost(self, site: SublayerPosition, shape: Shape) -> Cost:
        """Projections by their weights, attention by its visible pairs, cache by the latents."""
        D, H, N = site.d_model, self.n_heads, shape.total_tokens
        queries, latents = H * (self.nope_dim + self.rope_dim), self.kv_rank + self.rope_dim
        q_norm = self.q_rank or 0
        weights = D * latents + self.kv_rank * H * (self.nope_dim + self.value_dim)
        weights += D * queries if self.q_rank is None else self.q_rank * (D + queries)
        weights += H * self.value_dim * (D + site.slot.update_extra)
        weights += 0 if self.output_gate == "none" else D * H * self.value_dim
        biases = 0 if self.biases == "none" else q_norm + latents + D
        elementwise = NORMS["rms"][1] * (self.kv_rank + q_norm) + biases
        elementwise += 3 * (H + 1) * self.rope_dim if self.positions == "rotary" else 0
        elementwise += 0 if self.output_gate == "none" else 5 * H * self.value_dim
        return Cost(
            params=weights + self.kv_rank + q_norm + biases,
            matmul_flops=2 * N * weights,
            pair_flops=2 * H * self._pair_channels * shape.batch * visible_pairs(shape.tokens, None),
            elementwise_flops=N * elementwise,
            saved_bytes=self._saved_bytes(shape),
            cache_bytes=shape.total_tokens * latents * shape.element_bytes,
        )

    @property
    def _pair_channels(self) -> int:
        """Channels of keys and values that one pair multiplies in one head."""
        if self.form == "absorbed":
            return 2 * self.kv_rank + self.rope_dim
        return self.nope_dim + self.rope_dim + self.value_dim

    def _saved_bytes(self, shape: Shape) -> int:
        H, N = self.n_heads, shape.total_tokens
        heads = H * (2 * (self.nope_dim + self.rope_dim) + 2 * self.value_dim)
        gate = 0 if self.output_gate == "none" else 2 * H * self.value_dim
        numbers = 2 * (self.kv_rank + (self.q_rank or 0)) + heads + gate
        # One statistic per head, and one per norm.
        statistics = H + 1 + (self.q_rank is not None)
        return N * ElementCount(numbers, statistics).bytes(shape.element_bytes)


@dataclass(frozen=True)
class KimiDeltaAttention(Part):
    """Overwrites a decaying state of fixed size along each token's key, and reads it.

    Equation: S_t = (I - b_t k_t k_t^T) Diag(a_t) S_(t-1) + b_t k_t v_t^T;  y = W_o concat_h(RMSNorm(S_t^T q_t) * sigmoid(g_t));
              q, k, v = silu(conv(W x));  a = exp(-exp(A) softplus(W_2 W_1 x + dt)), b = sigmoid(W_b x)
    Source:   Kimi Linear, arXiv:2510.26692, eq. 1; transformers 5.24 models/kimi_linear
    Cost:     params D*(4*H*K + K + H) + H*K*K + 3*H*K*k + H*K + H + K, and D*K + H*K*K for a low-rank output gate or D*H*K for
              a full one; pair flops those of the recurrence, 6*K*K per head and token, whatever the chunks; cache per
              sequence H*K*K statistics and (k - 1)*3*H*K numbers, however many tokens; saved, with fused norms, gates and
              recurrence: projections before and after the convolutions, decay, gates, and the output of the state

    Attributes:
        n_heads: H.
        head_dim: K.
        kernel: k.
        gate: the map of the output gate, `low_rank` through K channels or `full` (Kimi K3).

    Example:
        >>> from twoaxis.core.position import LayerStack
        >>> site = LayerStack(2304, 1e-5, (1,)).sites[0]
        >>> kda = KimiDeltaAttention(n_heads=32, head_dim=128, kernel=4)
        >>> [kda.cost(site, Shape(batch=1, tokens=t, element_bytes=2)).cache_bytes for t in (3, 100_000)]
        [2170880, 2170880]
    """

    n_heads: int
    head_dim: int
    kernel: int
    gate: Literal["low_rank", "full"] = "low_rank"

    @property
    def kind(self) -> str:
        """The kind of the mixer."""
        return "kimi_delta_attention"

    @property
    def windows(self) -> tuple[int, ...]:
        """One token, since the state holds the others, and the cache of the convolutions."""
        return tuple(sorted({1, self.kernel - 1}))

    def slot(self, d_model: int) -> SublayerInfo:
        """One input, since gates read it too, and no heads that a depth mixer could mix."""
        return SublayerInfo(self.kind)

    def cost(self, site: SublayerPosition, shape: Shape) -> Cost:
        """Costs of projections by their weights, of the recurrence by its three products per token, cache by the state."""
        D, H, K, N = site.d_model, self.n_heads, self.head_dim, shape.total_tokens
        C = H * K
        low_rank = K * (D + C)
        weights = 3 * D * C + low_rank + D * H + C * (D + site.slot.update_extra)
        weights += D * C if self.gate == "full" else low_rank
        # Normalising q and k, the decay, and the output norm with its gate.
        elementwise = H * (8 * K + 8 * K + K * K + 9 * K + 4)
        own = Cost(
            params=weights + C + H + K,
            matmul_flops=2 * N * weights,
            pair_flops=6 * K * C * N,
            elementwise_flops=N * elementwise,
            saved_bytes=self._saved_bytes(shape),
            cache_bytes=shape.batch * C * ElementCount(statistics=K).bytes(shape.element_bytes) + self._taps_bytes(shape),
        )
        return own + CanonConfig(kernel=self.kernel, form="plain", activation="silu").cost(3 * C, site, shape)

    def _taps_bytes(self, shape: Shape) -> int:
        """Bytes of the last inputs of the convolution."""
        tokens = shape.batch * min(shape.tokens, self.kernel - 1)
        return tokens * 3 * self.n_heads * self.head_dim * shape.element_bytes

    def _saved_bytes(self, shape: Shape) -> int:
        C, H = self.n_heads * self.head_dim, self.n_heads
        inner = self.head_dim * (1 if self.gate == "full" else 2)
        # q, k and v before the convolution, and before and after its activation; the gate, the input of the norm, the output.
        numbers = 9 * C + 3 * C + inner
        # In the precision of statistics the convolution keeps the rows that it pads.
        padded = 0 if shape.element_bytes < shape.statistics_bytes else shape.batch * (self.kernel - 1) * 3 * C
        each = ElementCount(numbers, statistics=2 * C + 3 * H).bytes(shape.element_bytes)
        return shape.total_tokens * each + padded * shape.element_bytes
