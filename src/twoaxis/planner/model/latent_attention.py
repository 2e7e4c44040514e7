"""Multi-head latent attention (MLA): keys and values of all heads are maps of one narrow vector per token.

Letters: D width, H heads, C width of the key-value latent, Q of the query latent, P channels of a head without positions,
R channels with positions (one key for all heads), V value channels of a head, N tokens.
"""

from dataclasses import dataclass, replace
from typing import Literal, Self

from twoaxis.core.cost import Cost, Shape, visible_pairs
from twoaxis.core.site import Site, Slot
from twoaxis.core.state import Numbers
from twoaxis.model.cost import NORMS
from twoaxis.planner.model.part import Part


@dataclass(frozen=True)
class LatentAttention(Part):
    """Attends with keys and values that are widened from a latent, which is all that generation keeps.

    Equation: c_t = Norm(W_c x_t) of width C, r_t = R_t W_r x_t of width R;  k_th = (W_k c_t, r_t),  v_th = W_v c_t;
              q_th = W_q x_t, or W_q Norm(W_a x_t) through Q;  y = W_o concat_h softmax(q k^T) v
    Source:   DeepSeek-V2, arXiv:2405.04434, section 2.1
    Cost:     params D*(C + R) + C + C*H*(P + V) + H*V*D, and D*H*(P + R) or D*Q + Q + Q*H*(P + R); pair flops
              2*H*(P + R + V) per visible pair, or 2*H*(2*C + R) in the absorbed form; cache C + R numbers per token; saved,
              with fused norms, rotations and attention: latents before and behind their norms, all heads, the output of
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
        form: `widened`, the heads of every token written out as in training and prefill; or `absorbed`, which moves W_k to the
            queries and W_v to the outputs, so that heads attend in the latent. Generation works in this form, since the other
            widens the whole cache at every token; products with parameters and the result are the same.

    Example:
        >>> from twoaxis.core.site import Stack
        >>> site = Stack(7168, 1e-6, (1,)).sites[0]
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
        """The same mixer as generation runs it."""
        return replace(self, form="absorbed")

    @property
    def kind(self) -> str:
        """The name of the mixer."""
        return "latent_attention"

    def slot(self, d_model: int) -> Slot:
        """One input, since keys and values share a latent, and no heads that a depth mixer could mix."""
        return Slot(self.kind)

    def cost(self, site: Site, shape: Shape) -> Cost:
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
        # Beside the statistic of each head: one number of each norm.
        statistics = H + 1 + (self.q_rank is not None)
        return N * Numbers(numbers, statistics).bytes(shape.element_bytes)
