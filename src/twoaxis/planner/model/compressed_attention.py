"""The attention of DeepSeek-V4: a short window of tokens, and compressed entries of several earlier tokens each.

Letters: D width, H heads, K channels of a head, Q width of the query latent, G output groups, O output rank, w window, m tokens
per entry, h heads and I channels of the indexer, N tokens.
"""

from dataclasses import dataclass

from twoaxis.core.cost import Cost, ElementCount, Shape, visible_pairs
from twoaxis.core.position import SublayerInfo, SublayerPosition
from twoaxis.model.cost import NORMS
from twoaxis.planner.model.part import Part


@dataclass(frozen=True)
class Indexer:
    """Scores all entries with narrow heads, and selects the best of them for each query.

    Attributes:
        n_heads: h.
        head_dim: I.
        top_k: the largest number of entries that a query sees.
    """

    n_heads: int
    head_dim: int
    top_k: int


@dataclass(frozen=True)
class Compressor:
    """Makes one entry of m tokens: their sum, weighted per channel by a softmax over them.

    With an indexer it is compressed sparse attention, whose entries overlap: two series of numbers per token, one for its own
    entry and one for the next. Without, heavily compressed attention.

    Attributes:
        rate: m.
        indexer: selects entries; None lets every query see all earlier ones.
    """

    rate: int
    indexer: Indexer | None = None

    @property
    def series(self) -> int:
        """Numbers per token and channel of an entry."""
        return 1 if self.indexer is None else 2

    @property
    def reach(self) -> int | None:
        """Tokens up to which a query sees all entries; None without an indexer."""
        return None if self.indexer is None else self.rate * self.indexer.top_k


@dataclass(frozen=True)
class CompressedAttention(Part):
    """Softmax attention of many heads over one vector per token, the last w of them, and over compressed entries.

    Equation: k_t = v_t = R_t Norm(W_kv x_t), one for all heads;  q_t = R_t Norm(W_q Norm(W_a x_t)), Norm of q without gain;
              entry e_i = Norm(sum_t softmax_t(W_g x_t + b_t) * W_e x_t) over m tokens, or 2 m of two series;
              y = W_o2 concat_g W_o1g R_t^-1 (heads of group g), heads attend to w tokens, entries of closed windows and a sink
    Source:   DeepSeek-V4 technical report, arXiv:2606.19348, section 2.3; transformers 5.24 models/deepseek_v4
    Deviates: counts what the model needs, where transformers scores every entry and masks. Entries are counted at 1/m per
              token, and their buffers as full, so that costs are linear in the tokens: at most one entry per query and one
              buffer per sequence too much. Selecting the best scores and the sink count no FLOPs
    Cost:     params D*Q + Q + Q*H*K + D*K + K + H*K*O + G*O*D + H, and s*(2*D*K + m*K) + K with s = 1 or 2 series for the
              entries, and for the indexer 2*(2*D*I + m*I) + I + Q*h*I + D*h; pair flops 4*H*K per token or entry that a query
              sees, and 2*h*(I + 1) per entry that it scores; cache K numbers per token of the window and per entry, I more per
              entry with an indexer, and 2*s*K (2*s*I) per token of the buffer, where entries overlap 2*K (2*I) more; saved,
              with fused norms, rotations and attention: latents, heads, output of attention, projections of the entries

    Attributes:
        n_heads: H.
        head_dim: K.
        q_rank: Q.
        rope_dim: channels of a head that are rotated.
        window: w, the query included.
        groups: G.
        output_rank: O, of one group.
        compressor: makes the entries; None for a window alone.

    Example:
        >>> from twoaxis.core.position import LayerStack
        >>> site = LayerStack(4096, 1e-6, (1,)).sites[0]
        >>> heavy = CompressedAttention(64, 512, 1024, 64, 128, groups=8, output_rank=1024, compressor=Compressor(128))
        >>> [heavy.cost(site, Shape(1, t, 2)).cache_bytes for t in (1_000, 1_000_000)]
        [400192, 8392192]
    """

    n_heads: int
    head_dim: int
    q_rank: int
    rope_dim: int
    window: int
    groups: int
    output_rank: int
    compressor: Compressor | None = None

    @property
    def kind(self) -> str:
        """The kind of the mixer."""
        return "compressed_attention"

    @property
    def windows(self) -> tuple[int, ...]:
        """The window and its cache, and the tokens up to which a query sees all entries."""
        found = {self.window, self.window - 1}
        if self.compressor is not None and self.compressor.reach is not None:
            found.add(self.compressor.reach)
        return tuple(sorted(tokens for tokens in found if tokens))

    def slot(self, d_model: int) -> SublayerInfo:
        """One input, since keys are values, and no heads that a depth mixer could mix."""
        return SublayerInfo(self.kind)

    def cost(self, site: SublayerPosition, shape: Shape) -> Cost:
        """The window, the projections, and the entries."""
        D, H, K, Q, N = site.d_model, self.n_heads, self.head_dim, self.q_rank, shape.total_tokens
        weights = Q * (D + H * K) + D * K + H * K * self.output_rank
        weights += self.groups * self.output_rank * (D + site.slot.update_extra)
        elementwise = NORMS["rms"][1] * (Q + H * K + K) + 3 * self.rope_dim * (2 * H + 1)
        numbers, statistics = 2 * (Q + K) + 3 * H * K + self.groups * self.output_rank, 2 * H + 2
        own = Cost(
            params=weights + Q + K + H,
            matmul_flops=2 * N * weights,
            pair_flops=4 * H * K * shape.batch * visible_pairs(shape.tokens, self.window),
            elementwise_flops=N * elementwise,
            saved_bytes=N * ElementCount(numbers, statistics).bytes(shape.element_bytes),
            cache_bytes=shape.batch * min(shape.tokens, self.window - 1) * K * shape.element_bytes,
        )
        return own if self.compressor is None else own + self._entries(self.compressor, D, shape)

    def _entries(self, made: Compressor, D: int, shape: Shape) -> Cost:
        """Costs of making entries and attending to them."""
        N, chosen = shape.total_tokens, made.indexer
        seen = shape.batch * visible_pairs(shape.tokens, made.reach)
        total = _entry_cost(self.head_dim, made, D, shape) + Cost(
            pair_flops=4 * self.n_heads * self.head_dim * seen // made.rate
        )
        if chosen is None:
            return total
        h, width = chosen.n_heads, chosen.head_dim
        weights = self.q_rank * h * width + D * h
        scored = shape.batch * visible_pairs(shape.tokens, None)
        own = Cost(
            params=weights,
            matmul_flops=2 * N * weights,
            pair_flops=2 * h * (width + 1) * scored // made.rate,
            elementwise_flops=3 * self.rope_dim * h * N,
            saved_bytes=N * ElementCount(h * width, statistics=h).bytes(shape.element_bytes),
        )
        return total + own + _entry_cost(width, made, D, shape)


def _entry_cost(width: int, made: Compressor, D: int, shape: Shape) -> Cost:
    """Costs of making and caching entries of one width."""
    N, per_token, rate = shape.total_tokens, made.series * width, made.rate
    weights = 2 * D * per_token
    # Numbers and their weights: of the entry that grows, and of the last one where the next overlaps it.
    buffered = 2 * rate * (per_token + (width if made.series == 2 else 0))
    return Cost(
        params=weights + rate * per_token + width,
        matmul_flops=2 * N * weights,
        elementwise_flops=N * 7 * per_token + N * NORMS["rms"][1] * width // rate,
        saved_bytes=ElementCount(N * 2 * per_token + N * width // rate, N * per_token).bytes(shape.element_bytes),
        cache_bytes=(N * width // rate + shape.batch * buffered) * shape.element_bytes,
    )
