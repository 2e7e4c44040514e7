"""Kimi Delta Attention (KDA): a gated delta rule whose decay is one number per key channel.

Letters: D width, H heads, K channels of keys and values of one head, k taps of a convolution, N tokens.
"""

from dataclasses import dataclass
from typing import Literal

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.site import Site, Slot
from twoaxis.core.state import Numbers
from twoaxis.local import CanonConfig
from twoaxis.planner.model.part import Part


@dataclass(frozen=True)
class KimiDeltaAttention(Part):
    """Overwrites a decaying state of fixed size along each token's key, and reads it.

    Equation: S_t = (I - b_t k_t k_t^T) Diag(a_t) S_(t-1) + b_t k_t v_t^T;  y = W_o concat_h(RMSNorm(S_t^T q_t) * sigmoid(g_t));
              q, k, v = silu(conv(W x));  a = exp(-exp(A) softplus(W_2 W_1 x + dt)), b = sigmoid(W_b x)
    Source:   Kimi Linear, arXiv:2510.26692, eq. 1; transformers 5.24 models/kimi_linear
    Cost:     params D*(4*H*K + K + H) + H*K*K + 3*H*K*k + H*K + H + K, and D*K + H*K*K for a low-rank output gate or D*H*K for
              a full one; pair flops those of the recurrence, 6*K*K per head and token, whatever the chunks; cache per
              sequence H*K*K statistics and (k - 1)*3*H*K numbers, however many tokens; saved, with fused norms, gates and
              recurrence: projections before and behind the convolutions, decay, gates, and what the state gave

    Attributes:
        n_heads: H.
        head_dim: K.
        kernel: k.
        gate: the map of the output gate, `low_rank` through K channels or `full` (Kimi K3).

    Example:
        >>> from twoaxis.core.site import Stack
        >>> site = Stack(2304, 1e-5, (1,)).sites[0]
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
        """The name of the mixer."""
        return "kimi_delta_attention"

    @property
    def windows(self) -> tuple[int, ...]:
        """Its own token, since the state stands for the others, and what the convolutions hold."""
        return tuple(sorted({1, self.kernel - 1}))

    def slot(self, d_model: int) -> Slot:
        """One input, since gates read it too, and no heads that a depth mixer could mix."""
        return Slot(self.kind)

    def cost(self, site: Site, shape: Shape) -> Cost:
        """Projections by their weights, the recurrence by its three products per token, cache by the state."""
        D, H, K, N = site.d_model, self.n_heads, self.head_dim, shape.total_tokens
        C = H * K
        low_rank = K * (D + C)
        weights = 3 * D * C + low_rank + D * H + C * (D + site.slot.update_extra)
        weights += D * C if self.gate == "full" else low_rank
        # Lengths of q and k, the decay and its use, and the output norm with its gate.
        elementwise = H * (8 * K + 8 * K + K * K + 9 * K + 4)
        own = Cost(
            params=weights + C + H + K,
            matmul_flops=2 * N * weights,
            pair_flops=6 * K * C * N,
            elementwise_flops=N * elementwise,
            saved_bytes=self._saved_bytes(shape),
            cache_bytes=shape.batch * C * Numbers(statistics=K).bytes(shape.element_bytes) + self._taps_bytes(shape),
        )
        return own + CanonConfig(kernel=self.kernel, form="plain", activation="silu").cost(3 * C, shape)

    def _taps_bytes(self, shape: Shape) -> int:
        """Bytes of the last inputs of the convolution."""
        tokens = shape.batch * min(shape.tokens, self.kernel - 1)
        return tokens * 3 * self.n_heads * self.head_dim * shape.element_bytes

    def _saved_bytes(self, shape: Shape) -> int:
        C, H = self.n_heads * self.head_dim, self.n_heads
        inner = self.head_dim * (1 if self.gate == "full" else 2)
        # q, k and v before the convolution, and on both sides of its activation; the gate, what is normalised, and the output.
        numbers = 9 * C + 3 * C + inner
        # In the precision of statistics the convolution keeps the rows that it pads.
        padded = 0 if shape.element_bytes < shape.statistics_bytes else shape.batch * (self.kernel - 1) * 3 * C
        each = Numbers(numbers, statistics=2 * C + 3 * H).bytes(shape.element_bytes)
        return shape.total_tokens * each + padded * shape.element_bytes
