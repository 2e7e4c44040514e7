"""ShortSWA without projections: the branches of a sublayer attend to their own last few tokens, in the place of a convolution.

Letters: B batch, T position, P tokens of history, S = P + T, C channels, H heads, K key width, V value width, E width of any.
"""

from typing import Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.design import InitEquivalence, MixingDesign
from twoaxis.core.errors import ConfigError, problem
from twoaxis.core.layout import TokenLayout
from twoaxis.core.parameters import Constant
from twoaxis.core.position import SublayerPosition
from twoaxis.local.base import HistoryMixer, LocalConfig, Parts, TokenHistory, WindowKind, window_documents, window_pairs
from twoaxis.ops.local_attention import local_attention
from twoaxis.ops.precision import Impl, statistics_dtype
from twoaxis.ops.rope import RotationTable, layout_rotation, rotate, rotation

BRANCHES = 3
"""Queries, keys and values."""


class BranchSWAConfig(LocalConfig):
    """Mixes the last `window` tokens of each head of the channels, with scores that the channels give themselves.

    Equation: m_t = sum_j a_tj u_j over j from t-w+1 to t, or from w floor(t/w) with window_kind="chunk";
              self: a_tj = softmax_j(u_t^T u_j / sqrt(E)) for each head u of width E;
              shared: a_tj = softmax_j(q_t^T k_j / sqrt(K)), rotated, for the queries, keys and values of a head alike;
              y = act(u + m) residual, act(m) plain, act(u + gamma (m - u)) blend, with one gamma for each branch
    Source:   the companion text yifanzhang-pro/Rethinking-SWA of arXiv:2603.16039, which names the branches and the window of
              a chunk and leaves operator, scores and form open; these three forms are ours
    Deviates: no public code; local_swa has the form with projections of its own
    Shapes:   u [B T C] -> y [B T C]; softmax and rotations in float32 (float64 for float64)
    Init:     blend: gamma = 0, EXACT without activation (still trains); plain is EXACT at window=1; else NONE
    Cost:     params 0, or one for each branch in the blended form; pair flops per visible pair 4*E for each head (self) or
              2*(3*K+V) for each head of queries (shared); cache w-1 tokens of all C channels, more than a recurrent state may
              have. The share of visible pairs grows with w / d_model: 128 tokens are few only at a width of 1000 or more
    Args:
        window: tokens seen, the current one included.
        window_kind: `sliding`, or `chunk`: those since the last multiple of the window, by absolute position.
        scores: `self`, or `shared` in gated_delta_net and in attention with as many kv-heads as heads.
        form: `blend`, `residual` or `plain`.
        activation: `silu`, as behind a convolution in linear attention, or `none`.
        rope_theta: base of the rotation angles of shared scores.
        parts: heads of the channels and their width, side by side; None takes those of the sublayer.
        impl: `fused` or `reference`.

    Raises:
        ConfigError: shared scores without queries, keys and values of as many heads and an even width.

    Example:
        >>> BranchSWAConfig(window=8, parts=((2, 4), (2, 4), (2, 8)), scores="shared", form="plain").receptive_field
        8
    """

    kind: Literal["branch_swa"] = "branch_swa"
    window: int = Field(default=16, ge=1)
    window_kind: WindowKind = "sliding"
    scores: Literal["self", "shared"] = "self"
    form: Literal["blend", "residual", "plain"] = "blend"
    activation: Literal["silu", "none"] = "silu"
    rope_theta: float = Field(default=10_000.0, gt=0)
    parts: Parts | None = None
    impl: Impl = "fused"

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if self.parts is None:
            return self
        if not self.parts or min(number for part in self.parts for number in part) < 1:
            raise ConfigError(problem("parts", self.parts, "pairs of heads and width >= 1", "leave them out"))
        if self.scores == "shared":
            self.check_branches(tuple(heads for heads, _ in self.parts))
            (_, q), (_, k), _ = self.parts
            if q != k or q % 2:
                allowed = "an even number for queries and keys, since RoPE turns pairs of channels"
                raise ConfigError(problem("head_dim", q if q == k else (q, k), allowed, "change it, or use scores='self'"))
        return self

    def check_branches(self, heads: tuple[int, ...] | None) -> None:
        """Refuses shared scores without queries, keys and values of as many heads."""
        if self.scores == "shared" and (heads is None or len(heads) != BRANCHES or len(set(heads)) > 1):
            got = "no queries, keys and values" if heads is None else f"heads {heads}"
            allowed = "'self' here, since a head needs queries, keys and values of its own"
            raise ConfigError(f"scores='shared' with {got}: must be {allowed}; use it in gated_delta_net")

    def within(self, parts: Parts | None) -> Self:
        """The configuration for these parts, unless it names its own."""
        return self if parts is None or self.parts is not None else self.replace(parts=parts)

    def parts_of(self, channels: int) -> Parts:
        """The parts of so many channels; one head where none are known."""
        parts = self.parts or ((1, channels),)
        self.check_branches(tuple(heads for heads, _ in parts) if self.parts else None)
        if (total := sum(heads * width for heads, width in parts)) != channels:
            raise ConfigError(problem("parts", self.parts, f"{channels} channels, not {total}", "leave them out"))
        return parts

    @property
    def design(self) -> MixingDesign:
        """Attention over tokens without parameters."""
        shared = self.scores == "shared"
        return MixingDesign(
            query="q_t" if shared else "u_t",
            key="k_j" if shared else "u_j",
            value="q_j, k_j, v_j" if shared else "u_j",
            normaliser="softmax",
            window="last w tokens" if self.window_kind == "sliding" else "its chunk of w tokens",
            sharing="sublayer" if self.form == "blend" else "none",
            injection="added to the channels" if self.form == "residual" else "replaces the channels",
            weights="input and reader",
            position=True,
        )

    @property
    def receptive_field(self) -> int:
        """The window."""
        return self.window

    @property
    def init_equivalence(self) -> InitEquivalence:
        """Exact where the mixture has no weight yet, or no other token."""
        if self.activation == "none" and self.form == "blend":
            return InitEquivalence("exact", "gamma = 0 leaves the channels as they are")
        if self.activation == "none" and self.form == "plain" and self.window == 1:
            return InitEquivalence("exact", "a token alone is its own mixture")
        return InitEquivalence("none", "the mixture or the activation changes the channels")

    @property
    def rotations(self) -> frozenset[RotationTable]:
        """The rotation table of shared scores."""
        if self.scores == "self" or self.parts is None:
            return frozenset()
        return frozenset({RotationTable(self.parts[0][1], self.rope_theta)})

    def cost(self, channels: int, site: SublayerPosition, shape: Shape) -> Cost:
        """Costs of the visible pairs and of the form."""
        parts, N = self.parts_of(channels), shape.total_tokens
        if self.scores == "shared":
            (heads, key), _, (_, value) = parts
            pair, turned = 2 * (3 * key + value) * heads, 6 * heads * key
        else:
            pair, turned = sum(4 * heads * width for heads, width in parts), 0
        per_channel = {"plain": 0, "residual": 1, "blend": 3}[self.form] + 4 * (self.activation == "silu")
        return Cost(
            params=len(parts) if self.form == "blend" else 0,
            pair_flops=pair * shape.batch * window_pairs(shape.tokens, self.window, self.window_kind),
            elementwise_flops=N * (turned + per_channel * channels),
        )

    def build(self, channels: int, site: SublayerPosition) -> "BranchSWA":
        """Builds the mixer."""
        return BranchSWA(self, channels)


class BranchSWA(HistoryMixer, config=BranchSWAConfig):
    """See `BranchSWAConfig`."""

    def __init__(self, config: BranchSWAConfig, channels: int) -> None:
        super().__init__(config.receptive_field)
        self.config, self.parts = config, config.parts_of(channels)
        self.widths = [heads * width for heads, width in self.parts]
        if config.form == "blend":
            self.gamma = self.parameter("gamma", (len(self.parts),), Constant(0.0), "mixing")

    def mix(self, x: Tensor, layout: TokenLayout, history: TokenHistory, context: Tensor | None = None) -> Tensor:
        """Attends to the last tokens in each branch."""
        rows = x if history.tokens is None else torch.cat((history.tokens, x), dim=1)
        branches = [
            part.unflatten(-1, (heads, -1)).transpose(1, 2)
            for part, (heads, _) in zip(rows.split(self.widths, dim=-1), self.parts, strict=True)
        ]
        mixed = self._shared(branches, layout) if self.config.scores == "shared" else self._self(branches, layout)
        y = self._combined(x, [part.transpose(1, 2).flatten(2) for part in mixed])
        return F.silu(y) if self.config.activation == "silu" else y

    def _shared(self, branches: list[Tensor], layout: TokenLayout) -> list[Tensor]:
        """All branches [B H S _] by the scores of queries and keys; only those of new tokens are returned."""
        q, k, v = branches
        table, keys = RotationTable(q.shape[-1], self.config.rope_theta), q.shape[2]
        wide, H = statistics_dtype(q), q.shape[1]
        cached = keys > layout.positions.shape[1]
        turn = rotation(layout.key_positions(keys), table, wide) if cached else layout_rotation(layout, table, wide)
        turned = rotate(torch.cat((q, k), dim=1).transpose(1, 2), turn).transpose(1, 2)
        y = self._attended(turned[:, :H], turned[:, H:], torch.cat((q, k, v), dim=-1), layout)
        return list(y.split([q.shape[-1], k.shape[-1], v.shape[-1]], dim=-1))

    def _self(self, branches: list[Tensor], layout: TokenLayout) -> list[Tensor]:
        return [self._attended(u, u, u, layout) for u in branches]

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout) -> Tensor:
        config, keys = self.config, k.shape[2]
        documents, seen = window_documents(layout, config.window, config.window_kind, keys)
        q = q[:, :, keys - layout.positions.shape[1] :]
        return local_attention(q, k, v, window=config.window, documents=documents, key_documents=seen, impl=config.impl)

    def _combined(self, x: Tensor, mixed: list[Tensor]) -> Tensor:
        if self.config.form == "blend":
            own = x.split(self.widths, dim=-1)
            wide = statistics_dtype(x)
            parts = zip(own, mixed, self.gamma.to(wide), strict=True)
            return torch.cat([u + (gamma * (m - u)).to(x.dtype) for u, m, gamma in parts], dim=-1)
        whole = torch.cat(mixed, dim=-1)
        return x + whole if self.config.form == "residual" else whole
