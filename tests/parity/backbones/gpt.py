"""The decoder of the DenseFormer code: LayerNorm, pairs rotated side by side, exact GELU, a tied head, biases or none."""

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
        angles = torch.arange(golden.tensors["input/ids"].shape[1], dtype=torch.float64)[:, None] * golden.take("buffer/freqs")
        self.turn = torch.polar(torch.ones_like(angles), angles)

    def embeddings(self) -> Tensor:
        """The rows of the embedding; its gradient also has that of the head."""
        return F.embedding(self.golden.take("input/ids"), self.wte)

    def branch(self, index: int, x: Tensor) -> Tensor:
        """Attention at even sublayers, the feed-forward at odd ones."""
        block = self.blocks[index // 2]
        u = self._norm(x, f"{block}.ln_{1 + index % 2}")
        if index % 2:
            return self._linear(F.gelu(self._linear(u, f"{block}.mlp.c_fc")), f"{block}.mlp.c_proj")
        projected = self._linear(u, f"{block}.attn.c_attn").chunk(3, dim=-1)
        q, k, v = (y.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for y in projected)
        y = F.scaled_dot_product_attention(self._rotated(q), self._rotated(k), v, is_causal=True)
        return self._linear(y.transpose(1, 2).flatten(2), f"{block}.attn.c_proj")

    def logits(self, x: Tensor) -> Tensor:
        """The final norm and the tied head."""
        return self._norm(x, f"{self.root}ln_f") @ self.wte.T

    def _rotated(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * self.turn).flatten(-2)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], *self._affine(name), eps=1e-5)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, *self._affine(name))

    def _affine(self, name: str) -> list[Tensor]:
        """The weight, and the bias where the fixture has one."""
        stored = [f"{name}.{part}" for part in ("weight", "bias") if f"{name}.{part}" in self.golden]
        return [self.golden.take(part) for part in stored]
