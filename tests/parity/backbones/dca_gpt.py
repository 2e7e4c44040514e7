"""The decoder of the deep-cross-attention package: rotary pairs side by side, biases in the feed-forward, an untied head."""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twoaxis.core.parameters import initialise
from twoaxis.core.position import LayerStack, SublayerInfo
from twoaxis.core.views import QKV
from twoaxis.depth import DeepCrossAttentionConfig
from twoaxis.depth.deep_cross_attention import DeepCrossAttention
from twoaxis.depth.history import History

from ..golden import Golden

EPS = torch.finfo(torch.float64).eps
"""What their norms, which leave eps open, use in float64."""


class DCABlocks(nn.Module):
    """Our mixers and ends around the branches of a fixture."""

    def __init__(self, golden: Golden, depth: DeepCrossAttentionConfig, prefixes: list[str]) -> None:
        super().__init__()
        self.golden, self.prefixes = golden, [f"param/{prefix}" for prefix in prefixes]
        config = golden.about["config"]
        self.n_heads = config["heads"]
        n_blocks = len(prefixes)
        slots = (SublayerInfo("attention", takes_views=True), SublayerInfo("gelu")) * n_blocks
        stack = depth.prepare(LayerStack(config.get("dim", config.get("d")), EPS, (2,) * n_blocks, slots))
        mixers, ends = depth.build(stack)
        self.mixers, self.ends = nn.ModuleList(mixers), ends
        initialise(self, 0)
        self.double()

    def block(self, index: int, state: History) -> tuple[QKV, Tensor, History]:
        """Runs one block; returns what its attention read and gave, and the next state."""
        mixers = cast(Any, self.mixers)
        first, second = mixers[2 * index], mixers[2 * index + 1]
        views, carry, _ = cast(DeepCrossAttention, first).read(state)
        assert isinstance(views, QKV)
        attention = self.attention(self.prefixes[index], views)
        state = first.write(state, attention, views, carry)
        view, carry, _ = second.read(state)
        update = self.feed_forward(self.prefixes[index], view)
        return views, attention, second.write(state, update, view, carry)

    def attention(self, prefix: str, views: QKV) -> Tensor:
        """Their attention, with a norm for each input."""
        heads = []
        for name, x in zip("qkv", views, strict=True):
            u = norm(x, self.golden.take(f"{prefix}attn.to_{name}.0.weight"))
            heads.append((u @ self.golden.take(f"{prefix}attn.to_{name}.1.weight").T).unflatten(-1, (self.n_heads, -1)))
        freqs = self.golden.take(f"{prefix}attn.rotary_embed.freqs")
        # Allocated by the package, and never used.
        self.golden.take(f"{prefix}attn.norm.weight")
        q, k, v = (x.transpose(1, 2) for x in heads)
        y = F.scaled_dot_product_attention(_rotated(q, freqs), _rotated(k, freqs), v, is_causal=True)
        return y.transpose(1, 2).flatten(2) @ self.golden.take(f"{prefix}attn.to_out.weight").T

    def feed_forward(self, prefix: str, x: Tensor) -> Tensor:
        """Their feed-forward, behind its norm."""
        weights = [self.golden.take(f"{prefix}ff.{layer}.{name}") for layer in (0, 2) for name in ("weight", "bias")]
        hidden = F.gelu(F.linear(norm(x, self.golden.take(f"{prefix}pre_ff_norm.weight")), *weights[:2]))
        return F.linear(hidden, *weights[2:])


def norm(x: Tensor, gain: Tensor) -> Tensor:
    """Their RMSNorm."""
    return F.rms_norm(x, gain.shape, gain, EPS)


def _rotated(x: Tensor, freqs: Tensor) -> Tensor:
    angles = torch.arange(x.shape[-2], dtype=torch.float64)[:, None] * freqs
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)
