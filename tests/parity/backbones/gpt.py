"""The decoder of the DenseFormer code: LayerNorm with a gain only, rotary pairs side by side, exact GELU, a tied head."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..golden import Golden


class GPT:
    """The branches of a stored decoder; `blocks` are the prefixes of its blocks, `root` that of everything else."""

    def __init__(self, golden: Golden, root: str, blocks: list[str]) -> None:
        self.golden, self.root, self.blocks = golden, f"param/{root}", [f"param/{block}" for block in blocks]
        self.n_heads = golden.about["config"]["n_head"]
        self.wte = golden.take(f"{self.root}wte.weight").requires_grad_()
        angles = torch.arange(golden.about["config"]["T"], dtype=torch.float64)[:, None] * golden.take("buffer/freqs")
        self.turn = torch.polar(torch.ones_like(angles), angles)

    def embeddings(self) -> Tensor:
        """The rows of the embedding; its gradient also has that of the head."""
        return F.embedding(self.golden.take("input/ids"), self.wte)

    def branch(self, index: int, x: Tensor) -> Tensor:
        """Attention at even sublayers, the feed-forward at odd ones."""
        block, golden = self.blocks[index // 2], self.golden
        u = _norm(x, golden.take(f"{block}.ln_{1 + index % 2}.weight"))
        if index % 2:
            hidden = F.gelu(u @ golden.take(f"{block}.mlp.c_fc.weight").T)
            return hidden @ golden.take(f"{block}.mlp.c_proj.weight").T
        projected = (u @ golden.take(f"{block}.attn.c_attn.weight").T).chunk(3, dim=-1)
        q, k, v = (y.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for y in projected)
        y = F.scaled_dot_product_attention(self._rotated(q), self._rotated(k), v, is_causal=True)
        return y.transpose(1, 2).flatten(2) @ golden.take(f"{block}.attn.c_proj.weight").T

    def logits(self, x: Tensor) -> Tensor:
        """The final norm and the tied head."""
        return _norm(x, self.golden.take(f"{self.root}ln_f.weight")) @ self.wte.T

    def _rotated(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * self.turn).flatten(-2)


def _norm(x: Tensor, gain: Tensor) -> Tensor:
    return F.layer_norm(x, gain.shape, gain, eps=1e-5)
