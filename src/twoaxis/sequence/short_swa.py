"""ShortSWA: short sliding-window attention as a sublayer of its own, a local adaptive mixer before the global one.

Letters: B batch, T position, E emitted numbers.
"""

from typing import Literal

from pydantic import Field

from twoaxis.core.design import MixingDesign
from twoaxis.core.position import SublayerPosition
from twoaxis.sequence.heads import HeadsConfig, SoftmaxAttention


class ShortSWAConfig(HeadsConfig):
    """Mixes the last `window` tokens with softmax weights, with projections of its own.

    Equation: S = H + ShortSWA(Norm(H); w),  y_t = W_o concat_h sum_{j=t-w+1..t} softmax_j(q_t^T k_j / sqrt(K)) v_j
    Source:   Residual Stream Duality in Modern Transformer Architectures, arXiv:2603.16039, section 2.4 and Algorithm 1
    Deviates: the note leaves heads, kv-heads, RoPE, window and init open; defaults here are 4 heads, 1 kv-head, RoPE on
              absolute positions, window 128 (the chunk size that its author's companion text Rethinking-SWA names). The output
              starts at the scale of attention's, 1 / sqrt(2 n_layers) of a plain matrix, so that models with and without it
              share initial values. A block then writes three times, so the stream spreads more; 1 / sqrt(3 n_layers) would
              prevent that
    Shapes:   context [B T D] -> update [B T D]; softmax and rotations in float32 (float64 for float64)
    Init:     EXACT with output_init="zero" (W_o = 0 adds nothing and still trains), NONE with "scaled";
              W_q, W_k, W_v ~ N(0, 0.25/D), W_o ~ N(0, 0.25/(H K 2 n_layers)) or zero, as in attention
    Cost:     params D*(H+2G)*K + H*K*D; pair flops 4*H*K*min(t, w) per token; cache at most w-1 keys and values
    Args:
        window: tokens seen, the query included.
        n_heads: query heads H.
        n_kv_heads: kv-heads G, a divisor of H.
        head_dim: K, even; None means d_model / n_heads.
        rope_theta: base of the rotation angles.
        qk_norm: per-head RMSNorm of queries and keys: `none`, `before_rope`, `after_rope` or `key_after_rope`.
        sink: `none`, `learned` or `per_token`, as in attention; published models with windows of 128 have one.
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
    def design(self) -> MixingDesign:
        """Attention over tokens."""
        return MixingDesign(
            query="W_Q c_t",
            key="W_K c_t",
            value="W_V c_t",
            normaliser="softmax",
            window="last w tokens",
            sharing="sublayer",
            injection="added to the stream through W_O",
            weights="input and reader",
            position=True,
        )

    @property
    def span(self) -> int | None:
        """The window."""
        return self.window

    def build(self, site: SublayerPosition) -> SoftmaxAttention:
        """Builds the mixer at this site."""
        self.check(site.d_model)
        return ShortSWA(self, site)


class ShortSWA(SoftmaxAttention, config=ShortSWAConfig):
    """See `ShortSWAConfig`.

    Example:
        >>> import torch
        >>> short_swa = ShortSWA(d_model=8, window=2, output_init="zero")
        >>> update, _ = short_swa(torch.ones(1, 3, 8))
        >>> update.abs().max().item()
        0.0
    """
