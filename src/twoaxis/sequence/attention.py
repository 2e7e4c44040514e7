"""Causal self-attention: multi-head, grouped-query or multi-query, full or windowed."""

from typing import Literal

from pydantic import Field

from twoaxis.core.position import SublayerPosition
from twoaxis.sequence.heads import HeadsConfig, SoftmaxAttention


class AttentionConfig(HeadsConfig):
    """Mixes all earlier tokens (or the last `window`) with softmax weights: the plain model's own sequence mixer.

    Equation: y_t = W_o concat_h sum_j softmax_j(q_t^T k_j / sqrt(K)) v_j,  q = R_t W_q c_t,  k = R_j W_k c_j,  v = W_v c_j
    Source:   Attention Is All You Need, arXiv:1706.03762, eq. 1; GQA arXiv:2305.13245; RoPE arXiv:2104.09864, eq. 15
    Deviates: no biases, as in Llama, those of queries, keys and values, as in Qwen2, or the output's too, as in gpt-oss;
              qk_norm per head before RoPE as in Qwen3, after it as in the DDL reference code, or of keys alone after it as in
              Depth-Attention; unequal gains in a rotation pair then make scores depend on absolute positions
    Sink:     one more score s in the softmax of each head, with a value of zero, which multiplies the output by
              sigmoid(logsumexp(scores) - s): learned, as in gpt-oss, or s = (W_s c_t)_h, as in Inkling-2. Added to a trained
              model, a sink leaves it as it is only in the limit s -> -inf; at s = 0 a first token of score 0 is halved
    Shapes:   context [B T D] -> update [B T D]; softmax, norms and rotations in float32 (float64 for float64)
    Init:     W_q, W_k, W_v ~ N(0, 0.25/D), W_o ~ N(0, 0.25/(H K 2 n_layers)) or zero, gains 1, biases 0, sinks 0 or
              N(0, 0.0004)
    Cost:     params D*(H+2G)*K + H*K*D; matmul flops 2 per weight and token; pair flops 4*H*K per visible pair;
              cache 2*G*K numbers per token
    Args:
        n_heads: query heads H.
        n_kv_heads: kv-heads G, a divisor of H; None means H (MHA), 1 is MQA.
        head_dim: K, even; None means d_model / n_heads.
        window: tokens seen, the query included; None means all.
        rope_theta: base of the rotation angles.
        rope_dim: channels of each head that are rotated, the first ones; None means all, 0 none (NoPE).
        rope_scaling: slower angles for longer texts: `llama3`, `yarn` or `linear` with their options; None leaves them.
        qk_norm: RMSNorm of queries and keys: `none`, `before_rope` (behind their projection), `after_local` (behind
            projected_local, before rotation, as in Inkling), `after_rope`, or `key_after_rope`, of queries before.
        qk_norm_over: one norm for each `head` (one gain for all heads), or over `all_heads` together (OLMo 2, Canon).
        bias: `qkv` adds a bias to queries, keys and values, `all` to the output too (gpt-oss).
        sink: `learned` gives each head a score that takes part in the softmax with a value of zero (gpt-oss); `per_token`
            projects it from the context of the query (Inkling-2).
        sink_init: of the scores, or of their projection: `zero` (GraniteSWA, DeepSeek-V4) or `normal` (gpt-oss: N(0, 0.0004)).
        input_local: a local mixer of the context, such as `canon` (place A of the Canon paper) or `local_swa`.
        projected_local: a local mixer of queries, keys and values before rotation (place B), such as `dynamic_conv`.
        projected_branches: which of q, k and v it mixes.
        update_local: a local mixer of the update before it enters the residual stream, as in Inkling.
        output_init: `scaled`, or `zero` for a sublayer that adds nothing at first.
        impl: `fused` or `reference`.

    Raises:
        ConfigError: heads, widths or windows that cannot be.

    Example:
        >>> AttentionConfig(n_heads=8, n_kv_heads=2, window=128).receptive_field
        128
    """

    kind: Literal["attention"] = "attention"
    window: int | None = Field(default=None, ge=1)

    @property
    def span(self) -> int | None:
        """The window."""
        return self.window

    def build(self, site: SublayerPosition) -> SoftmaxAttention:
        """Builds the mixer at this site."""
        self.check(site.d_model)
        return Attention(self, site)


class Attention(SoftmaxAttention, config=AttentionConfig):
    """See `AttentionConfig`."""
