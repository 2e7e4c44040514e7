"""ShortSWA: short sliding-window attention as a sublayer of its own, a local adaptive mixer before the global one."""

from typing import Literal

from pydantic import Field

from twoaxis.sequence.heads import HeadsConfig


class ShortSWAConfig(HeadsConfig):
    """Mixes the last `window` tokens with softmax weights, with projections of its own.

    Equation: S = H + ShortSWA(Norm(H); w),  y_t = W_o concat_h sum_{j=t-w+1..t} softmax_j(q_t^T k_j / sqrt(K)) v_j
    Source:   Residual Stream Duality in Modern Transformer Architectures, arXiv:2603.16039, Algorithm 1
    Deviates: the note leaves heads, kv-heads, RoPE, window and init open; defaults here are 4 heads, 1 kv-head, RoPE
              on absolute positions, window 128 (the chunk size its author argues for)
    Shapes:   context [B T D] -> update [B T D]; softmax and rotations in float32 (float64 for float64)
    Init:     EXACT with output_init="zero" (W_o = 0 adds nothing and still trains), NONE with "scaled"
    Cost:     params D*(H+2G)*K + H*K*D; pair flops 4*H*K*min(t, w) per token; cache at most w-1 keys and values
    Args:
        window: tokens seen, the query included.
        n_heads: query heads H.
        n_kv_heads: kv-heads G, a divisor of H.
        head_dim: K, even; None means d_model / n_heads.
        rope_theta: base of the rotation angles.
        qk_norm: per-head RMSNorm of queries and keys: `none`, `before_rope` or `after_rope`.
        output_init: `scaled` or `zero`.
        impl: `fused` (cost linear in T, no T x T mask) or `reference`.

    Further:  the other options of `attention`; in the place of a convolution inside attention, see `local_swa`

    Raises:
        ConfigError: heads, widths or windows that cannot be.

    Example:
        >>> ShortSWAConfig(window=16).receptive_field
        16
    """

    kind: Literal["short_swa"] = "short_swa"
    window: int = Field(default=128, ge=1)
    n_kv_heads: int | None = Field(default=1)

    @property
    def span(self) -> int | None:
        """The window."""
        return self.window
